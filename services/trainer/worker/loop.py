"""The training loop: one step per iteration, in the order of the paper.

    groups -> plan -> old log-probs, advantages, updates -> publish -> checkpoint, commit -> report

It waits for groups, for a pause to end, for the last publication when the next one is due, and for a checkpoint's
state to be copied; for the copy to be written when the next checkpoint is due, at a pause and at the end; for nothing
else.
Computation runs on one thread of its own, so leases, publications and reports continue meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Protocol, TypeVar

from flotilla.services.trainer.data.group_metrics import describe_finished, describe_groups, with_sources
from flotilla.services.trainer.data.plan import StepGroups, StepPlanner
from flotilla.services.trainer.learning.learner import StepResult
from flotilla.services.trainer.worker.checkpoint_policy import CheckpointPolicy
from flotilla.services.trainer.worker.control import RunControl
from flotilla.services.trainer.worker.device_shift import DeviceShift, always_held
from flotilla.services.trainer.worker.held_out import HeldOutLoss
from flotilla.services.trainer.worker.publisher import Publisher
from flotilla.services.trainer.worker.reporter import Reporter
from flotilla.services.trainer.worker.samples import StepSamples
from flotilla.services.trainer.worker.step_times import (
    GradientWatch,
    StepMoments,
    StepTimes,
    describe_step,
    record_step,
)
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.schemas.experiment import MetricBatch
from flotilla.shared.schemas.service import WorkState
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.telemetry.reward_metrics import SeriesNames, describe_rewards

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class StepLearner(Protocol):
    """What trains: one learner, or that of every rank of a job."""

    spec: ExperimentSpec

    def train(self, groups: Sequence[Group], step: int) -> StepResult:
        """Train one step; blocks."""

    def follow(self, spec: ExperimentSpec) -> None:
        """Train by another spec from the next step on; blocks."""

    def keep_version(self, version: int, oldest: int) -> None:
        """Remember the present weights as this version, and none before ``oldest``; blocks."""


class TrainingLoop:
    """Trains an experiment to its last step. Everything that it uses is opened and closed elsewhere."""

    def __init__(
        self,
        learner: StepLearner,
        planner: StepPlanner,
        publisher: Publisher,
        durability: CheckpointPolicy,
        reporter: Reporter,
        control: RunControl,
        compute: Executor,
        samples: StepSamples,
        held_out: HeldOutLoss | None = None,
        device: DeviceShift | None = None,
    ) -> None:
        self._learner, self._planner, self._publisher = learner, planner, publisher
        self._durability, self._reporter, self._control, self._compute = durability, reporter, control, compute
        self.progress, self._times, self._watch = durability.progress, StepTimes(), GradientWatch()
        self._samples, self._held_out = samples, held_out
        self._device = device or always_held()
        self._is_sampled = learner.spec.finished_job is None
        self.line, self.total_steps = durability.line, learner.spec.optimisation.steps
        self._names = SeriesNames()

    def announce_change(self, newest: str | None) -> None:
        """Note the id of the newest live change of the spec that the gateway knows."""
        self._planner.live.announce(newest)

    @property
    def version(self) -> int:
        """The policy version that the weights are, or that the next steps train."""
        return self.line.at(self.progress.step)

    async def run(self) -> bool:
        """Train until the last step is published and durable: True. Stopped before that: False."""
        await self._with_device(self._begin)
        while self.progress.step < self.total_steps:
            if self._control.is_paused:
                await self._durability.settled()
            if not await self._control.may_go_on():
                break
            step = self.progress.step + 1
            await self._control.unless_stopped(self._follow_settings(step))
            if self._control.is_stopped:
                break
            work = self._planner.groups_of(step, self.progress.lineage, self._make_durable)
            planned = await self._control.unless_stopped(work)
            if planned is None or not await self._control.may_go_on():
                break
            if not await self._with_device(partial(self._train, step, planned)):
                break
        return await self._finish()

    async def _follow_settings(self, step: int) -> None:
        """Apply the settings that hold for the step."""
        if (spec := await self._planner.spec_of(step)) is not self._learner.spec:
            await self._on_compute_thread(lambda: self._learner.follow(spec))

    async def _begin(self) -> None:
        if self.version and self.is_at_version:
            # The gateway may not have it yet, and rollouts may want to pull it.
            await self._publish()
        if not self.progress.step and (measured := await self._measure(0)):
            self._reporter.metrics(MetricBatch(step=0, version=self.version, values=measured))

    async def _with_device(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do what needs the weights while this trainer has the device; False if the loop shall end before that.

        Where all engines take turns a shift ends with a version that each of them has: what wakes then loads it, and no
        other before.
        """
        if not await self._control.unless_stopped(self._device.acquire()):
            return False
        try:
            await work()
            if self._device.is_shared and self._learner.spec.resources.lending is None:
                await self._control.unless_stopped(self._publisher.settled())
        finally:
            self._device.release()
        return True

    async def _train(self, step: int, planned: StepGroups) -> None:
        version, started, cpu = self.version, time.monotonic(), time.process_time()
        result = await self._on_compute_thread(lambda: self._learn(planned, step))
        if result is None:
            log.info("stopped before the step began: its plan remains", extra={"step": step})
            return
        computed = time.monotonic()
        values = self._describe_groups(planned, version)
        if self._device.is_shared:
            values["time/lent_seconds"], values["time/device_seconds"] = self._device.take_seconds()
        values["time/compute_cores"] = (time.process_time() - cpu) / (computed - started)
        self._watch.check(result, step)
        changes = self._planner.live.trained_with(version)
        newest, lag = self._planner.aged_from(version)
        self._samples.trained(planned, result, version, self.progress.lineage, partial(lag, newest), changes)
        self.progress.add(planned.plan)
        is_at_version = self.line.is_published(step - 1) and self._planner.has_own_groups
        if result.traced is not None and len(result.updates) == 1 and is_at_version:
            values |= result.traced.engine_gaps(planned.groups, partial(lag, newest))
        values |= await self._measure(step)
        measured = time.monotonic()
        if self.is_at_version:
            await self._publish()
        published = time.monotonic()
        made = self.version if self.is_at_version else None
        record_step(planned, version, made, StepMoments(started, computed, measured, published))
        spent = computed - started, published - computed
        # A step in a checkpoint is never trained again: its figures are stored before.
        values |= self._describe(result, self._times.with_step(planned, *spent, None))
        self._reporter.keep(MetricBatch(step=step, version=version, values=values))
        await self._durability.after_step(self._is_stopped, values)
        self._times.add(planned, *spent, time.monotonic() - published)
        values |= self._describe(result, self._times) | self._durability.take_figures() | self._samples.figures()
        self._reporter.metrics(MetricBatch(step=step, version=version, values=values))
        told = next((name for name in ("reward/mean", "loss/total") if name in values), None)
        facts = {} if told is None else {told.partition("/")[0]: values[told]}
        log.info("step is done", extra=facts | {"step": step, "version": self.version})

    def _describe_groups(self, planned: StepGroups, version: int) -> dict[str, float]:
        if not self._is_sampled:
            return describe_finished(planned.groups, self.progress.totals)
        newest, lag = self._planner.aged_from(version)
        values = describe_groups(planned.groups, newest, self.progress.totals, lag)
        return values | describe_rewards(with_sources(planned.groups), self._names)

    async def _measure(self, step: int) -> dict[str, float]:
        if self._held_out is None or not self._held_out.is_due(step):
            return {}
        return dict(await self._on_compute_thread(self._held_out.measure))

    def _describe(self, result: StepResult, times: StepTimes) -> dict[str, float]:
        return describe_step(result, times, self._publisher.last_seconds, ends_version=self.is_at_version)

    def _learn(self, planned: StepGroups, step: int) -> StepResult | None:
        """Train a step; None if it was stopped while it waited for its turn."""
        if self._control.is_stopped:
            return None
        if (faults := armed()) is not None:
            faults.hit(Site.TRAINER_STEP)
        return self._learner.train(planned.groups, step)

    @property
    def is_at_version(self) -> bool:
        """Whether the weights are a version that is published."""
        return self.line.is_published(self.progress.step)

    async def _publish(self) -> None:
        # Once stopped, it does not wait for a gateway that may be gone.
        await self._control.unless_stopped(self._publisher.settled())
        if not self._publisher.is_idle:
            return
        oldest = self.line.oldest_allowed(self.version, self._planner.max_lag)
        await self._on_compute_thread(lambda: self._learner.keep_version(self.version, oldest))
        await self._publisher.publish(self.version, self.progress.step, self._on_compute_thread)

    async def _finish(self) -> bool:
        is_last = self.progress.step == self.total_steps
        if is_last:
            await self._control.unless_stopped(self._publisher.settled())
        await self._durability.settled()
        if not self._durability.is_durable:
            await self._end_durably()
        if is_last and self._publisher.is_idle:
            self._control.become(WorkState.FINISHED)
        return is_last

    async def _end_durably(self) -> None:
        work = partial(
            self._durability.at_the_end,
            is_over=self._control.is_over,
            is_stopped=self._is_stopped,
            publisher=self._publisher,
        )
        if not self._is_stopped() and await self._with_device(work):
            return
        if self._control.is_over:
            # The engines are being closed.
            self._device.claim()
        if self._device.is_usable:
            async with self._device.in_use():
                await work()
        else:
            log.info("stopped while others have the device: the steps since the last checkpoint are replayed")

    def _is_stopped(self) -> bool:
        return self._control.is_stopped

    async def _make_durable(self, reason: str) -> None:
        await self._with_device(partial(self._durability.now, reason, self._publisher))

    async def _on_compute_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)
