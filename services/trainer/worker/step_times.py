"""What a step is reported as: how long its parts took, in figures and in its groups' traces, and what it learned."""

import copy
import math
import time
from typing import NamedTuple

from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.learning.learner import StepResult
from flotilla.shared.errors import ModelError
from flotilla.shared.telemetry.logging import experiment_id
from flotilla.shared.telemetry.tracing.recording import tracer
from flotilla.shared.telemetry.tracing.tracer import Attribute, Span, issue_of

MAX_BROKEN_STEPS = 3


class GradientWatch:
    """Ends training that has stopped to learn anything."""

    def __init__(self) -> None:
        self._broken_steps = 0

    def check(self, result: StepResult, step: int) -> None:
        """Record what a step gave.

        Raises:
            ModelError: for several steps in a row, no gradient was finite.
        """
        is_broken = not any(update.is_applied for update in result.updates)
        self._broken_steps = self._broken_steps + 1 if is_broken else 0
        if self._broken_steps == MAX_BROKEN_STEPS:
            raise ModelError(f"the gradient was not finite in {MAX_BROKEN_STEPS} steps, the last one being step {step}")


class StepTimes:
    """Durations of the last step, and of the version that it belongs to."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._waited = 0.0
        self._elapsed = 0.0

    def with_step(self, planned: StepGroups, compute: float, publish: float, checkpoint: float | None) -> "StepTimes":
        """Return what ``add`` would make of this."""
        times = copy.copy(self)
        times.add(planned, compute, publish, checkpoint)
        return times

    def add(self, planned: StepGroups, compute: float, publish: float, checkpoint: float | None) -> None:
        """Record a step's durations in seconds; ``checkpoint`` is None while that is not over."""
        step = planned.wait_seconds + compute + publish + (checkpoint or 0.0)
        self._waited += planned.wait_seconds
        self._elapsed += step
        self.values = {
            "time/wait_seconds": planned.wait_seconds,
            "time/pace_seconds": planned.pace_seconds,
            "time/compute_seconds": compute,
            "time/publish_seconds": publish,
            "time/step_seconds": step,
        }
        if checkpoint is not None:
            self.values["time/checkpoint_seconds"] = checkpoint

    def idle_ratio(self) -> float:
        """Divide the time waited for groups by all time since the last call; a version's, if called once for each."""
        ratio = self._waited / self._elapsed if self._elapsed else 0.0
        self._waited = self._elapsed = 0.0
        return ratio


def describe_step(
    result: StepResult, times: StepTimes, publication_seconds: float, *, ends_version: bool
) -> dict[str, float]:
    """Put together what computing a step gave and how long it took.

    ``trainer/idle_ratio`` is reported once per version, over all of its steps; a gradient that is not finite is left
    out of ``grad_norm`` and counted in ``updates/skipped``.
    """
    norms = [update.grad_norm for update in result.updates if update.is_applied]
    values = dict(result.metrics) | times.values
    values |= {
        "learning_rate": result.updates[-1].learning_rate,
        "updates/in_step": float(len(result.updates)),
        "updates/skipped": float(len(result.updates) - len(norms)),
        "time/publication_seconds": publication_seconds,
    }
    if norms:
        values["grad_norm"] = sum(norms) / len(norms)
    if ends_version:
        values["trainer/idle_ratio"] = times.idle_ratio()
    return {name: value for name, value in values.items() if math.isfinite(value)}


class StepMoments(NamedTuple):
    """When a step began, was computed, began to be published and had handed its version over: monotonic seconds."""

    started: float
    computed: float
    measured: float
    published: float


def record_step(planned: StepGroups, version: int, published: int | None, moments: StepMoments) -> None:
    """Record a step in the traces of its groups.

    Args:
        planned: what it trained.
        version: that it trained.
        published: the version that was made of it; None where the next step continues with the same.
        moments: of its parts.
    """
    made, experiment = tracer(), experiment_id.get()
    if made is None or experiment is None:
        return
    since_epoch = time.time() - time.monotonic()
    started, computed, measured, ended = (since_epoch + each for each in moments)
    facts: dict[str, Attribute] = {
        "flotilla.step": planned.plan.step,
        "flotilla.version": version,
        "flotilla.is_replay": planned.is_replay,
    }
    for group in planned.groups:
        trace_id, above = issue_of(experiment, group.task.lane, group.task.group_id)
        own: dict[str, Attribute] = {"flotilla.experiment": experiment, "flotilla.group": group.task.group_id, **facts}
        train = Span("train", trace_id, made.new_id(), above, started, computed, own)
        made.record(train)
        if published is not None:
            own = {**own, "flotilla.version": published}
            made.record(Span("publication", trace_id, made.new_id(), train.span_id, measured, ended, own))
