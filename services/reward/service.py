"""Follows the desired state: grades for one experiment at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Protocol

from flotilla.services.reward.consumer import RewardConsumer
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.service import Assignment, Failure, ObservedState, WorkState
from flotilla.shared.service import reconciling
from flotilla.shared.service.reconciling import SessionFollower

DRAIN_SECONDS = 30.0
DRAIN_LOOK_SECONDS = 0.05
WATCH_SECONDS = 0.5
REPORT_SECONDS = 3.0


class Session(reconciling.Session, Protocol):
    """All that works for one experiment; closing it ends the verifiers' processes and connections."""

    worker: RewardConsumer


OpenSession = Callable[[ExperimentSpec, Assignment], Awaitable[Session]]


class RewardService(SessionFollower[Session]):
    """Makes what is observed follow what is desired.

    Args:
        open_session: makes verifier and worker for an experiment.
    """

    def __init__(self, open_session: OpenSession) -> None:
        super().__init__("reward")
        self._open_session = open_session

    def observe(self) -> ObservedState:
        """Report state and load."""
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
            failure=self._failure or self._waiting(),
            grading=worker.tally.report(worker.graders) if worker is not None else None,
        )

    def _waiting(self) -> Failure | None:
        """Return the server that does not answer the session, if any."""
        return None if self._session is None else self._session.worker.problem

    def _watches(self) -> Sequence[Coroutine[None, None, None]]:
        return [self._watch_failures(), self._watch_grades()]

    async def _reconcile(self) -> None:
        desired = self._desired
        if desired is None:
            return
        assignment = desired.assignment
        if assignment is None or desired.state is WorkState.IDLE or not self._is_mine(assignment):
            await self._end_session()
            self._failure = None
            self._backoff.reset()
        if assignment is None or desired.state is WorkState.IDLE:
            self._enter(WorkState.IDLE)
            return
        session = await self._ensure_session(assignment, desired.state)
        if session is None:
            return
        if desired.state is WorkState.RUNNING:
            session.worker.resume()
            self._enter(WorkState.RUNNING)
        elif desired.state is WorkState.PAUSED:
            session.worker.pause()
            self._enter(WorkState.PAUSED)
        elif desired.state is WorkState.DRAINING:
            await self._drain(session)

    async def _open(self, assignment: Assignment) -> Session:
        return await self._open_session(ExperimentSpec.model_validate(assignment.spec), assignment)

    def _lanes(self, session: Session) -> Mapping[str, Coroutine[None, None, None]]:
        return {"reward worker": session.worker.run()}

    async def _drain(self, session: Session) -> None:
        """Grade what is in progress; what takes too long is handed back. Other news ends the wait."""
        self._enter(WorkState.DRAINING)
        session.worker.pause()
        end = time.monotonic() + DRAIN_SECONDS
        while session.worker.in_work and time.monotonic() < end:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
            if self._changed.is_set():
                return
        await self._end_session(keep_assignment=True)
        self._enter(WorkState.FINISHED)

    async def _watch_grades(self) -> None:
        """Report what was graded every few seconds: a run without signal is then named within them."""
        reported = 0
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            graded = 0 if self._session is None else self._session.worker.tally.num_groups
            if graded != reported:
                reported = graded
                self.notify()

    async def _watch_failures(self) -> None:
        waiting: Failure | None = None
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if waiting != (waiting := self._waiting()):
                self.notify()
            if self._session is None or self._failure is not None:
                continue
            reason = self._session.worker.why_hopeless
            if reason is not None:
                self._session.worker.pause()
                self._fail(reason)
