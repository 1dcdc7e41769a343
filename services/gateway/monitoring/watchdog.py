"""The watchdog of one experiment: a stall is recorded as its problem, which is cleared when progress resumes.

It looks at random times. Evenly spaced looks would see steps that last as long as a pause, or a half or a third
of one, always in the same phase, and the diagnosis would take that phase for the whole step.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.feeder.status import Blockage
from flotilla.services.gateway.monitoring.agents import AgentsSeen, see_agents
from flotilla.services.gateway.monitoring.bottleneck import Look
from flotilla.services.gateway.monitoring.diagnosis import Observation, Situation, diagnose, progress_of, without_redis
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.publications.publications import Publications
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.registry.shifts import SHARERS, holder_of, who_holds
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import OUTSIDE, ServiceKind
from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.redis.connection import COMPONENT as REDIS

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two looks, on average."""
LEDGER_SECONDS = 5.0
SCHEDULER = "scheduler"
"""Problems of this component are the reconciler's: it sets and clears them."""


def pauses(chance: random.Random) -> Iterator[float]:
    """Draw pauses in seconds, ``POLL_SECONDS`` on average and at most a half longer or shorter, without end."""
    while True:
        yield chance.uniform(0.5, 1.5) * POLL_SECONDS


class Stall:
    """Names and clears the problem of one experiment; a problem of the scheduler's stays as it is."""

    def __init__(self, experiment: Experiment, repository: ExperimentRepository, events: EventLog) -> None:
        self._experiment = experiment
        self._repository = repository
        self._events = events

    async def name(self, component: str, cause: str) -> None:
        """Record what holds the experiment up."""
        known = self._experiment.record.problem
        if known is not None and known["component"] == SCHEDULER:
            return
        is_new = known is None or known["component"] != component
        async with self._repository.transaction() as change:
            if self._has_changed(known):
                return
            if self._repository.stage_problem(change, self._experiment, component, cause) and is_new:
                self._events.stage(change, self._experiment.id, "stalled", component=component, cause=cause)

    async def clear(self) -> None:
        """Record that there is progress again."""
        known = self._experiment.record.problem
        if known is not None and known["component"] != SCHEDULER:
            async with self._repository.transaction() as change:
                if self._has_changed(known):
                    return
                self._repository.stage(change, self._experiment, problem=None)
                self._events.stage(change, self._experiment.id, "progress_resumed", component=known["component"])

    async def note_lost_writes(self, issued_before: int, issued: int) -> None:
        """Record that the data plane is back in an earlier state."""
        await self._events.append(self._experiment.id, "redis_went_back", issued_before=issued_before, issued=issued)

    def _has_changed(self, known: Mapping[str, Any] | None) -> bool:
        """Whether another task named a problem, or ended the experiment with one, while this waited for its turn."""
        return not self._experiment.is_active or self._experiment.record.problem != known


