"""The reconciler: one loop that moves placement, leases, deadlines and the experiments' lives forward.

It is level-triggered: each pass compares what is with what should be, so a lost wake-up costs one period and a
restarted gateway converges by itself. Work that takes time runs in a task per experiment, which it starts and ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from flotilla.services.gateway import signals
from flotilla.services.gateway.lifecycle.states import LifecycleEvent
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.registry.services import DRAINED, LiveService
from flotilla.services.gateway.runtime.parts import GatewayParts
from flotilla.services.gateway.scheduler.demands import quotas_of
from flotilla.services.gateway.scheduler.quota import Scheduler
from flotilla.shared.errors import FlotillaError
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind, WorkState

log = logging.getLogger(__name__)

PERIOD_SECONDS = 0.25
RETRY_SECONDS = 1.0
REST_SHARE = 4.0
"""How long the loop rests after a pass, in lengths of that pass. A change of a thousand services wakes it a thousand
times, and each pass looks at all of them: without a rest their calls wait behind passes that find little."""
LONGEST_REST_SECONDS = 0.05
"""Where a pass waited for a store, its length says nothing of its cost."""

Work = Callable[[Experiment], Awaitable[None]]


BEAT_SECONDS = 0.25
OVERSLEPT_SECONDS = 1.0
"""A beat that comes so much later than it should means that this process was suspended."""


class Heartbeat:
    """Beats, and reports each standstill once.

    Args:
        now: reads the clock that leases and deadlines are measured with, in seconds.
        on_standstill: called with how long it lasted, in seconds, before anything can act on the time that has passed.
    """

    def __init__(self, now: Callable[[], float], on_standstill: Callable[[float], None]) -> None:
        self._now = now
        self._on_standstill = on_standstill
        self._beat_at: float | None = None

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(BEAT_SECONDS)

    def look(self) -> None:
        """Compare with the last beat; call it in the same turn of the loop as a look at leases or deadlines."""
        now = self._now()
        before, self._beat_at = self._beat_at, now
        overslept = 0.0 if before is None else now - before - BEAT_SECONDS
        if overslept > OVERSLEPT_SECONDS:
            self._on_standstill(overslept)


class Reconciler:
    """Runs the loop.

    Args:
        work: what an active experiment needs done, until it is cancelled.
        end: what brings an ending experiment to rest.
    """

    def __init__(self, parts: GatewayParts, scheduler: Scheduler, *, work: Work, end: Work) -> None:
        self._registry = parts.registry
        self._repository = parts.repository
        self._publications = parts.publications
        self._fleet = parts.fleet
        self._commands = parts.commands
        self._scheduler = scheduler
        self._work = work
        self._end = end
        self._wake = parts.wake
        self._tasks: dict[str, tuple[Work, asyncio.Task[None]]] = {}
        self.heartbeat = Heartbeat(parts.registry.now, self._stood_still)

    async def run(self) -> None:
        """Reconcile until cancelled; end the experiments' tasks then."""
        beating = asyncio.create_task(self.heartbeat.run(), name="heartbeat")
        try:
            while True:
                began = self._registry.now()
                try:
                    # In the same turn of the loop as the look at leases and deadlines that a pass begins with.
                    self.heartbeat.look()
                    await self.reconcile()
                except FlotillaError as error:
                    log.warning("a reconciliation was cut short", extra={"error": repr(error)})
                    await asyncio.sleep(PERIOD_SECONDS)
                await asyncio.sleep(rest_after(self._registry.now() - began))
                await self._wait()
        finally:
            await signals.end(beating, *(task for _, task in self._tasks.values()))

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PERIOD_SECONDS):
                await self._wake.wait()
        self._wake.clear()

    def _stood_still(self, seconds: float) -> None:
        log.warning("this process was suspended: leases last so much longer", extra={"seconds": round(seconds, 3)})
        self._registry.extend(seconds)
        self._publications.extend(seconds)

    async def reconcile(self) -> None:
        """Compare what is with what should be, once."""
        # Both lists are made before anything is waited for: no time passes between the heartbeat's look and theirs.
        expired = self._registry.expired()
        await self._publications.check_deadlines()
        for service in expired:
            with contextlib.suppress(FlotillaError):
                await self._fleet.give_up(service)
        for service in self._registry:
            if service.experiment_id is None:
                continue
            if service.record.is_draining and service.is_observed and not service.works_for(service.experiment_id):
                await self._fleet.release(service, DRAINED)
            elif service.kind is ServiceKind.ROLLOUT and self._registry.is_overdue(service):
                await self._fleet.release(service, "its notice is over")
            elif self._repository.find(service.experiment_id) is None:
                await self._fleet.release(service, "its experiment was deleted, or cannot be used")
        await self._scheduler.reconcile()
        for experiment in self._repository:
            await self._fleet.jobs.reconcile(experiment)
            await self._advance(experiment)
            await self._ensure_task(experiment)

    async def _advance(self, experiment: Experiment) -> None:
        record = experiment.record
        if experiment.state is ExperimentState.STARTING and self._is_ready(experiment):
            await self._commands.conclude(experiment, LifecycleEvent.READY)
        if experiment.state in {ExperimentState.RUNNING, ExperimentState.PAUSED} and experiment.is_trained:
            is_evaluated = experiment.spec.evaluation is None or record.evaluated_version == record.policy_version
            if is_evaluated and self._publications.open_phase(experiment.id) is None:
                await self._commands.conclude(
                    experiment, LifecycleEvent.TRAINED, outcome=ExperimentState.COMPLETED.value
                )

    def _is_ready(self, experiment: Experiment) -> bool:
        # A lent rollout has nothing to work on while the trainer needs its devices.
        ready = [s for s in self._registry.of(experiment.id) if not s.is_lent and _is_ready(s, experiment.id)]
        quotas = quotas_of(experiment.spec)
        return all(sum(s.kind is kind for s in ready) >= quota.min for kind, quota in quotas.items())

    async def _ensure_task(self, experiment: Experiment) -> None:
        """See to it that the right task runs for an experiment, and no other."""
        wanted = self._wanted(experiment)
        running = self._tasks.get(experiment.id)
        if running is not None and (running[0] is not wanted or running[1].done()):
            await signals.end(running[1])
            del self._tasks[experiment.id]
            running = None
        if wanted is not None and running is None:
            task = asyncio.create_task(self._guarded(wanted, experiment), name=f"experiment {experiment.id}")
            self._tasks[experiment.id] = (wanted, task)

    def _wanted(self, experiment: Experiment) -> Work | None:
        if experiment.is_active:
            return self._work
        is_ending = experiment.state is ExperimentState.STOPPING or (
            experiment.state is ExperimentState.FAILED and experiment.record.final_ledger is None
        )
        return self._end if is_ending else None

    async def _guarded(self, work: Work, experiment: Experiment) -> None:
        try:
            await work(experiment)
        except Exception as error:
            causes = _leaves(error)
            if all(isinstance(cause, FlotillaError) and cause.retryable for cause in causes):
                log.warning(
                    "work for an experiment starts again", extra={"experiment_id": experiment.id, "error": repr(error)}
                )
                await asyncio.sleep(RETRY_SECONDS)
                return
            log.exception("work for an experiment broke", extra={"experiment_id": experiment.id})
            cause = causes[0]
            detail = cause.detail if isinstance(cause, FlotillaError) else repr(cause)
            await self._commands.fail(experiment, "gateway", detail)
            # It may be the ending itself that broke, and that is tried again for ever.
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._wake.set()


def rest_after(pass_seconds: float) -> float:
    """Return how long to rest after a pass, in seconds."""
    return min(REST_SHARE * pass_seconds, LONGEST_REST_SECONDS)


def _leaves(error: Exception) -> list[Exception]:
    """List the errors of a task group, or the error itself."""
    if isinstance(error, ExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def _is_ready(service: LiveService, experiment_id: str) -> bool:
    observed = service.observed
    if observed.experiment_id != experiment_id:
        return False
    if service.kind is ServiceKind.ROLLOUT and (observed.policy_version is None or observed.policy_version < 0):
        return False
    return observed.state in {WorkState.RUNNING, WorkState.FINISHED}
