"""Commands of the leader to the followers: each executes them on its own shard, all at the same time."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.sections.checkpoint import EVERYTHING, Content
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.wire import Wire
from flotilla.shared.telemetry.logging import LogFormat


class Opening(Wire):
    """Before the group is formed: what is trained, and how this job logs."""

    spec: Mapping[str, Any]
    experiment_id: str
    log_level: str
    log_format: LogFormat


class Find(Wire):
    """Look for a file that the leader wrote: all ranks must see the experiment's directory."""

    kind: Literal["find"] = "find"
    path: str
    content: str


class Restore(Wire):
    """Build the learner from a checkpoint, or from the spec's model where there is none."""

    kind: Literal["restore"] = "restore"
    path: str | None


class Train(Wire):
    """Train a step, or only measure its loss; its groups follow."""

    kind: Literal["train"] = "train"
    step: int
    learns: bool = True
    payload_bytes: int = 0
    bounds: tuple[tuple[int, int, int, str], ...] = ()
    """Of passes, as the leader has them: first step and piece of work, tokens, why."""
    bounds_path: str | None = None


class Follow(Wire):
    """Train by another spec, which differs in keys that can change while an experiment runs."""

    kind: Literal["follow"] = "follow"
    spec: Mapping[str, Any]

    def read(self) -> ExperimentSpec:
        """Validate it."""
        return validate_spec(self.spec)


class KeepVersion(Wire):
    """Remember the present weights as a version, and forget older ones."""

    kind: Literal["keep_version"] = "keep_version"
    version: int
    oldest: int


class Snapshot(Wire):
    """Write into an image, whose header is written already; on other hosts send what belongs there to the leader."""

    kind: Literal["snapshot"] = "snapshot"
    path: str


class Save(Wire):
    """Write into the files of a checkpoint, which have their size and their headers already; or send, likewise.

    Attributes:
        paths: of the files, by name.
        contents: what the checkpoint holds.
        is_copy: whether they are in the host's memory, and the leader writes them to the disk later.
    """

    kind: Literal["save"] = "save"
    paths: Mapping[str, str]
    contents: tuple[Content, ...] = EVERYTHING
    is_copy: bool = False


class Offload(Wire):
    """Move weights and optimiser off the device."""

    kind: Literal["offload"] = "offload"
    directory: str


class Reload(Wire):
    """Move them back."""

    kind: Literal["reload"] = "reload"


class End(Wire):
    """Leave the job."""

    kind: Literal["end"] = "end"


Command = Find | Restore | Train | Follow | KeepVersion | Snapshot | Save | Offload | Reload | End
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
