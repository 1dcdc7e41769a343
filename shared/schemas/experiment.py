"""Experiments as the control plane shows them, and the services of each."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from flotilla.shared.schemas.health import HealthFinding
from flotilla.shared.schemas.later_values import shown
from flotilla.shared.schemas.live_changes import LiveChange, WeightsFrom
from flotilla.shared.schemas.wire import PlainName, TolerantWire, Wire


class RuleFired(TolerantWire):
    """A rule that acted."""

    rule: str
    at: str
    step: int
    """Of the point that met its condition."""
    version: int
    """Policy version of that point."""
    value: float
    """Of that point."""
    best: float | None = None
    """The best value before, where the condition is a plateau."""
    did: str
    """What it did; or why it could not, which counts as well."""
    changes: tuple[str, ...] = ()
    """Ids of the live changes that it made."""


class RuleView(TolerantWire):
    """A rule and where it stands."""

    name: str
    metric: str
    times: int
    """How often it acts at most."""
    num_fired: int
    """How often it has acted, actions included that only a checkpoint remembers."""
    num_points: int
    """Points of its series since it acted last, or since the run began."""
    num_met: int
    """The newest of them in a row that meet its condition: as many as its patience make it act."""
    patience: int
    fired: tuple[RuleFired, ...]
    """Oldest first."""


Item = TypeVar("Item", bound=BaseModel)


class ExperimentState(StrEnum):
    """``draft -> starting -> running <-> paused -> stopping -> stopped | completed``, or failed.

    What has ended can begin again: see docs/continue.md.
    """

    DRAFT = "draft"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing happens in this state any more, unless it is resumed or extended."""
        return self in {ExperimentState.STOPPED, ExperimentState.COMPLETED, ExperimentState.FAILED}


class ExperimentKind(StrEnum):
    """The origins of a decision about an experiment."""

    SPEC = "spec"
    TINKER = "tinker"
    """A client of the Tinker API: see docs/tinker.md."""


class Problem(TolerantWire):
    """The component and the cause of a failure or of a stall."""

    component: str
    cause: str
    at: str


class Origin(TolerantWire):
    """The checkpoint that an experiment began from."""

    experiment_id: str
    """That made it, perhaps under another gateway."""
    step: int
    """Optimiser steps that it contains: the experiment counts on from here."""
    version: int
    """Policy version that was newest when it was made."""
    path: str
    """Its folder then; the experiment has a copy."""
    first_group_id: int
    """Where the experiment's own groups begin: after the last one that the checkpoint contains."""
    source_weights: tuple[WeightsFrom, ...] = ()
    """By which weights the other experiment took turns among its sources, oldest first: turns continue from there."""
    generated_tokens: int = 0
    """Of the checkpoint's figures, which the experiment's own continue from; 0 where an earlier release took it."""


class ForkRequest(Wire):
    """What a fork differs in from the experiment that it begins from."""

    step: int | None = Field(None, ge=1)
    """Of the checkpoint; null: the newest that is whole."""
    changes: Mapping[str, Any] = {}
    """Keys of the spec, merged into the other experiment's; a section whose ``kind`` changes is replaced."""


class ExtendRequest(Wire):
    """How far an experiment shall train."""

    steps: int = Field(ge=1)
    """The new ``optimisation.steps``, more than there are."""


