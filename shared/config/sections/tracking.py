"""What is kept of what the model wrote and computed, what is profiled, and where metrics go besides the gateway."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.resources import GIBIBYTE, MEBIBYTE

Number = Annotated[int, Field(ge=0, lt=2**31)]


class ProfilerConfig(Config):
    """Chrome traces of torch's profiler, in the folder `profiles` beside the checkpoints; see docs/monitoring.md.

    Nothing is recorded unless a step or a version is named. All keys can change while the experiment runs.
    """

    steps: tuple[Annotated[int, Field(ge=1, lt=2**31)], ...] = Field((), max_length=64)
    """Steps of the trainer, each in a file of its own."""
    ranks: tuple[Number, ...] | None = Field((0,), max_length=64)
    """Ranks of the trainer that record them. Null: all."""
    engine_versions: tuple[Number, ...] = Field((), max_length=64)
    """Policy versions under which each rollout records its first steps; the embedded engine alone does."""
    engine_steps: int = Field(32, ge=1, le=128)
    """Steps of the engine that such a file has: each gives every running sample one token. Fewer where torch would take
    more than half a second to end the recording, in which the engine stands still."""


class SamplesConfig(Config):
    """Samples are kept in parquet files, in the folder `samples` beside the checkpoints, to be examined and replayed.

    A group is kept whole: all of its answers. Writing never holds a step back: what comes faster than the disk takes
    it, or finds it full, is left out and counted.
    """

    groups_per_step: int | None = Field(None, ge=0)
    """Groups kept of each trained step, its first ones. Null: all, so that the step can be replayed."""
    ended_per_version: int = Field(8, ge=0)
    """Groups kept of those that were filtered or dropped, or failed: as many per policy version and reason, by each
    service that ends groups."""
    max_bytes: int = Field(2 * GIBIBYTE, ge=MEBIBYTE)
    """Bound on all files together. Beyond it the oldest file goes of the kind that takes most."""
    max_age_hours: float | None = Field(None, gt=0)
    """Files older than this are removed. Null: no bound."""


class JsonlTrackerConfig(Config):
    """A JSONL file: one line per step of a service, and one per evaluation."""

    kind: Literal["jsonl"] = "jsonl"
    directory: str | None = Field(None, min_length=1)
    """Where ``<experiment id>/metrics.jsonl`` is written; null for ``metrics.jsonl`` in the experiment's own directory.
    A relative path is taken from the spec file's folder."""


class TensorboardTrackerConfig(Config):
    """An event file for TensorBoard; needs no further package."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: str | None = Field(None, min_length=1)
    """Where ``<experiment id>/events.out.tfevents...`` is written; null for ``tensorboard/`` in the experiment's own
    directory. A relative path is taken from the spec file's folder."""


class WandbTrackerConfig(Config):
    """Weights & Biases; needs ``flotilla[wandb]`` where the gateway runs, and its WANDB_API_KEY unless offline."""

    kind: Literal["wandb"] = "wandb"
    project: str = Field("flotilla", min_length=1)
    """Project that the run is shown in."""
    entity: str | None = Field(None, min_length=1)
    """User or team; null for the key's own."""
    group: str | None = Field(None, min_length=1)
    """Runs of one group are shown together; null for none."""
    mode: Literal["online", "offline"] = "online"
    """offline: written below the experiment's directory, for ``wandb sync``. An online run continues right after what
    the service holds; offline, a gateway that is killed may write its last batch twice, with the same steps."""


class MlflowTrackerConfig(Config):
    """MLflow; needs ``flotilla[mlflow]`` where the gateway runs."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = Field(None, min_length=1)
    """Server or database, such as https://host:5000 or sqlite:////data/mlflow.db; null takes the gateway's
    MLFLOW_TRACKING_URI."""
    experiment: str = Field("flotilla", min_length=1)
    """MLflow's experiment, in which ours is a run."""


class TrackioTrackerConfig(Config):
    """Trackio; needs ``flotilla[trackio]`` where the gateway runs."""

    kind: Literal["trackio"] = "trackio"
    project: str = Field("flotilla", min_length=1)
    """Project that the run is shown in; the run has the experiment's id."""
    group: str | None = Field(None, min_length=1)
    """Runs of one group are shown together; null for none."""
    space: str | None = Field(None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """Space of Hugging Face, as owner/name, that is made private if it is not there; needs the gateway's HF_TOKEN. Null
    keeps the run where the gateway runs, in its TRACKIO_DIR: `trackio show` there."""


class SwanlabTrackerConfig(Config):
    """SwanLab; needs ``flotilla[swanlab]`` where the gateway runs, and its SWANLAB_API_KEY unless offline.

    A training step is the run's step. Where a trainer repeats a step after a crash, SwanLab keeps the first value.
    """

    kind: Literal["swanlab"] = "swanlab"
    project: str = Field("flotilla", max_length=100, pattern=r"^[0-9a-zA-Z_\-+.]+$")
    """Project that the run is shown in; the run has the experiment's id."""
    workspace: str | None = Field(None, max_length=25, pattern=r"^[0-9a-zA-Z_\-]+$")
    """User or organisation; null for the key's own."""
    group: str | None = Field(None, min_length=1, max_length=512)
    """Runs of one group are shown together; null for none."""
    mode: Literal["online", "offline"] = "online"
    """offline: written below the experiment's directory, for ``swanlab sync DIRECTORY`` of each of the run's
    directories: one for each time that a gateway began. The gateway's SWANLAB_API_HOST names a server of your own."""


TrackerConfig = Annotated[
    JsonlTrackerConfig
    | TensorboardTrackerConfig
    | WandbTrackerConfig
    | MlflowTrackerConfig
    | TrackioTrackerConfig
    | SwanlabTrackerConfig,
    Field(discriminator="kind"),
]
"""One tracker, chosen by ``kind``."""


class TrackingConfig(Config):
    """Trackers that the gateway feeds from its own record of every series.

    Every value arrives there once and in order, also over a restart of the gateway. A step that a trainer repeats after
    a crash is sent again, and the later value holds. A tracker that fails is named in an event and tried again;
    training does not wait for it.
    """

    trackers: tuple[TrackerConfig, ...] = ()
    """Each kind at most once; none by default, since the gateway keeps every series anyway (``flotilla watch``)."""
    profiler: ProfilerConfig = ProfilerConfig()

    @model_validator(mode="after")
    def _each_kind_once(self) -> Self:
        kinds = [tracker.kind for tracker in self.trackers]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise ValueError(f"tracking.trackers names the kind {twice} twice: keep one of them")
        return self
