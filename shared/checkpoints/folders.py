"""Checkpoints on disk, as all services read them: which exist, and the metadata of each.

The trainer writes them; the gateway looks here for what is durable, since its database may be older or newer. Whoever
writes there could make links to what they may not read and the gateway may: so below a checkpoint none is followed, and
the gateway names the folder (``below``) from which on it follows none on the way to the checkpoint either.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from re import compile as pattern
from typing import Any, BinaryIO, Final, Literal

import xxhash
from pydantic import ConfigDict, Field, ValidationError

from flotilla.shared.config.sections.model import with_later_keys
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.files.beneath import read_beneath, sizes_beneath
from flotilla.shared.net.absence import absent_or
from flotilla.shared.schemas.live_changes import CurriculumState, LiveChange
from flotilla.shared.schemas.wire import Described, PlainName

CHECKPOINTS = "checkpoints"
"""Folder of an experiment's directory."""
STATE_FILE = "state.json"
MODEL = "model"
"""Folder of a checkpoint: a Hugging Face directory."""
CHECKPOINT_SCHEMA: Final = 1
OPTIMIZER = "optimizer.safetensors"
VERSIONS = "versions.safetensors"
CRITIC = "critic.safetensors"
AVERAGE = "average.safetensors"
READ_BYTES = 8 << 20
FIXED_WEIGHTS = (("model", "path"), ("model", "dtype"), ("model", "lora"))
"""Settings that determine the tensors of a checkpoint."""
LATER_KEYS = ("changes", "reward_moments", "curriculum", "closed")
"""Keys of the state that an earlier release refuses: they are written where they hold something."""
_COMPLETE = pattern(r"step-(\d{8})")


class ClosedIds(Described):
    """Ids that count as trained in a checkpoint, whatever became of their groups: none of them comes again.

    Where many groups are filtered, each run of them would be two intervals more of what was trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    below: int = Field(ge=0)
    """Of ids lower than this it is not known any more which were trained."""
    untrained: int = Field(ge=0)
    """How many of those that count as trained were not."""


class CheckpointState(Described):
    """Everything of a checkpoint but tensors. Times are not in it: the same training gives the same file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = CHECKPOINT_SCHEMA
    experiment_id: str
    step: int = Field(ge=1)
    version: int = Field(ge=0)
    """Policy version that the weights are, or, between two publications, that they are trained from."""
    published_step: int | None = None
    """Steps that ``version`` contains; null where an earlier release wrote it."""
    lost_versions: list[list[int]] = Field(default_factory=list)
    """Numbers, as closed intervals, of versions that are not in this lineage."""
    lineage: str = ""
    """Names the groups of every step, in order; empty where an earlier release wrote it."""
    recent: list[dict[str, Any]] = Field(default_factory=list)
    """Plans of the last steps, oldest first: a data plane that came back older learns from them what was trained."""
    updates: int = Field(ge=0)
    """Optimiser updates done."""
    trained: list[list[int]]
    """Ids of all groups trained in this lineage, as closed intervals; and those that ``closed`` says."""
    seed: int
    """What the losses draw in a step is seeded by this and the step's number: no generator's state needs keeping."""
    kl_coefficient: float | None
    totals: Mapping[str, int]
    """Figures that grow over the experiment."""
    spec: Mapping[str, Any]
    software: Mapping[str, str]
    files: Mapping[PlainName, int]
    """Size in bytes of each file: a checkpoint with another file size is not complete."""
    figure: float | None = None
    """Mean of ``checkpoint.best.metric`` over the steps since the checkpoint before, where the spec names one."""
    changes: tuple[LiveChange, ...] = ()
    """Live changes of the spec that hold for ``version``, oldest first; ``spec`` has those of the trainer."""
    reward_moments: tuple[int, float, float] | None = None
    """Number, mean and variance of all rewards so far, where advantages compare with them."""
    curriculum: CurriculumState | None = None
    """What was known of the rows of a curriculum when the version began, see there."""
    closed: ClosedIds | None = None
    """Ids that ``trained`` has though not all of their groups were; null where it has none."""
    checksums: Mapping[PlainName, str] = {}
    """xxh3-64 of each file; empty where an earlier release wrote it."""

    @property
    def num_trained(self) -> int:
        """How many groups this lineage has trained."""
        listed = sum(last - first + 1 for first, last in self.trained)
        return listed - (0 if self.closed is None else self.closed.untrained)

    def to_text(self) -> str:
        """Write it as the file has it: an earlier release reads it wherever no later key holds anything."""
        return self.model_dump_json(indent=1, exclude={name for name in LATER_KEYS if not getattr(self, name)})


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint on disk.

    Attributes:
        below: a folder on the way to it, from which on no link is followed; None: none below ``path``.
    """

    step: int
    path: Path
    state: CheckpointState
    below: Path | None = None

    def open(self, name: str) -> BinaryIO:
        """Open one of its files.

        Raises:
            OSError: it is not there, cannot be read, or a link leads to it.
        """
        return _open(self.path, name, self.below)


def _open(path: Path, name: str, below: Path | None) -> BinaryIO:
    return read_beneath(path, name) if below is None else read_beneath(below, f"{path.relative_to(below)}/{name}")


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's folder by its name; None where it is no such name."""
    match = _COMPLETE.fullmatch(name)
    return int(match.group(1)) if match else None


