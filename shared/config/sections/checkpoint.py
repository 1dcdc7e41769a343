"""When training becomes durable."""

import re
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from flotilla.shared.config.base.model import Config

Content = Literal["model", "optimizer", "extra"]
"""model: weights, a critic's too; optimizer: moments and float32 masters, of both; extra: kept versions of the weights
and their moving average."""
EVERYTHING: Final[tuple[Content, ...]] = ("model", "optimizer", "extra")

FOLDER_URL: Final = re.compile(r"[a-z][a-z0-9+]*://[^:?#]+")


class BestCheckpointsConfig(Config):
    """Checkpoints that stay although newer ones were written, because a figure was best there."""

    keep: int = Field(1, ge=1)
    """How many stay beside the newest."""
    metric: str = Field("reward/mean", min_length=1)
    """Any series that the trainer reports of a step (docs/metrics.md), such as held_out/loss of a job on finished
    answers: its mean over the steps since the checkpoint before."""
    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""


class CheckpointConfig(Config):
    """A checkpoint holds weights, optimiser, schedule, and the ids of every group trained in its lineage."""

    every_steps: int = Field(20, ge=1)
    """Steps between two checkpoints; the last step is always followed by one."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    best: BestCheckpointsConfig | None = None
    """Also keep those where a figure was best; null keeps the newest alone."""
    asynchronous: bool = True
    """Training waits only until the state is copied into the trainer's memory, and continues while the copy is written
    to the disk. Until that is done the copy takes as much memory as the checkpoint has bytes, for all ranks on the host
    of the first; where that is more than half of what is free there, training waits for the disk, as with false."""
    upload_to: str | None = None
    """URL of a folder, such as s3://bucket/checkpoints: the gateway copies each whole checkpoint to
    ``<experiment id>/step-N`` below it, beside training, and removes there what ``keep`` and ``best`` remove. The
    operator's FLOTILLA_CHECKPOINT_URLS lists the URLs that a spec may name; it needs ``flotilla[data]`` and the
    protocol's package. null: they stay in the experiment's directory alone."""
    durability: Literal["checkpoint", "step"] = "checkpoint"
    """checkpoint: groups count as trained when a checkpoint contains them, and a crash replays the plans since then;
    step: they count as trained after each step, which needs less Redis memory and loses the steps since the last
    checkpoint in a crash."""
    contents: tuple[Content, ...] = EVERYTHING
    """What each checkpoint holds, model at least: model is the weights (a critic's too), optimizer AdamW's moments and
    float32 masters, extra the weights of earlier versions and the moving average where they are kept. Steps, data and
    schedule always continue. Without optimizer whatever continues from it, after a crash as well, begins with moments
    of 0 and records so, and bfloat16 weights with the rounding of the file."""
    final_contents: tuple[Content, ...] | None = None
    """The same of the checkpoint after the last step, such as [model]; null: as contents."""
    load_contents: tuple[Content, ...] = EVERYTHING
    """What is taken over of resume_from, model at least: [model] begins with moments of 0 and without kept versions and
    average. What is named and was left out there is refused."""
    resume_from: str | None = None
    """A Flotilla checkpoint that the experiment begins from: weights, optimiser, learning-rate schedule and the place
    in the data; steps are counted on from it. ``EXPERIMENT`` or ``EXPERIMENT@STEP`` of the same gateway, or a path or a
    URL: a checkpoint's folder, or an experiment's (of a path also a run's), with ``@STEP`` if it is not the newest.
    null: from the weights of ``model.path``. See docs/continue.md."""

    @field_validator("upload_to")
    @classmethod
    def _names_a_folder(cls, url: str | None) -> str | None:
        if url is not None and not FOLDER_URL.fullmatch(url):
            raise ValueError("must be the URL of a folder, such as s3://bucket/checkpoints, without port and query")
        return url

    @model_validator(mode="after")
    def _check_contents(self) -> Self:
        for name in ("contents", "final_contents", "load_contents"):
            chosen = getattr(self, name)
            if chosen is not None and ("model" not in chosen or len(set(chosen)) < len(chosen)):
                raise ValueError(f"{name} names each of its parts once, and model among them, got {list(chosen)}")
        if self.resume_from is None and set(self.load_contents) != set(EVERYTHING):
            raise ValueError("load_contents has no effect without resume_from: leave it out, or name a checkpoint")
        return self

    def contents_at(self, step: int, last_step: int) -> tuple[Content, ...]:
        """Return what the checkpoint after a step holds."""
        final = self.final_contents if step == last_step else None
        return self.contents if final is None else final