class Watchdog:
    """Watches one experiment while it starts or runs.

    Args:
        stall: records what is found.
        measured: what the looks are kept in, and when agents asked for episodes.
        why_blocked: returns what takes nothing more and why, or None: that is named at once.
        stall_seconds: time without progress that makes a stall.
    """

    def __init__(
        self,
        experiment: Experiment,
        stall: Stall,
        registry: Registry,
        publications: Publications,
        clock: Clock,
        *,
        measured: Measurements,
        why_blocked: Callable[[], Blockage | None],
        stall_seconds: float,
    ) -> None:
        self._experiment = experiment
        self._stall = stall
        self._registry = registry
        self._publications = publications
        self._clock = clock
        self._measured = measured
        self._why_blocked = why_blocked
        self._stall_seconds = stall_seconds
        self._issued = 0
        self._progress: tuple[object, ...] | None = None
        self._progress_at = clock.monotonic() - self._known_seconds()
        self._began = clock.now()

    def _known_seconds(self) -> float:
        """How long nothing is known to have happened before the first look.

        A stall that an earlier process named lasts until there is progress. Else the record's last change counts, but
        for a third of the patience this one looks for itself: much continues that no record tells.
        """
        known = self._experiment.record.problem
        if known is not None and known["component"] != SCHEDULER:
            return self._stall_seconds
        silent = max(0.0, self._clock.now() - self._experiment.record.updated_at)
        return min(silent, self._stall_seconds * 2 / 3)

    async def run(self) -> None:
        """Check about every second until cancelled."""
        for pause in pauses(random.Random()):
            await self.look()
            await asyncio.sleep(pause)

    async def look(self) -> None:
        """Compare with the last look, and name or clear a stall."""
        experiment, record = self._experiment, self._experiment.record
        asked = self._clock.monotonic()
        train = await self._ledger(Lane.TRAIN)
        now = self._clock.monotonic()
        await self._note(train, now, now - asked)
        evaluation = await self._ledger(Lane.EVALUATION)
        now = self._clock.monotonic()
        progress = (record.state, progress_of(record.step, record.policy_version, train, evaluation))
        if train is not None and progress != self._progress:
            # The first look has nothing to compare with: it is no progress.
            self._progress_at = self._progress_at if self._progress is None else now
            self._progress = progress
        is_paused = experiment.state is ExperimentState.PAUSED
        blocked = self._why_blocked()
        if blocked is not None and blocked.component == REDIS:
            # What waits for it has its whole time again afterwards.
            self._progress_at = now
        if blocked is not None and (blocked.component == REDIS or not is_paused):
            await self._stall.name(blocked.component, blocked.cause)
            return
        unreachable = None if is_paused else self._unreachable()
        if unreachable is not None:
            await self._stall.name(*unreachable)
            return
        if now - self._progress_at < self._stall_seconds or is_paused:
            await self._stall.clear()
            return
        found = self._kept_devices() or diagnose(
            Situation(
                state=record.state,
                services=self._observed(),
                ledger=train,
                budget=experiment.spec.admission_budget,
                groups_per_step=experiment.spec.groups_per_step,
                policy_version=record.policy_version,
                publication=self._publications.open_phase(experiment.id),
                evaluating_version=record.evaluating_version,
                trains=experiment.spec.trains,
                is_trained=experiment.is_trained,
                samples_answers=experiment.spec.samples_answers,
                needs_rollouts=experiment.spec.needs_rollouts,
                agents=self._agents(),
                oldest_generated_seconds=await self._oldest_generated(),
            )
        )
        await (self._stall.clear() if found is None else self._stall.name(*found))

    def _observed(self) -> list[Observation]:
        """List what its services report, without lent rollouts: nobody waits for these."""
        return [
            Observation(
                s.id,
                s.kind,
                s.observed.state,
                s.observed.policy_version,
                None if s.observed.failure is None else s.observed.failure.cause,
            )
            for s in self._registry.of(self._experiment.id)
            if not s.is_lent
        ]

    def _kept_devices(self) -> tuple[str, str] | None:
        """Name the service that does not release devices assigned to others; None if none is waited for."""
        experiment = self._experiment
        if not experiment.spec.shares_devices:
            return None
        shift = experiment.record.device_shift
        lends = experiment.spec.resources.lending is not None
        trainer, rollouts = (self._registry.device_reports(experiment.id, kind, is_lending=lends) for kind in SHARERS)
        keepers = who_holds(shift, trainer, rollouts)
        what = f"{holder_of(shift)} waits for devices that {', '.join(keepers)} has not released (shift {shift})"
        return ("devices", what) if keepers else None

    def _unreachable(self) -> tuple[str, str] | None:
        """Name a server that a service asks in vain, or its agent that dies; None if there is none: without a stall."""
        services = self._registry.of(self._experiment.id)
        failures = [each.observed.failure for each in services if each.observed.failure is not None]
        outside = next(((each.component, each.cause) for each in failures if each.component in OUTSIDE), None)
        return outside or without_redis((each.record, each.observed.load) for each in services)

    def _agents(self) -> AgentsSeen | None:
        rollouts = self._registry.of(self._experiment.id, ServiceKind.ROLLOUT)
        loads = [service.observed.load for service in rollouts]
        asked_at = self._measured.asked.at or self._began
        return see_agents(self._experiment.spec, loads, self._clock.now(), asked_at)

    async def _oldest_generated(self) -> float:
        if self._experiment.spec.rollout.agents is None:
            return 0.0
        return (await self._oldest()).get(HopName.GENERATED, 0.0)

    async def _note(self, ledger: Ledger | None, now: float, redis_seconds: float) -> None:
        experiment = self._experiment
        if ledger is not None:
            before, self._issued = self._issued, ledger.issued
            if ledger.issued < before:
                log.warning("Redis is back in an earlier state", extra={"experiment_id": experiment.id})
                await self._stall.note_lost_writes(before, ledger.issued)
        if experiment.state is not ExperimentState.RUNNING:
            self._measured.window.clear()
            return
        is_publishing = self._publications.open_phase(experiment.id) is not None
        is_evaluating = experiment.record.evaluating_version is not None
        oldest = {} if ledger is None else await self._oldest()
        look = Look(ledger, redis_seconds, is_publishing, is_evaluating, oldest, self._agents())
        self._measured.window.add_look(now, look)

    async def _oldest(self) -> dict[HopName, float]:
        try:
            async with asyncio.timeout(LEDGER_SECONDS):
                return await self._experiment.train.oldest_seconds()
        except (Unavailable, TimeoutError):
            return {}

    async def _ledger(self, lane: Lane) -> Ledger | None:
        plane = self._experiment.train if lane is Lane.TRAIN else self._experiment.evaluation
        try:
            async with asyncio.timeout(LEDGER_SECONDS):
                return await plane.ledger()
        except (Unavailable, TimeoutError):
            return None
