"""Follows the desired state: grades for one experiment at a time."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.reward.consumer import RewardConsumer
from shared.config.spec import ExperimentSpec
from shared.errors import FlotillaError
from shared.schemas.service import Assignment, DesiredState, Failure, ObservedState, WorkState
from shared.start_backoff import StartBackoff
from shared.telemetry.logging import experiment_id as logged_experiment

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
DRAIN_SECONDS = 30.0
DRAIN_LOOK_SECONDS = 0.05
WATCH_SECONDS = 0.5


class Session(Protocol):
    """All that works for one experiment."""

    worker: RewardConsumer

    async def close(self) -> None:
        """End the verifiers' processes and connections."""


OpenSession = Callable[[ExperimentSpec, Assignment], Awaitable[Session]]


class RewardService:
    """Makes what is observed follow what is desired.

    Args:
        open_session: makes verifier and worker for an experiment.
    """

    def __init__(self, open_session: OpenSession) -> None:
        self._open_session = open_session
        self._desired: DesiredState | None = None
        self._changed = asyncio.Event()
        self._state = WorkState.IDLE
        self._assignment: Assignment | None = None
        self._session: Session | None = None
        self._working: asyncio.Task[None] | None = None
        self._failure: Failure | None = None
        self._backoff = StartBackoff()
        self.tell: Callable[[], None] = lambda: None

    def observe(self) -> ObservedState:
        """Say what is going on."""
        worker = self._session.worker if self._session else None
        load = {}
        if worker is not None:
            load = {
                "groups_in_work": float(worker.in_work),
                "graded_samples": float(worker.graded_samples),
                "failed_samples": float(worker.failed_samples),
            }
        return ObservedState(
            experiment_id=self._assignment.experiment_id if self._assignment else None,
            state=self._state,
            load=load,
            failure=self._failure,
        )

    async def apply(self, desired: DesiredState) -> None:
        """Take a desired state in; the work of following it is done by ``run``."""
        self._desired = desired
        self._changed.set()

    async def run(self) -> None:
        """Follow the desired state until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_failures(), name="grading failures")
            try:
                while True:
                    await self._backoff.wait(self._changed)
                    if self._desired is not None:
                        await self._follow(self._desired)
            finally:
                await asyncio.shield(self._dismiss())

    async def _follow(self, desired: DesiredState) -> None:
        assignment = desired.assignment
        if assignment is None or self._is_another(assignment):
            await self._dismiss()
            self._failure = None
            self._backoff.reset()
        if assignment is None or desired.state is WorkState.IDLE:
            await self._dismiss()
            self._become(WorkState.IDLE)
            return
        may_start = self._failure is None or self._backoff.is_due
        if self._session is None and may_start and desired.state in {WorkState.RUNNING, WorkState.PAUSED}:
            await self._hire(assignment)
        if self._session is None:
            return
        if desired.state is WorkState.RUNNING:
            self._session.worker.resume()
            self._become(WorkState.RUNNING)
        elif desired.state is WorkState.PAUSED:
            self._session.worker.pause()
            self._become(WorkState.PAUSED)
        elif desired.state is WorkState.DRAINING:
            await self._drain(self._session)

    async def _drain(self, session: Session) -> None:
        """Grade what is in hand; what takes too long is handed back. Other news ends the wait."""
        self._become(WorkState.DRAINING)
        session.worker.pause()
        end = time.monotonic() + DRAIN_SECONDS
        while session.worker.in_work and time.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
            if self._changed.is_set():
                return
        assignment = self._assignment
        await self._dismiss()
        self._assignment = assignment
        self._become(WorkState.FINISHED)

    def _is_another(self, assignment: Assignment) -> bool:
        return self._assignment is not None and self._assignment.experiment_id != assignment.experiment_id

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
            self._session = await self._open_session(ExperimentSpec.model_validate(assignment.spec), assignment)
        except FlotillaError as error:
            self._on_failed_start(error)
            return
        self._backoff.reset()
        self._failure = None
        self._working = asyncio.create_task(self._session.worker.run(), name="reward worker")
        self._working.add_done_callback(self._on_end)

    def _on_failed_start(self, error: FlotillaError) -> None:
        if error.retryable:
            pause = self._backoff.postpone()
            log.warning("the start is tried again", extra={"error": error.detail, "pause_seconds": pause})
            self._failure = Failure(component="reward", cause=error.detail, fatal=False)
            self.tell()
            return
        log.error("grading cannot start", extra={"error": error.detail})
        self._backoff.reset()
        self._fail(error.detail)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("the reward worker ended", exc_info=task.exception())
            self._fail(f"the worker ended: {task.exception()!r}")

    def _fail(self, cause: str) -> None:
        self._failure = Failure(component="reward", cause=cause)
        self._become(WorkState.FAILED)

    async def _watch_failures(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._session is None or self._failure is not None:
                continue
            reason = self._session.worker.why_hopeless
            if reason is not None:
                self._session.worker.pause()
                self._fail(reason)

    async def _dismiss(self) -> None:
        session, working = self._session, self._working
        self._session = self._working = None
        self._assignment = None
        if working is not None:
            working.cancel()
            await asyncio.wait([working], timeout=STOP_SECONDS)
        if session is not None:
            await session.close()