def folders(directory: Path) -> list[tuple[int, Path]]:
    """List the folders of checkpoints, complete or not, by step in ascending order."""
    if not directory.is_dir():
        return []
    matches = [(path, _COMPLETE.fullmatch(path.name)) for path in directory.iterdir()]
    return sorted((int(match.group(1)), path) for path, match in matches if match)


def complete(directory: Path, below: Path | None = None, only: int | None = None) -> Iterator[StoredCheckpoint]:
    """Go through the complete checkpoints, newest first: every file is there and has its size.

    Args:
        directory: of them.
        below: as of ``state_of``.
        only: the step of the one that is examined; None: all.

    Raises:
        ModelError: the next one was written by a newer release.
    """
    for step, path in reversed(folders(directory)):
        if only not in {None, step}:
            continue
        state = state_of(path, below)
        if state is not None and state.step == step:
            yield StoredCheckpoint(step, path, state, below)


def sizes(directory: Path) -> dict[str, int]:
    """Measure every file below a directory, in bytes; links are no files of it."""
    return dict(sorted(sizes_beneath(directory).items()))


def checksum(path: Path) -> str:
    """Compute the xxh3-64 of a file, in hexadecimal; blocks."""
    with path.open("rb", buffering=0) as file:
        return _digest(file)


def _digest(file: RawIOBase | BinaryIO) -> str:
    digest = xxhash.xxh3_64()
    while chunk := file.read(READ_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def check_files(stored: StoredCheckpoint, moved: Callable[[], None] = lambda: None) -> None:
    """Read every file once, and compare it with what was written; blocks.

    Args:
        stored: a checkpoint.
        moved: called after each file.

    Raises:
        ModelError: a file has other bytes.
    """
    for name, expected in stored.state.checksums.items():
        try:
            with stored.open(name) as file:
                found = _digest(file)
        except OSError as error:
            raise absent_or(error, ModelError(f"checkpoint {stored.path} cannot be read: {error}")) from error
        if found != expected:
            raise ModelError(f"checkpoint {stored.path} is damaged: {name} is not what was written")
        moved()


def state_of(path: Path, below: Path | None = None) -> CheckpointState | None:
    """Read a checkpoint's metadata; None if it does not exist, is not readable, or lacks files.

    Args:
        path: its folder.
        below: a folder on the way to it, from which on no link is followed; None: none below ``path``.

    Raises:
        ModelError: it has keys that are not known here, as a newer release writes them.
    """
    try:
        with _open(path, STATE_FILE, below) as file:
            state = CheckpointState.model_validate_json(file.read())
        found = sizes_beneath(path) if below is None else sizes_beneath(below, str(path.relative_to(below)))
    except ValidationError as error:
        if unknown := [str(each["loc"][0]) for each in error.errors() if each["type"] == "extra_forbidden"]:
            raise ModelError(
                f"checkpoint {path} was written by a newer release of Flotilla: this one does not know "
                f"{', '.join(unknown)} in its {STATE_FILE}; go on with that release, or move the checkpoint away to go "
                "on from an older one"
            ) from error
        return None
    except OSError:
        return None
    return state if all(found.get(name) == size for name, size in state.files.items()) else None


def differences(
    state: CheckpointState, spec: ExperimentSpec, fields: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str, Any, Any]]:
    """Go through settings, by section and key, that a checkpoint was made with otherwise: with both values."""
    now = spec.model_dump(mode="json")
    for section, key in fields:
        before, after = state.spec.get(section, {}).get(key), now[section][key]
        if key == "lora":
            before = with_later_keys(before)
        if before != after:
            yield section, key, before, after
