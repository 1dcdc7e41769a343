"""Follows the desired state: one experiment at a time, with an engine of its own.

    idle -> starting (engine loads, catches up with the current version) -> running <-> paused
         -> draining (nothing new, work in hand is finished or handed over) -> finished -> idle

A service that was drained for good, or got a signal, leaves: ``run`` returns, and the process ends.

The engine's process may die: its tasks are handed back, a new one is started, and only when that keeps happening
without a group answered in between does the experiment fail.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.rollout.departure import Departure, hand_over
from services.rollout.engines.base import Engine
from services.rollout.receiver import WeightReceiver
from services.rollout.version import VersionGate
from services.rollout.worker import RolloutWorker
from shared.config.spec import ExperimentSpec
from shared.errors import FlotillaError, WorkerDied
from shared.schemas.service import Assignment, DesiredState, Failure, ObservedState, WorkState
from shared.telemetry.logging import experiment_id as logged_experiment

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""An engine that dies this often without a group answered in between will not recover by itself."""
FIRST_PAUSE_SECONDS = 0.5
STOP_SECONDS = 10.0


class Crew(Protocol):
    """All that works for one experiment."""

    engine: Engine
    gate: VersionGate
    worker: RolloutWorker
    receiver: WeightReceiver

    async def close(self) -> None:
        """End the engine and free everything."""


OpenCrew = Callable[[ExperimentSpec, Assignment, Callable[[], None], Callable[[WorkerDied], None]], Awaitable[Crew]]


class RolloutService:
    """Makes what is observed follow what is desired.

    Args:
        open_crew: starts engine, worker and receiver for an experiment.
    """

    def __init__(self, open_crew: OpenCrew) -> None:
        self._open_crew = open_crew
        self._desired: DesiredState | None = None
        self._changed = asyncio.Event()
        self._state = WorkState.IDLE
        self._crew: Crew | None = None
        self._working: list[asyncio.Task[None]] = []
        self._assignment: Assignment | None = None
        self._failure: Failure | None = None
        self._engine_died: WorkerDied | None = None
        self._deaths = 0
        self._load: dict[str, float] = {}
        self._departure = Departure()
        self.tell: Callable[[], None] = lambda: None

    def observe(self) -> ObservedState:
        """Say what is going on."""
        crew = self._crew
        return ObservedState(
            experiment_id=self._assignment.experiment_id if self._assignment else None,
            state=self._state,
            policy_version=crew.gate.version if crew else None,
            publication=crew.receiver.report if crew else None,
            held_image=crew.receiver.held_image if crew else None,
            load=self._load | crew.worker.busy.to_load() if crew else self._load,
            failure=self._failure,
        )

    async def apply(self, desired: DesiredState) -> None:
        """Take a desired state in; the work of following it is done by ``run``."""
        self._desired = desired
        self._departure.take(desired)
        if self._crew is not None and self._is_same_experiment(desired):
            self._crew.receiver.take(desired)
        self._changed.set()

    async def run(self) -> None:
        """Follow the desired state until cancelled, or until there is nothing left to do for good."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_load(), name="load")
            try:
                while not self._departure.has_left.is_set():
                    await self._changed.wait()
                    self._changed.clear()
                    await self._follow()
            finally:
                watching.cancel()
                await asyncio.shield(self._dismiss())
                self._departure.has_left.set()

    async def leave(self, notice_seconds: float) -> None:
        """Leave for good: returns when the work in hand is finished or handed over, or the notice is long over."""
        self._departure.leave(notice_seconds)
        if self._crew is None:
            # Nothing is in hand: not even an engine that is still loading is waited for.
            return
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(notice_seconds + STOP_SECONDS):
                await self._departure.has_left.wait()

    async def _follow(self) -> None:
        desired = self._desired
        if self._departure.is_for_good and self._crew is None:
            self._departure.has_left.set()
            return
        if desired is None:
            return
        if self._engine_died is not None:
            await self._after_engine_death(self._engine_died)
        assignment = desired.assignment
        if assignment is None or not self._is_same_experiment(desired):
            if self._crew is not None or self._assignment is not None:
                if self._crew is not None:
                    await hand_over(self._crew.worker)
                await self._dismiss()
                self._failure = None
                self._deaths = 0
            if assignment is None:
                self._become(WorkState.IDLE)
                if desired.state is WorkState.DRAINING:
                    # Drained and released, never to be assigned again.
                    self._departure.has_left.set()
                return
        if self._crew is None and self._failure is None and desired.state in {WorkState.RUNNING, WorkState.PAUSED}:
            assert assignment is not None
            await self._hire(assignment)
        if self._crew is None:
            return
        self._crew.receiver.take(desired)
        if self._departure.is_for_good or desired.state is WorkState.DRAINING:
            await self._drain()
        elif desired.state is WorkState.RUNNING:
            self._crew.worker.resume()
            self._become(WorkState.RUNNING)
        elif desired.state is WorkState.PAUSED:
            self._crew.worker.pause()
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
            self._crew = await self._open_crew(spec, assignment, self.tell, self._on_engine_death)
        except WorkerDied as error:
            # Killed while it loaded: unlike a model that cannot be loaded, that is worth another try.
            self._on_engine_death(error)
            return
        except FlotillaError as error:
            log.error("the engine cannot start", extra={"error": error.detail})  # noqa: TRY400
            self._failure = Failure(component="rollout", cause=error.detail, fatal=not error.retryable)
            self._become(WorkState.FAILED)
            return
        self._working = [
            asyncio.create_task(self._crew.receiver.run(), name="weight receiver"),
            asyncio.create_task(self._crew.worker.run(), name="rollout worker"),
        ]
        for task in self._working:
            task.add_done_callback(self._on_task_end)

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
        if self._crew is not None and self._crew.worker.answered:
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
        assert self._crew is not None
        self._become(WorkState.DRAINING)
        worker, started = self._crew.worker, time.monotonic()
        if not await self._departure.finish(worker, self._changed.is_set):
            return
        counts = worker.counts.to_load()
        seconds = round(time.monotonic() - started, 3)
        log.info("drained", extra={"seconds": seconds, "given_back": worker.in_work, **counts})
        await self._dismiss(keep_assignment=True)
        self._load = counts
        self._become(WorkState.FINISHED)
        if self._departure.is_for_good:
            self._departure.has_left.set()

    async def _dismiss(self, *, keep_assignment: bool = False) -> None:
        crew, working = self._crew, self._working
        self._crew, self._working = None, []
        for task in working:
            task.cancel()
        if working:
            await asyncio.wait(working, timeout=STOP_SECONDS)
        if crew is not None:
            await crew.close()
        if not keep_assignment:
            self._assignment = None

    async def _watch_load(self) -> None:
        last_tokens, last_time = 0, time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            crew = self._crew
            if crew is None:
                if self._state is not WorkState.FINISHED:
                    self._load = {}
                last_tokens = 0
                continue
            try:
                load = await crew.engine.load()
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
                "groups_in_work": crew.worker.in_work,
                "groups_answered": crew.worker.answered,
                "weight_switches": crew.receiver.switches,
                **crew.worker.counts.to_load(),
            }
