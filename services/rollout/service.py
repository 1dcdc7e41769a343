"""Follows the desired state: one experiment at a time, with an engine of its own.

    idle -> starting (engine loads, catches up with the current version) -> running <-> paused
         -> draining (nothing new, work in hand is finished or handed over) -> finished -> idle

A service that was drained for good, or got a signal, leaves: ``run`` returns, and the process ends.

The engine's process may die: its tasks are handed back, a new one is started, and only when that keeps happening
without a group answered in between does the experiment fail. A start that fails for a passing reason is tried again,
without an end, and reported meanwhile.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.rollout.consumer import RolloutConsumer
from services.rollout.engines.base import Engine
from services.rollout.receiver import WeightReceiver
from services.rollout.shutdown import GracefulShutdown, hand_over
from services.rollout.version import VersionGate
from shared.config.spec import ExperimentSpec
from shared.errors import FlotillaError, WeightTransferFailed, WorkerDied
from shared.schemas.service import Assignment, DesiredState, Failure, ObservedState, WorkState
from shared.start_backoff import StartBackoff
from shared.telemetry.logging import experiment_id as logged_experiment

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""An engine that dies this often without a group answered in between will not recover by itself."""
FIRST_PAUSE_SECONDS = 0.5
STOP_SECONDS = 10.0


class Session(Protocol):
    """All that works for one experiment."""

    engine: Engine
    gate: VersionGate
    worker: RolloutConsumer
    receiver: WeightReceiver

    async def close(self) -> None:
        """End the engine and free everything."""


OpenSession = Callable[
    [ExperimentSpec, Assignment, Callable[[], None], Callable[[WorkerDied], None]], Awaitable[Session]
]


