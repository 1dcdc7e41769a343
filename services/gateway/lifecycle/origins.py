"""Where an experiment begins that continues from a checkpoint of another: found, checked, and made its own.

The files get a second name in the new experiment's directory (a hard link; a copy on another disk), so that nothing
that becomes of the older experiment touches the new one. From then on it is an experiment that comes back from its
newest checkpoint, as after any crash. A directory is marked as unfinished until its record is stored: what a crash
leaves without a record is removed at the next start.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from flotilla.services.gateway.records.spec_texts import (
    RESUME_FROM,
    is_place,
    local_paths,
    named_in,
    parts_below,
    reached,
)
from flotilla.services.gateway.records.steering import weights_by_group
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import CURRICULUM, PutWindow
from flotilla.shared.checkpoints.folders import (
    AVERAGE,
    CHECKPOINTS,
    CRITIC,
    FIXED_WEIGHTS,
    OPTIMIZER,
    READ_BYTES,
    STATE_FILE,
    VERSIONS,
    StoredCheckpoint,
    check_files,
    complete,
    differences,
    folders,
)
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.config.sections.checkpoint import EVERYTHING
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError, InvalidSpec, ModelError, Unavailable
from flotilla.shared.files.beneath import link_to
from flotilla.shared.files.durable import flush
from flotilla.shared.schemas.experiment import Origin
from flotilla.shared.streams.intervals import IntervalSet

log = logging.getLogger(__name__)

UNFINISHED = "unfinished"
"""Marks the directory of an experiment whose record may not be stored yet."""
UNKNOWN = "unknown"
"""In the place of who made a checkpoint whose file names an experiment of another owner; no id is like it."""
FIELD = RESUME_FROM
ATTEMPTS = 3


def check_owned(spec: ExperimentSpec, owner: str, owner_of: Callable[[str], str | None], experiments: Path) -> None:
    """Refuse a spec of an owner that names files of the fleet that are not the owner's; blocks.

    Args:
        spec: of the experiment to come.
        owner: of the token that asks.
        owner_of: finds whose an experiment is.
        experiments: the folder of their directories, in the fleet's own.

    Raises:
        InvalidSpec: it names something in the fleet's directory that is in no experiment of this owner.
    """
    root = os.path.realpath(experiments.parent)
    for key, text in named_in(spec.model_dump(mode="json")):
        found = [parts for path in local_paths(key, text) for parts in _meant(key, path, root)]
        if not all(is_owned(parts, owner, owner_of, experiments.name) for parts in found):
            what = "is" if all(found) else "is, or leads to what is,"
            raise InvalidSpec(f"{key}: {text} {what} in the fleet's own directory, and in no experiment of {owner}")


def _meant(key: str, path: str, root: str) -> list[tuple[str, ...]]:
    found = reached(path, root, as_pattern=is_place(key))
    return [parts for parts in found if parts or is_place(key) or os.path.realpath(path) == root]


def is_owned(parts: Sequence[str], owner: str, owner_of: Callable[[str], str | None], experiments: str) -> bool:
    """Whether a path below the fleet's directory, or all that a pattern means, is in an experiment of an owner.

    Args:
        parts: of the path, as ``reached`` gives them.
        experiments: the name of the folder of their directories.
    """
    is_below = len(parts) > 1 and parts[0] == experiments and os.pardir not in parts
    return is_below and owner_of(parts[1]) == owner


def check_opened(path: str, owner: str, owner_of: Callable[[str], str | None], experiments: Path) -> None:
    """Refuse what a path has led to; blocks.

    Raises:
        DataError: it is in the fleet's directory, and in no experiment of this owner.
    """
    parts = parts_below(path, os.path.realpath(experiments.parent))
    if parts and not is_owned(parts, owner, owner_of, experiments.name):
        raise DataError(f"{path} is in the fleet's own directory, and in no experiment of {owner}", path=path)


def parse_reference(text: str) -> tuple[str, int | None]:
    """Split ``WHERE`` or ``WHERE@STEP``; the step is None where it is not named."""
    where, at, step = text.rpartition("@")
    return (where, int(step)) if at and step.isdigit() else (text, None)


def checkpoints_at(path: Path) -> Path:
    """Find the folder of checkpoints that a path means: theirs, an experiment's, or that of a run's only experiment.

    Raises:
        InvalidSpec: the path is relative.
        ModelError: there is none, or there are several.
    """
    if not path.is_absolute():
        raise InvalidSpec(f"{FIELD}: an absolute path is wanted, got {path}: a request has no folder of its own")
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    if folders(path):
        return path
    found = sorted(each for each in path.glob(f"fleet/experiments/*/{CHECKPOINTS}") if each.is_dir())
    if len(found) > 1:
        several = ", ".join(str(each.parent) for each in found)
        raise ModelError(f"{FIELD}: several experiments are in {path}, say which: {several}")
    if not found:
        raise ModelError(f"{FIELD}: there is no checkpoint of ours in {path}")
    return found[0]


def choose(directory: Path, step: int | None, below: Path | None = None) -> StoredCheckpoint:
    """Find the checkpoint of a step, or the newest that is whole; reads every file of it, and blocks.

    Args:
        directory: of checkpoints.
        step: None for the newest.
        below: a folder on the way to them, from which on no link is followed.

    Raises:
        ModelError: there is none; or the one that was named is damaged, or vanished while it was read.
    """
    damage: ModelError | None = None
    for _ in range(ATTEMPTS):
        for stored in complete(directory, below, step):
            try:
                check_files(stored)
            except ModelError as error:
                log.warning("checkpoint is passed over", extra={"path": str(stored.path), "error": error.detail})
                damage = damage or error
                continue
            return stored
        if step is not None or damage is None:
            break
    if damage is not None:
        raise damage
    there = ", ".join(str(number) for number, _ in folders(directory)) or "none"
    wanted = "no checkpoint" if step is None else f"no whole checkpoint of step {step}"
    raise ModelError(f"{FIELD}: there is {wanted} in {directory}; steps that are there: {there}")


def find(path: Path, step: int | None, below: Path | None = None) -> StoredCheckpoint:
    """Find the checkpoint that a path and a step mean: the path may be the checkpoint's own folder, too.

    Args:
        path: as a person wrote it, or an experiment's directory.
        step: None for the newest.
        below: where the path is an experiment's, the folder of them all: from there on no link is followed.

    Raises:
        InvalidSpec: the path is relative.
        ModelError: there is none that is whole.
    """
    if (path / STATE_FILE).is_file():
        own = [number for number, folder in folders(path.parent) if folder.name == path.name]
        if not own or step not in {None, own[0]}:
            raise ModelError(f"{FIELD}: {path} is not the folder of {'a step' if step is None else f'step {step}'}")
        return choose(path.parent, own[0], below)
    return choose(checkpoints_at(path), step, below)


def forked(spec: ExperimentSpec, reference: str, changes: Mapping[str, Any]) -> ExperimentSpec:
    """Make the spec of a fork: that of its parent with some keys changed, from a checkpoint.

    Raises:
        InvalidSpec: the changed spec does not validate.
    """
    begins = {"resume_from": reference}
    # What the parent itself left behind where it began is no wish of the fork's.
    begun = with_changes(spec, {"checkpoint": begins | {"load_contents": list(EVERYTHING)}})
    return with_changes(with_changes(begun, changes), {"checkpoint": begins})


def as_decided(stored: StoredCheckpoint, spec: ExperimentSpec) -> ExperimentSpec:
    """Let what a spec leaves open, and may not differ from the checkpoint's, be as it was decided there."""
    now, before = spec.model_dump(mode="json"), stored.state.spec
    found = {
        (section, key): before[section][key]
        for section, key in FIXED_WEIGHTS
        if now[section][key] == "auto" and before.get(section, {}).get(key, "auto") != "auto"
    }
    for (section, key), value in found.items():
        spec = with_changes(spec, {section: {key: value}})
    return spec


