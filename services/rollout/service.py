"""Follows the desired state: one experiment at a time, with an engine of its own.

    idle -> starting (engine loads, catches up with the current version) -> running <-> paused
         -> draining (nothing new, work in progress is finished or handed over) -> finished -> idle

A service that was drained for good, or got a signal, leaves: ``run`` returns, and the process ends.

The engine's process may die: its tasks are handed back, a new one is started, and only when that keeps happening
without a group answered in between does the experiment fail. A start that fails for a passing reason is tried again,
without an end, and reported meanwhile.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from flotilla.services.rollout.agents.episodes import AgentEpisodes
from flotilla.services.rollout.consumer import RolloutConsumer
from flotilla.services.rollout.engines.base import Engine, OnEngineDeath
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.shared.children.restarts import FIRST_PAUSE_SECONDS, Restarts
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import FlotillaError, ServerUnreachable, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.service import (
    DRAIN_NOTICE_SECONDS,
    Assignment,
    DesiredState,
    DeviceReport,
    Failure,
    ObservedState,
    WorkState,
)
from flotilla.shared.service import reconciling
from flotilla.shared.service.reconciling import STARTABLE, STOP_SECONDS, SessionFollower

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""An engine that dies this often without a group answered in between will not recover by itself."""
LOOK_SECONDS = 1.0
"""Between two checks of the engine's load, and of failing tasks."""


HAND_OVER_SECONDS = 3.0
"""Kept of a notice for handing over; a step of the engine and one call to the data plane take far less."""
POLL_SECONDS = 0.02


class GracefulShutdown:
    """Until when a service may work."""

    def __init__(self) -> None:
        self._by_gateway: float | None = None
        self._by_signal: float | None = None
        self._interrupted_at: float | None = None
        self.has_left = asyncio.Event()
        """Set once nothing is left to do before the process may end."""

    def take(self, desired: DesiredState) -> None:
        """Record the gateway's desired state; its notice is the remaining time."""
        if desired.state is not WorkState.DRAINING:
            self._by_gateway = None
            self._interrupted_at = None
        elif desired.notice_seconds is not None:
            self._by_gateway = time.monotonic() + desired.notice_seconds
        elif self._by_gateway is None:
            self._by_gateway = time.monotonic() + DRAIN_NOTICE_SECONDS

    def leave(self, notice_seconds: float) -> None:
        """Leave for good within so many seconds, whatever the gateway orders; if repeated, by the earlier end."""
        ends = time.monotonic() + notice_seconds
        self._by_signal = ends if self._by_signal is None else min(self._by_signal, ends)

    @property
    def is_for_good(self) -> bool:
        """Whether the process ends afterwards."""
        return self._by_signal is not None

    @property
    def seconds_left(self) -> float:
        """The remaining time of the notice."""
        ends = [end for end in (self._by_gateway, self._by_signal) if end is not None]
        return min(ends, default=time.monotonic() + DRAIN_NOTICE_SECONDS) - time.monotonic()

    async def finish(self, worker: RolloutConsumer, has_news: Callable[[], bool]) -> bool:
        """Let the worker finish what it can, and hand over the rest.

        Returns:
            False if there was news first: look again what is wanted, then continue.
        """
        worker.pause()
        while not worker.is_idle:
            now = time.monotonic()
            if self._interrupted_at is None and self.seconds_left <= HAND_OVER_SECONDS:
                self._interrupted_at = now
                await _interrupt(worker)
            is_over = self._interrupted_at is not None and now - self._interrupted_at >= HAND_OVER_SECONDS
            if is_over and self.seconds_left <= 0:
                break
            await asyncio.sleep(POLL_SECONDS)
            if has_news():
                return False
        self._interrupted_at = None
        return True


async def hand_over(worker: RolloutConsumer) -> None:
    """Interrupt a worker at once, and wait until it has handed over what it has, or cannot."""
    await _interrupt(worker)
    for _ in range(round(HAND_OVER_SECONDS / POLL_SECONDS)):
        if not worker.in_work:
            return
        await asyncio.sleep(POLL_SECONDS)


async def _interrupt(worker: RolloutConsumer) -> None:
    # An engine that does not end its requests in time delays nothing: their tasks are handed back without it.
    with suppress(TimeoutError):
        async with asyncio.timeout(HAND_OVER_SECONDS):
            await worker.interrupt()


class Session(reconciling.Session, Protocol):
    """All that works for one experiment; closing it ends the engine."""

    worker: RolloutConsumer
    receiver: WeightReceiver

    @property
    def engine(self) -> Engine:
        """What samples."""

    @property
    def agents(self) -> AgentEpisodes | None:
        """The episodes that agents drive; None where the fleet itself does."""


OpenSession = Callable[[ExperimentSpec, Assignment, Callable[[], None], OnEngineDeath], Awaitable[Session]]