class ExperimentView(TolerantWire):
    """An experiment and where it stands."""

    id: str
    name: str
    kind: Annotated[ExperimentKind, shown(ExperimentKind)] = ExperimentKind.SPEC
    """Of ``tinker`` there is no spec, and ``total_steps`` is 0: its client decides."""
    state: Annotated[ExperimentState, shown(ExperimentState)]
    revision: int
    spec: Mapping[str, Any]
    created_at: str
    updated_at: str
    step: int
    total_steps: int
    policy_version: int
    services: Mapping[str, tuple[str, ...]]
    """Ids of the services that work for it, by kind."""
    problem: Problem | None = None
    """Set in state failed, and while something stalls."""
    health: tuple[HealthFinding, ...] = ()
    """What training-health checks see; see docs/health.md."""
    directory: str
    origin: Origin | None = None
    """The checkpoint that it began from; null if it began with the model's weights."""
    owner: str | None = None
    """Whose it is; null: the fleet's own."""
    changes: tuple[LiveChange, ...] = ()
    """What was changed of ``spec``, which has it, while the experiment ran; oldest first."""
    groups_from: str | None = None
    """The experiment whose groups it trains: `data.from` of its spec; null: its own."""

    @property
    def reached(self) -> str:
        """How far it is, as people read it: ``3/200``, or ``3`` where a client decides how many steps there will be."""
        return str(self.step) if self.kind is ExperimentKind.TINKER else f"{self.step}/{self.total_steps}"


class Page(TolerantWire, Generic[Item]):
    """One page of a list; ``next`` is the cursor of the following one, or None."""

    items: tuple[Item, ...]
    next: str | None = None


class MetricPoint(TolerantWire):
    """One value of one series."""

    name: str
    step: int
    version: int
    value: float
    at: str | None = None


class Series(TolerantWire):
    """One series as columns of the same length, by step."""

    name: str
    num_points: int
    """Of the series, as far as this page reaches; more than its columns have where it was thinned."""
    steps: tuple[int, ...]
    versions: tuple[int, ...]
    values: tuple[float, ...]
    seconds: tuple[float | None, ...]
    """Since the epoch, when the value was stored."""


class SeriesPage(TolerantWire):
    """Series by name; ``next`` is the cursor that continues all of them."""

    items: tuple[Series, ...]
    next: str | None = None
    common: tuple[int, ...] | None = None
    """Steps that every series has here if it was measured there; null where no series was thinned, so all are."""


MAX_METRICS = 4096
MAX_METRIC_NAME = 256


class MetricBatch(TolerantWire):
    """What a service reports about one step; the gateway stores each step of a series once."""

    # The route names the values that are not finite.
    model_config = ConfigDict(allow_inf_nan=True)

    step: int = Field(ge=0)
    version: int = Field(ge=0)
    values: Mapping[Annotated[str, Field(max_length=MAX_METRIC_NAME)], float] = Field(max_length=MAX_METRICS)


class Event(TolerantWire):
    """Something that happened to an experiment; ``id`` grows and is the ``Last-Event-ID`` of the event stream."""

    id: int
    type: str
    at: str
    data: Mapping[str, Any]


class AuditEntry(TolerantWire):
    """One mutation of an experiment."""

    at: str
    action: str
    actor: str
    """Name of the token that was shown."""
    detail: Mapping[str, Any]


class CheckpointView(TolerantWire):
    """A durable checkpoint."""

    step: int
    version: int
    path: str
    at: str


class CheckpointFile(TolerantWire):
    """A file of a checkpoint."""

    name: PlainName
    """Its path in the checkpoint, such as ``model/config.json``."""
    size_bytes: int
    checksum: str
    """xxh3-64; empty where an earlier release wrote the checkpoint."""


class CheckpointFiles(TolerantWire):
    """What a checkpoint consists of."""

    step: int
    path: str
    """Its directory, as the gateway sees it."""
    files: tuple[CheckpointFile, ...]


class FailingService(TolerantWire):
    """A service of an experiment that does not work now, and tries again or has given up."""

    service_id: str
    component: str
    cause: str


class DiagnosisView(TolerantWire):
    """What bounds the speed of an experiment, seen over a recent window; see docs/metrics.md."""

    component: str
    """generation, agents, reward, trainer, admission, publication, redis, evaluation or data; or none."""
    cause: str
    advice: str
    """Which setting or service would change it."""
    window_seconds: float
    """How far back the evidence reaches."""
    evidence: Mapping[str, float]
    """Shares of time between 0 and 1, round trips in seconds, depths in groups."""
    problem: Problem | None = None
    """A stall or failure, which comes before any question of speed."""
    health: tuple[HealthFinding, ...] = ()
    """A run that learns nothing is no faster for more speed."""
    rules: tuple[RuleView, ...] = ()
    """Rules of the spec, where each stands, and what each did."""
    failing: tuple[FailingService, ...] = ()
    """The service that does not work now, such as one whose engine is restarting: it bounds the speed until then."""
    lending: str | None = None
    """Whether the trainer's devices are lent to rollouts now, and why; null where the spec does not let them be."""