def check_spec(stored: StoredCheckpoint, spec: ExperimentSpec) -> None:
    """Refuse settings that do not go with a checkpoint.

    Raises:
        InvalidSpec: no step is left to train.
        ModelError: another model is named, or the checkpoint lacks what the algorithm needs.
    """
    if spec.optimisation.steps <= stored.step:
        raise InvalidSpec(
            f"optimisation.steps: the checkpoint contains {stored.step} steps already, got {spec.optimisation.steps}: "
            "set a greater number"
        )
    for section, key, before, after in differences(stored.state, spec, FIXED_WEIGHTS):
        begins = f"model.path {stored.path / 'model'}"
        if stored.state.spec.get("model", {}).get("lora") is not None:
            begins = f"what flotilla export {stored.path} DIRECTORY writes as model.path"
        raise ModelError(
            f"{section}.{key}: the checkpoint of step {stored.step} was made with {json.dumps(before)}, the spec "
            f"says {json.dumps(after)}: set it back, or start another experiment, without {FIELD} and with {begins}"
        )
    if "optimizer" in spec.checkpoint.load_contents and OPTIMIZER not in stored.state.files:
        raise ModelError(
            f"{FIELD}: {stored.path} has no {OPTIMIZER}, which checkpoint.contents left out there: set "
            "checkpoint.load_contents to [model, extra] to begin with moments of 0"
        )
    needed = {CRITIC: spec.algorithm.needs_critic, VERSIONS: spec.algorithm.old_log_probs == "recompute_at_version"}
    for name, is_needed in needed.items():
        if is_needed and name not in stored.state.files:
            raise ModelError(
                f"{FIELD}: {stored.path} has no {name}, which this algorithm goes on from: keep the algorithm, or "
                f"begin from its weights with model.path {stored.path / 'model'}"
            )


