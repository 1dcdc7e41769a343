"""When training becomes durable."""

from typing import Literal

from pydantic import Field

from shared.config.base import Config


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
    """Training waits only until the state is copied into the trainer's memory, and goes on while the copy is written to
    the disk. Until that is done the copy takes as much memory as the checkpoint has bytes, for all ranks on the host of
    the first; where that is more than half of what is free there, training waits for the disk, as with false."""
    durability: Literal["checkpoint", "step"] = "checkpoint"
    """checkpoint: groups count as trained when a checkpoint contains them, and a crash replays the plans since then;
    step: they count as trained after each step, which needs less Redis memory and loses the steps since the last
    checkpoint in a crash."""
    resume_from: str | None = None
    """A checkpoint of ours that the experiment begins from: weights, optimiser, learning-rate schedule and the place in
    the data; steps are counted on from it. ``EXPERIMENT`` or ``EXPERIMENT@STEP`` of the same gateway, or a path: a
    checkpoint's folder, or an experiment's or a run's, with ``@STEP`` if it is not the newest. null: from the weights
    of ``model.path``. See docs/continue.md."""