class UploadView(TolerantWire):
    """How far the copy of a checkpoint is."""

    state: Literal["pending", "uploading", "failed", "uploaded", "removed"]
    """uploaded: all of its files were there with their sizes, and its state.json, when the gateway looked last;
    pending: its turn will come; failed: the last attempt failed, and it is tried again; removed: neither there nor to
    come, since it was removed from the disk (``checkpoint.keep``, ``best``)."""
    url: str
    """Of its folder."""
    at: str | None = None
    """When it was found to be whole there for the first time."""
    cause: str | None = None
    """Why the last attempt failed."""


class ListedCheckpoint(CheckpointView):
    """A durable checkpoint, and its copy."""

    upload: UploadView | None = None
    """null where the spec names no URL."""


class UploadCheck(TolerantWire):
    """A checkpoint on the disk beside its copy."""

    step: int
    url: str
    """Of the copy's folder."""
    is_whole: bool
    missing: tuple[str, ...]
    """Files that are not there with their size; state.json alone where the copy is no checkpoint, or another one."""


class UploadedCheckpoint(TolerantWire):
    """A copy that is whole."""

    at: str
    digest: str
    """xxh3-64 of its state.json: another lineage's checkpoint of the same step is another one."""


class UploadRecord(TolerantWire):
    """What the gateway keeps of an experiment's copies.

    Attributes:
        url: of the folder that has a folder of each step.
        local: steps of the checkpoints on the disk, when it looked last.
        uploaded: copies that are whole, by step.
        uploading: the step that is being copied.
        cause: why nothing can be copied now.
    """

    url: str
    local: tuple[int, ...] = ()
    uploaded: Mapping[str, UploadedCheckpoint] = {}
    uploading: int | None = None
    cause: str | None = None

    def view_of(self, step: int) -> UploadView:
        """Return the state of the copy of a step's checkpoint."""
        url = f"{self.url}/step-{step:08d}"
        done = self.uploaded.get(str(step))
        if done is not None:
            return UploadView(state="uploaded", url=url, at=done.at)
        if self.local and step < max(self.local) and step not in self.local:
            return UploadView(state="removed", url=url)
        if self.cause is not None:
            return UploadView(state="failed", url=url, cause=self.cause)
        return UploadView(state="uploading" if step == self.uploading else "pending", url=url)


class KindShare(TolerantWire):
    """What an experiment has of one kind of service, and should have."""

    min: int
    """It starts with this many, and others never take these away."""
    max: int | None
    """It never gets more than this many; null: no bound."""
    share: int
    """What it should have now: its minimum and its part of the surplus; 0 while it cannot start."""
    services: tuple[str, ...]
    """Ids of those that work for it."""
    leaving: Mapping[str, str]
    """Those of them that were asked to leave, and why."""


class ExperimentShare(TolerantWire):
    """What an active experiment has of the fleet."""

    experiment_id: str
    name: str
    state: ExperimentState
    weight: float
    priority: int
    kinds: Mapping[str, KindShare]
    waiting: str | None
    """What it waits for, and which experiment has it; null if it has all that it needs."""
    lending: str | None = None
    """Whether the trainer's devices are lent to rollouts now, and why; null where the spec does not let them be."""


class FleetView(TolerantWire):
    """The fleet by quota."""

    experiments: tuple[ExperimentShare, ...]
    """Active experiments, the earliest started first."""
    idle: Mapping[str, tuple[str, ...]]
    """Services without an experiment, by kind."""
