"""How a service follows its desired state: what rollout, reward and trainer share.

The gateway sends the desired state, the service the observed one. ``apply`` notes a desired state and returns at once;
one loop compares both whenever something changed, and moves what is. It never asks how it came about: a change that was
missed, or came twice, leads to the same end.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from flotilla.shared.children.restarts import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS
from flotilla.shared.clock import pause_after
from flotilla.shared.errors import FlotillaError, WorkerDied
from flotilla.shared.schemas.service import Assignment, DesiredState, Failure, ObservedState, WorkState
from flotilla.shared.telemetry.logging import experiment_id as logged_experiment

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
STARTABLE = frozenset({WorkState.RUNNING, WorkState.PAUSED})


class StartBackoff:
    """Pauses between starts: each twice as long as the one before, up to a bound, without an end.

    An endpoint that took too long to start, a server that does not answer: such reasons are transient, and only the
    service itself would try again. What does not pass (a model that cannot be loaded) is for its owner to report.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._due: float | None = None
        self.is_due = False
        """Whether a start was postponed and its pause is over."""

    def postpone(self, pause_seconds: float | None = None) -> float:
        """Count a failed start; return the seconds until the next one is due.

        Args:
            pause_seconds: instead of the pause that grows.
        """
        pause = pause_seconds
        if pause is None:
            pause = pause_after(self._failures + 1, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        self._failures += 1
        self._due, self.is_due = asyncio.get_running_loop().time() + pause, False
        return pause

    @property
    def is_pending(self) -> bool:
        """Whether a start was postponed and its pause is not over."""
        return self._due is not None

    def reset(self) -> None:
        """Forget the failures: a start has succeeded, or is no longer wanted."""
        self._failures, self._due, self.is_due = 0, None, False

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait for news, or for the end of the pause if a start was postponed; the news is taken."""
        try:
            async with asyncio.timeout_at(self._due):
                await changed.wait()
        except TimeoutError:
            # Once: what is due but not wanted now must not be waited for without a pause.
            self._due, self.is_due = None, True
        changed.clear()


class StateFollower(ABC):
    """Makes what is observed follow what is desired.

    Args:
        component: what failures are reported as.
    """

    def __init__(self, component: str) -> None:
        self.component = component
        self.notify: Callable[[], None] = lambda: None
        """Called when the observed state has changed; set by the membership that reports it."""
        self._desired: DesiredState | None = None
        self._changed = asyncio.Event()
        self._backoff = StartBackoff()
        self._assignment: Assignment | None = None
        self._state = WorkState.IDLE
        self._failure: Failure | None = None

    @abstractmethod
    def observe(self) -> ObservedState:
        """Return the observed state."""

    @abstractmethod
    async def _reconcile(self) -> None:
        """Move the observed state towards ``_desired``, by one step or completely."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop all work; called once, when the loop ends."""

    @property
    def _is_over(self) -> bool:
        """Whether the loop can end: no desired state will follow."""
        return False

    def _watches(self) -> Sequence[Coroutine[None, None, None]]:
        """List what runs beside the loop for as long as it does."""
        return ()

    async def apply(self, desired: DesiredState) -> None:
        """Note a desired state; the loop follows it."""
        self._desired = desired
        self._changed.set()

    async def run(self) -> None:
        """Follow the desired state until cancelled, or until there is nothing left to do for good."""
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(each) for each in self._watches()]
            try:
                while not self._is_over:
                    await self._backoff.wait(self._changed)
                    await self._reconcile()
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.shield(self._close())

    def _enter(self, state: WorkState) -> None:
        """Be in a state from now on, and have it reported if it is another one."""
        if self._state is not state:
            self._state = state
            log.info("state changed", extra={"state": state.value})
            self.notify()

    def _fail(self, cause: str | Failure) -> None:
        """Report that the experiment cannot continue here."""
        failure = Failure(component=self.component, cause=cause) if isinstance(cause, str) else cause
        log.error("work cannot go on", extra={"component": failure.component, "cause": failure.cause})
        self._failure = failure
        self._enter(WorkState.FAILED)
        self.notify()


class Session(Protocol):
    """All that works for one experiment."""

    async def close(self) -> None:
        """End it and free everything."""


AnySession = TypeVar("AnySession", bound=Session)


class SessionFollower(StateFollower, Generic[AnySession]):
    """Follows with one session at a time, which is opened for an experiment and closed after it."""

    def __init__(self, component: str) -> None:
        super().__init__(component)
        self._session: AnySession | None = None
        self._working: list[asyncio.Task[None]] = []

    @abstractmethod
    async def _open(self, assignment: Assignment) -> AnySession:
        """Open a session.

        Raises:
            FlotillaError: it cannot be opened; one that is ``retryable`` is tried again.
        """

    @abstractmethod
    def _lanes(self, session: AnySession) -> Mapping[str, Coroutine[None, None, None]]:
        """Return by name what a session runs until it is closed."""

    def _is_mine(self, assignment: Assignment | None) -> bool:
        mine = self._assignment
        return mine is not None and assignment is not None and mine.experiment_id == assignment.experiment_id

    async def _ensure_session(self, assignment: Assignment, wanted: WorkState) -> AnySession | None:
        """Open the session if there is none, it is wanted, and nothing speaks against it; return what there is."""
        may_start = self._failure is None or self._backoff.is_due
        if self._session is None and may_start and wanted in STARTABLE:
            await self._start(assignment)
        return self._session

    async def _start(self, assignment: Assignment) -> None:
        self._assignment = assignment
        logged_experiment.set(assignment.experiment_id)
        self._enter(WorkState.STARTING)
        try:
            # In a task of its own: a failed TaskGroup leaves a cancellation request behind in the task that waited for
            # it, and before Python 3.11.3 the next timeout of such a task ends as a cancellation, which is not logged.
            opening = asyncio.create_task(self._open(assignment), name="opening a session")
            self._session = await opening
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                # It was open already when this was cancelled: it is closed with everything else.
                self._session = opening.result()
            raise
        except FlotillaError as error:
            self._on_failed_start(error)
            return
        self._backoff.reset()
        self._failure = None
        self._working = [asyncio.create_task(lane, name=name) for name, lane in self._lanes(self._session).items()]
        for task in self._working:
            task.add_done_callback(self._on_lane_end)

    def _on_failed_start(self, error: FlotillaError) -> None:
        # A process that was killed while it started is, unlike code that cannot be loaded, worth another try.
        if error.retryable or isinstance(error, WorkerDied):
            pause = self._backoff.postpone()
            log.warning("the start is tried again", extra={"error": error.detail, "pause_seconds": pause})
            component = str(error.context.get("component", self.component))
            self._failure = Failure(component=component, cause=error.detail, fatal=False)
            self.notify()
            return
        self._backoff.reset()
        self._fail(error.detail)

    def _on_lane_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended", task.get_name(), exc_info=error)
            self._fail(f"{task.get_name()} ended: {error!r}")

    async def _end_session(self, *, keep_assignment: bool = False) -> None:
        """Close the session, if there is one; what it still runs is cancelled first."""
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

    async def _close(self) -> None:
        await self._end_session()