def take(
    stored: StoredCheckpoint, spec: ExperimentSpec, experiment_id: str, directory: Path, parent: Origin | None = None
) -> Origin:
    """Make a checkpoint the first one of a new experiment; blocks.

    Args:
        stored: that was found to be whole.
        spec: of the new experiment.
        directory: of the new experiment; marked as unfinished.
        parent: where the experiment began that made the checkpoint; None if it is no fork, or not known here.

    Raises:
        ModelError: it vanished meanwhile.
        Unavailable: the disk is full or not writable. Nothing remains in either case.
    """
    folder = directory / CHECKPOINTS
    partial = folder / f".{stored.path.name}.{secrets.token_hex(4)}"
    try:
        directory.mkdir(parents=True)
        (directory / UNFINISHED).touch()
        _fill(partial, stored, spec, experiment_id)
        partial.rename(folder / stored.path.name)
        flush(folder)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, FileNotFoundError) and not stored.path.is_dir():
            raise ModelError(
                f"{FIELD}: the checkpoint {stored.path} vanished while it was taken: its experiment keeps the newest "
                "checkpoint.keep of them"
            ) from error
        raise Unavailable(f"checkpoint {stored.path} could not be taken: {error}") from error
    trained = IntervalSet.from_list(stored.state.trained).to_list()
    begun = () if parent is None else (parent.source_weights, parent.first_group_id)
    return Origin(
        experiment_id=stored.state.experiment_id,
        step=stored.step,
        version=stored.state.version,
        path=str(stored.path),
        first_group_id=trained[-1][1] + 1 if trained else 0,
        source_weights=weights_by_group(stored.state.spec, stored.state.changes, *begun),
        generated_tokens=stored.state.totals.get("generated_tokens", 0),
    )


def stage_rows(change: Transaction, experiment_id: str, stored: StoredCheckpoint, spec: ExperimentSpec) -> None:
    """Take over a checkpoint's curriculum statistics, if the experiment has the same rows."""
    before = {**(stored.state.spec.get("data") or {}), "curriculum": None}
    now = {**spec.data.model_dump(mode="json"), "curriculum": None}
    if stored.state.curriculum and spec.data.curriculum is not None and before == now:
        change.write(PutWindow(experiment_id, CURRICULUM, stored.state.curriculum.model_dump(mode="json")))


def _fill(partial: Path, stored: StoredCheckpoint, spec: ExperimentSpec, experiment_id: str) -> None:
    loaded = spec.checkpoint.load_contents
    parts = {"optimizer": {OPTIMIZER}, "extra": {VERSIONS, AVERAGE}}
    left = {name for part, names in parts.items() if part not in loaded for name in names}
    files = {name: size for name, size in stored.state.files.items() if name not in left}
    for name in files:
        target = partial / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with stored.open(name) as source:
            _link(source, target)
    checksums = {name: value for name, value in stored.state.checksums.items() if name in files}
    # The fork's spec has what was changed, and nothing was changed of that.
    changed: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "changes": ()}
    configured = None if spec.algorithm.kl is None else spec.algorithm.kl.coefficient
    if configured != ((stored.state.spec.get("algorithm") or {}).get("kl") or {}).get("coefficient"):
        # Where a controller brought the parent's is of no use for another one.
        changed["kl_coefficient"] = configured
    if stored.state.reward_moments is not None and not _compares_alike(spec, stored.state.spec):
        changed["reward_moments"] = None
    own = {"experiment_id": experiment_id, "files": files, "checksums": checksums} | changed
    state = stored.state.model_copy(update=own)
    with (partial / STATE_FILE).open("w", encoding="utf-8") as file:
        file.write(state.to_text())
        file.flush()
        os.fsync(file.fileno())
    for each in {partial, *(path.parent for path in partial.rglob("*"))}:
        flush(each)


def _compares_alike(spec: ExperimentSpec, before: Mapping[str, Any]) -> bool:
    """Whether rewards are made, and compared with earlier ones, as by a parent's spec."""
    now = spec.algorithm.advantage
    try:
        reward = type(spec.reward).model_validate(before["reward"])
        advantage = type(now).model_validate(before["algorithm"]["advantage"])
    except (LookupError, ValidationError):
        return False
    return (reward.components, reward.shaping, advantage) == (spec.reward.components, spec.reward.shaping, now)


def _link(source: BinaryIO, target: Path) -> None:
    try:
        link_to(source.fileno(), target)
    except OSError:  # another disk, no right to link, or the last name was taken away
        with target.open("xb") as copy:
            shutil.copyfileobj(source, copy, READ_BYTES)
        flush(target)


def finish(directory: Path) -> None:
    """Take the mark of an unfinished directory away: its record is stored."""
    (directory / UNFINISHED).unlink(missing_ok=True)


def remove_unfinished(experiments: Path, is_known: Callable[[str], bool]) -> None:
    """Remove what a crash left of experiments that were never stored, and finish those that were."""
    for mark in experiments.glob(f"*/{UNFINISHED}"):
        if is_known(mark.parent.name):
            finish(mark.parent)
        else:
            log.info("an experiment that was never stored is removed", extra={"directory": str(mark.parent)})
            shutil.rmtree(mark.parent, ignore_errors=True)