class RolloutService:
    """Makes what is observed follow what is desired.

    Args:
        open_session: starts engine, worker and receiver for an experiment.
    """

    def __init__(self, open_session: OpenSession) -> None:
        self._open_session = open_session
        self._desired: DesiredState | None = None
        self._changed = asyncio.Event()
        self._state = WorkState.IDLE
        self._session: Session | None = None
        self._working: list[asyncio.Task[None]] = []
        self._assignment: Assignment | None = None
        self._failure: Failure | None = None
        self._engine_died: WorkerDied | None = None
        self._deaths = 0
        self._backoff = StartBackoff()
        self._load: dict[str, float] = {}
        self._shutdown = GracefulShutdown()
        self.tell: Callable[[], None] = lambda: None

    def observe(self) -> ObservedState:
        """Say what is going on."""
        session = self._session
        return ObservedState(
            experiment_id=self._assignment.experiment_id if self._assignment else None,
            state=self._state,
            policy_version=session.gate.version if session else None,
            publication=session.receiver.report if session else None,
            held_image=session.receiver.held_image if session else None,
            load=self._load | session.worker.busy.to_load() if session else self._load,
            failure=self._failure,
        )

    async def apply(self, desired: DesiredState) -> None:
        """Take a desired state in; the work of following it is done by ``run``."""
        self._desired = desired
        self._shutdown.take(desired)
        if self._session is not None and self._is_same_experiment(desired):
            self._session.receiver.take(desired)
        self._changed.set()

    async def run(self) -> None:
        """Follow the desired state until cancelled, or until there is nothing left to do for good."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_load(), name="load")
            try:
                while not self._shutdown.has_left.is_set():
                    await self._backoff.wait(self._changed)
                    await self._follow()
            finally:
                watching.cancel()
                await asyncio.shield(self._dismiss())
                self._shutdown.has_left.set()

    async def leave(self, notice_seconds: float) -> None:
        """Leave for good: returns when the work in hand is finished or handed over, or the notice is long over."""
        self._shutdown.leave(notice_seconds)
        if self._session is None:
            # Nothing is in hand: not even an engine that is still loading is waited for.
            return
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(notice_seconds + STOP_SECONDS):
                await self._shutdown.has_left.wait()

    async def _follow(self) -> None:
        desired = self._desired
        if self._shutdown.is_for_good and self._session is None:
            self._shutdown.has_left.set()
            return
        if desired is None:
            return
        if self._engine_died is not None:
            await self._after_engine_death(self._engine_died)
        assignment = desired.assignment
        if assignment is None or not self._is_same_experiment(desired):
            if self._session is not None or self._assignment is not None:
                if self._session is not None:
                    await hand_over(self._session.worker)
                await self._dismiss()
                self._failure = None
                self._deaths = 0
                self._backoff.reset()
            if assignment is None:
                self._become(WorkState.IDLE)
                if desired.state is WorkState.DRAINING:
                    # Drained and released, never to be assigned again.
                    self._shutdown.has_left.set()
                return
        may_start = self._failure is None or self._backoff.is_due
        if self._session is None and may_start and desired.state in {WorkState.RUNNING, WorkState.PAUSED}:
            assert assignment is not None
            await self._hire(assignment)
        if self._session is None:
            return
        self._session.receiver.take(desired)
        if self._shutdown.is_for_good or desired.state is WorkState.DRAINING:
            await self._drain()
        elif desired.state is WorkState.RUNNING:
            self._session.worker.resume()
            self._become(WorkState.RUNNING)
        elif desired.state is WorkState.PAUSED:
            self._session.worker.pause()
            self._become(WorkState.PAUSED)
        else:
            await self._dismiss()
            self._become(WorkState.IDLE)

    def _is_same_experiment(self, desired: DesiredState) -> bool:
        mine, theirs = self._assignment, desired.assignment
        return mine is not None and theirs is not None and mine.experiment_id == theirs.experiment_id

    def _become(self, state: WorkState) -> None:
        if self._state is not state:
            self._state = state
            log.info("state changed", extra={"state": state.value})
            self.tell()

    async def _hire(self, assignment: Assignment) -> None:
        self._assignment = assignment
        logged_experiment.set(assignment.experiment_id)
        self._become(WorkState.STARTING)
        try:
            spec = ExperimentSpec.model_validate(assignment.spec)
            self._session = await self._open_session(spec, assignment, self.tell, self._on_engine_death)
        except (WorkerDied, WeightTransferFailed) as error:
            # A process was killed while it started: unlike a model that cannot be loaded, that is worth another try.
            self._on_engine_death(WorkerDied(error.detail))
            return
        except FlotillaError as error:
            self._on_failed_start(error)
            return
        self._backoff.reset()
        self._failure = None
        self._working = [
            asyncio.create_task(self._session.receiver.run(), name="weight receiver"),
            asyncio.create_task(self._session.worker.run(), name="rollout worker"),
        ]
        for task in self._working:
            task.add_done_callback(self._on_task_end)

    def _on_failed_start(self, error: FlotillaError) -> None:
        self._failure = Failure(component="rollout", cause=error.detail, fatal=not error.retryable)
        if error.retryable:
            pause = self._backoff.postpone()
            log.warning("the start is tried again", extra={"error": error.detail, "pause_seconds": pause})
            self.tell()
            return
        log.error("the engine cannot start", extra={"error": error.detail})
        self._backoff.reset()
        self._become(WorkState.FAILED)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        log.error("%s ended", task.get_name(), exc_info=error)
        self._failure = Failure(component="rollout", cause=f"{task.get_name()} ended: {error!r}")
        self._become(WorkState.FAILED)
        self.tell()

    def _on_engine_death(self, error: WorkerDied) -> None:
        if self._engine_died is None:
            self._engine_died = error
            self._changed.set()

    async def _after_engine_death(self, error: WorkerDied) -> None:
        self._engine_died = None
        if self._session is not None and self._session.worker.answered:
            self._deaths = 0
        self._deaths += 1
        repeated = self._deaths >= MAX_DEATHS
        log.error("the engine's process ended", extra={"cause": error.detail, "again": not repeated})
        assignment = self._assignment
        await self._dismiss()
        self._failure = Failure(component="rollout engine", cause=error.detail, fatal=repeated)
        self.tell()
        if repeated:
            self._assignment = assignment
            self._become(WorkState.FAILED)
            return
        await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (self._deaths - 1))
        self._failure = None

    async def _drain(self) -> None:
        assert self._session is not None
        self._become(WorkState.DRAINING)
        worker, started = self._session.worker, time.monotonic()
        if not await self._shutdown.finish(worker, self._changed.is_set):
            return
        counts = worker.counts.to_load()
        seconds = round(time.monotonic() - started, 3)
        log.info("drained", extra={"seconds": seconds, "given_back": worker.in_work, **counts})
        await self._dismiss(keep_assignment=True)
        self._load = counts
        self._become(WorkState.FINISHED)
        if self._shutdown.is_for_good:
            self._shutdown.has_left.set()

    async def _dismiss(self, *, keep_assignment: bool = False) -> None:
        session, working = self._session, self._working
        self._session, self._working = None, []
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working, timeout=STOP_SECONDS)
        if session is not None:
            await session.close()
        if not keep_assignment:
            self._assignment = None

    async def _watch_load(self) -> None:
        last_tokens, last_time = 0, time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            session = self._session
            if session is None:
                if self._state is not WorkState.FINISHED:
                    self._load = {}
                last_tokens = 0
                continue
            try:
                load = await session.engine.load()
            except WorkerDied as error:
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
                "generated_tokens": load.generated_tokens,
                "prefilled_tokens": load.prefilled_tokens,
                "tokens_per_second": rate,
                "groups_in_work": session.worker.in_work,
                "groups_answered": session.worker.answered,
                "weight_switches": session.receiver.switches,
                **session.worker.counts.to_load(),
            }