class RolloutService(SessionFollower[Session]):
    """Makes what is observed follow what is desired.

    Args:
        open_session: starts engine, worker and receiver for an experiment.
    """

    def __init__(self, open_session: OpenSession) -> None:
        super().__init__("rollout")
        self._open_session = open_session
        self._engine_died: WorkerDied | None = None
        self._restarts = Restarts(MAX_DEATHS, first_pause_seconds=FIRST_PAUSE_SECONDS)
        self._load: dict[str, float] = {}
        self._shutdown = GracefulShutdown()
        self._is_opening = False
        self._sleeping: Session | None = None
        """The session whose engine was put to sleep."""

    def observe(self) -> ObservedState:
        """Report state, version, the part taken in a publication, and load."""
        session = self._session
        return ObservedState(
            experiment_id=self._assignment.experiment_id if self._assignment else None,
            state=self._state,
            policy_version=session.receiver.version if session else None,
            publication=session.receiver.report if session else None,
            held_image=session.receiver.held_image if session else None,
            served=session.receiver.served if session else None,
            load=self._load | session.worker.busy.to_load() if session else self._load,
            failure=self._failure or self._refused_weights() or self._lost_agent(),
            sampling=session.worker.tally.report() if session else None,
            device=self._device(),
        )

    def _refused_weights(self) -> Failure | None:
        """Report a version that the engine cannot load, such as adapters of another base than its own files."""
        why = None if self._session is None else self._session.receiver.refusal
        return None if why is None else Failure(component="weights", cause=why, fatal=False)

    def _lost_agent(self) -> Failure | None:
        """Report an agent that dies; one that will not recover ends the experiment."""
        agents = None if self._session is None else self._session.agents
        return None if agents is None or agents.environment is None else agents.environment.failure

    def _device(self) -> DeviceReport | None:
        """Report what the engine has on devices that are shared in turns."""
        order = self._desired.device if self._desired is not None else None
        if order is None:
            return None
        is_held = self._is_opening or (self._session is not None and not self._is_asleep)
        return DeviceReport(shift=order.shift, is_held=is_held)

    @property
    def _may_hold(self) -> bool:
        """Whether the engine may have the device, by the newest order: an earlier one may have been overtaken."""
        order = self._desired.device if self._desired is not None else None
        return order is None or order.may_hold

    @property
    def _is_asleep(self) -> bool:
        return self._session is not None and self._session is self._sleeping

    def agents(self, experiment_id: str) -> AgentEpisodes | None:
        """Find the episodes of an experiment that agents drive; None where there are none here."""
        is_mine = self._assignment is not None and self._assignment.experiment_id == experiment_id
        return self._session.agents if is_mine and self._session is not None else None

    async def apply(self, desired: DesiredState) -> None:
        """Note a desired state; a notice begins at once, and the receiver learns of publications at once."""
        await super().apply(desired)
        self._shutdown.take(desired)
        if self._session is not None and self._is_mine(desired.assignment):
            self._session.receiver.take(desired)

    @property
    def _is_over(self) -> bool:
        return self._shutdown.has_left.is_set()

    def _watches(self) -> Sequence[Coroutine[None, None, None]]:
        return [self._watch_load(), self._watch_failures()]

    async def _close(self) -> None:
        await super()._close()
        self._shutdown.has_left.set()

    async def leave(self, notice_seconds: float) -> None:
        """Leave for good: returns when the work in progress is finished or handed over, or the notice is long over."""
        self._shutdown.leave(notice_seconds)
        if self._session is None:
            # Nothing is in progress: not even an engine that is still loading is waited for.
            return
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(notice_seconds + STOP_SECONDS):
                await self._shutdown.has_left.wait()

    async def _reconcile(self) -> None:
        desired = self._desired
        if self._shutdown.is_for_good and self._session is None:
            self._shutdown.has_left.set()
            return
        if desired is None:
            return
        if self._engine_died is not None:
            await self._after_engine_death(self._engine_died)
        if not self._is_mine(desired.assignment):
            await self._leave_experiment()
        if desired.assignment is None:
            self._enter(WorkState.IDLE)
            if desired.state is WorkState.DRAINING:
                # Drained and released, never to be assigned again.
                self._shutdown.has_left.set()
            return
        session = await self._session_for(desired.assignment, desired.state)
        if session is None:
            return
        session.receiver.take(desired)
        if await self._follow_shift(session):
            await self._direct(session, desired.state)

    async def _session_for(self, assignment: Assignment, wanted: WorkState) -> Session | None:
        """Open the session if there is none and its engine may have the device; return what there is."""
        if self._session is None and not self._may_hold:
            if wanted in STARTABLE and self._state is not WorkState.FAILED:
                self._assignment = assignment
                self._enter(WorkState.STARTING)
            return None
        self._is_opening = self._session is None
        try:
            return await self._ensure_session(assignment, wanted)
        finally:
            self._is_opening = False

    async def _follow_shift(self, session: Session) -> bool:
        """Put the engine to sleep, or wake it; False if it had to be killed.

        An engine that does not go to sleep is ended: others wait for its memory.
        """
        if self._may_hold:
            if self._is_asleep:
                self._sleeping = None
                session.receiver.wake()
                self.notify()
            return True
        if not self._is_asleep:
            await hand_over(session.worker)
            try:
                await session.receiver.sleep()
            except FlotillaError as error:
                await self._after_engine_death(WorkerDied(f"the engine did not go to sleep: {error.detail}"))
                return False
            self._sleeping = session
            self.notify()
        return True

    async def _direct(self, session: Session, wanted: WorkState) -> None:
        """Have a session do what is wanted now."""
        if self._shutdown.is_for_good or wanted is WorkState.DRAINING:
            await self._drain(session)
        elif wanted is WorkState.RUNNING:
            if not self._is_asleep:
                session.worker.resume()
            self._enter(WorkState.RUNNING)
        elif wanted is WorkState.PAUSED:
            session.worker.pause()
            self._enter(WorkState.PAUSED)
        else:
            await self._end_session()
            self._enter(WorkState.IDLE)

    async def _leave_experiment(self) -> None:
        """Hand over what an experiment has here that is no longer ours, and forget it."""
        if self._session is not None:
            await hand_over(self._session.worker)
        await self._end_session()
        self._failure = None
        self._restarts.forget()
        self._backoff.reset()

    async def _open(self, assignment: Assignment) -> Session:
        spec = ExperimentSpec.model_validate(assignment.spec)
        return await self._open_session(spec, assignment, self.notify, self._on_engine_death)

    def _lanes(self, session: Session) -> Mapping[str, Coroutine[None, None, None]]:
        lanes = {"weight receiver": session.receiver.run(), "rollout worker": session.worker.run()}
        if session.agents is not None and session.agents.environment is not None:
            lanes["agent"] = session.agents.environment.run()
        return lanes

    def _on_failed_start(self, error: FlotillaError) -> None:
        if isinstance(error, (WorkerDied, WeightTransferFailed)):
            # A process was killed while it started: unlike a model that cannot be loaded, that is worth another try.
            self._on_engine_death(WorkerDied(error.detail))
        else:
            super()._on_failed_start(error)

    def _on_engine_death(self, error: WorkerDied) -> None:
        if self._engine_died is None:
            self._engine_died = error
            self._changed.set()

    async def _after_engine_death(self, error: WorkerDied) -> None:
        if self._session is not None and self._session.worker.answered:
            self._restarts.forget()
        # An external server may be away for any time: the next start waits for it.
        pause = FIRST_PAUSE_SECONDS if isinstance(error, ServerUnreachable) else self._restarts.died()
        log.error("the engine's process ended", extra={"cause": error.detail, "again_after_seconds": pause})
        await self._end_session(keep_assignment=True)
        # All reports of it until now are of this one death.
        self._engine_died = None
        self._failure = Failure(component="rollout engine", cause=error.detail, fatal=pause is None)
        if pause is None:
            self._backoff.reset()
            self._enter(WorkState.FAILED)
        else:
            self._backoff.postpone(pause)
        self.notify()

    async def _drain(self, session: Session) -> None:
        self._enter(WorkState.DRAINING)
        worker, started = session.worker, time.monotonic()
        if not await self._shutdown.finish(worker, self._changed.is_set):
            return
        counts = worker.counts.to_load()
        seconds = round(time.monotonic() - started, 3)
        log.info("drained", extra={"seconds": seconds, "given_back": worker.in_work, **counts})
        await self._end_session(keep_assignment=True)
        self._load = counts
        self._enter(WorkState.FINISHED)
        if self._shutdown.is_for_good:
            self._shutdown.has_left.set()

    async def _watch_failures(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._session is None or self._failure is not None:
                continue
            reason = self._session.worker.why_hopeless
            if reason is not None:
                self._session.worker.pause()
                self._fail(reason)

    async def _watch_load(self) -> None:
        last_tokens, last_time = 0, time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            session = self._session
            if session is None:
                if self._state is not WorkState.FINISHED:
                    self._load = {}
                last_tokens = 0
                continue
            try:
                load = await session.engine.load()
            except WorkerDied as error:
                if session is self._session:
                    self._on_engine_death(error)
                continue
            except FlotillaError:
                continue
            now = time.monotonic()
            rate = max(0, load.generated_tokens - last_tokens) / (now - last_time)
            last_tokens, last_time = load.generated_tokens, now
            self._load = {
                "running": load.running,
                "waiting": load.waiting,
                "slots": load.slots,
                "engine_sharers": load.sharers,
                "generated_tokens": load.generated_tokens,
                "prefilled_tokens": load.prefilled_tokens,
                "reused_tokens": load.reused_tokens,
                "reuses": load.reuses,
                "cpu_seconds": load.cpu_seconds,
                "tokens_per_second": rate,
                "groups_in_work": session.worker.in_work,
                "groups_answered": session.worker.answered,
                "weight_switches": session.receiver.switches,
                **session.worker.counts.to_load(),
                **(session.agents.to_load() if session.agents is not None else {}),
            }
