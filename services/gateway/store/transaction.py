"""What changes together: rows that are stored all or not at all, and the memory that follows them.

The gateway answers from memory, and memory is what the store holds. So a change is first staged, then stored in one
transaction, and only then taken over by memory, in one turn of the event loop; one that could not be stored has never
been. Transactions take turns: what one reads from memory is still true when it is stored.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from flotilla.services.gateway.store.records import StoredAnswer
from flotilla.services.gateway.store.writes import (
    AppendEvent,
    DeleteAnswers,
    DeleteDeliveries,
    PointRecord,
    PutMetrics,
    PutRecord,
    PutWindow,
    Write,
)
from flotilla.shared.errors import FlotillaError, Unavailable
from flotilla.shared.schemas.experiment import Event

log = logging.getLogger(__name__)

T = TypeVar("T")
Stage = Callable[["Transaction"], None]
"""Puts its part of a change together."""
ANSWER_SECONDS = 60.0
"""Longest time for a statement, what waits before it included. Far above the five seconds that SQLite may be locked."""
SOON_SECONDS = 0.5
"""How long measurements wait at most for a transaction that they are stored with."""


class Transaction:
    """A change that is being put together. Nothing is awaited meanwhile: other changes wait for it."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self._staged: dict[object, Any] = {}
        self._effects: list[Callable[[], object]] = []

    def write(self, *writes: Write) -> None:
        """Store these after what was written before."""
        self.writes += writes

    def stage(self, key: object, value: object) -> None:
        """Remember what ``key`` will be once this is stored, for whoever changes it again in the same transaction."""
        self._staged[key] = value

    def staged(self, key: object, otherwise: T) -> T:
        """Return what ``key`` will be once this is stored; ``otherwise``, its present value, if unchanged."""
        found: T = self._staged.get(key, otherwise)
        return found

    def then(self, effect: Callable[[], object]) -> None:
        """Let memory follow: called once all is stored, in the order of the calls, with nothing in between."""
        self._effects.append(effect)

    def take_effect(self) -> None:
        """Let memory follow."""
        for effect in self._effects:
            effect()


def _stage(stage: Stage, change: Transaction) -> None:
    """Add a part that goes along; one that fails is left out, since every transaction would fail with it."""
    before = len(change.writes)
    try:
        stage(change)
    except Exception:
        del change.writes[before:]
        log.exception("a part of a transaction that was to go along with it cannot be put together")


class TransactionalStore(ABC):
    """What the twins of the store have in common: how changes take turns."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._holder: asyncio.Task[Any] | None = None
        self._soon: list[Write] = []
        self._joining: list[Stage] = []
        self._timer: asyncio.TimerHandle | None = None
        self._storing_soon: asyncio.Task[None] | None = None

    @abstractmethod
    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        """Store all of them or none; return the events among them, with their ids.

        Waits until it is known which of the two it was, however long that takes: whoever calls bounds their wait.

        Raises:
            Unavailable: the database does not answer; nothing was stored, or the detail says that this is unknown.
        """

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Put a change together in the block; it is stored, and memory follows, when the block ends.

        An error in the block drops it. Once the block has ended, nothing stops it: the caller's cancellation or
        deadline ends only the caller's wait, and whoever comes next waits for the outcome.

        Raises:
            Unavailable: the database does not answer: nothing has changed, or, after a time-out, this is not known yet.
        """
        assert self._holder is None or self._holder is not asyncio.current_task(), "a transaction within a transaction"
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise late() from None
        change = Transaction()
        joining, self._joining = self._joining, []
        try:
            self._holder = asyncio.current_task()
            for stage in joining:
                _stage(stage, change)
            yield change
        except BaseException:
            if joining:
                self._joining = [*joining, *self._joining]
                self._set_timer()
            self._turn.release()
            raise
        finally:
            self._holder = None
        await in_time(asyncio.ensure_future(self._settle(change)))

    def write_soon(self, *writes: Write) -> None:
        """Store these with the next transaction, or in half a second, and before anybody reads series or windows.

        For what is measured, and for nothing that anything follows from: nobody hears whether it is stored, and a
        process that is killed before takes it along.
        """
        windows = {(each.experiment_id, each.name) for each in writes if isinstance(each, PutWindow)}
        # While the database is away the last one of each is kept, however often it changes.
        kept = [w for w in self._soon if not isinstance(w, PutWindow) or (w.experiment_id, w.name) not in windows]
        self._soon = [*kept, *writes]
        self._set_timer()

    def stage_soon(self, stage: Stage) -> None:
        """Let this be a part of the next transaction, or of one in half a second, and stored before anybody reads.

        For what is found out again where it was not stored: a process that is killed before, or a database that does
        not answer or refuses that transaction, takes it along.

        Args:
            stage: called first in that transaction, when another may have changed what it is about.
        """
        self._joining.append(stage)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_SECONDS, self._on_time)

    def _end_timer(self) -> None:
        """Let what comes next wait half a second of its own, now that nothing waits any more."""
        if self._timer is not None and not self._soon and not self._joining:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        if self._soon or self._joining:
            self._storing_soon = asyncio.create_task(self._store_soon(), name="store what was measured")

    async def _store_soon(self) -> None:
        try:
            await self.store_waiting()
        except FlotillaError as error:
            log.warning("what was measured is not stored yet", extra={"error": error.detail})
            self.write_soon()

    async def store_waiting(self) -> None:
        """Store now what ``write_soon`` and ``stage_soon`` were given.

        Raises:
            Unavailable: the database does not answer; it waits on.
        """
        if self._soon or self._joining:
            async with self.transaction():
                pass

    async def _end_waiting(self) -> None:
        """Store what waits, as far as the database answers, and wait no more."""
        if self._storing_soon is not None:
            await asyncio.wait([self._storing_soon])
        with contextlib.suppress(FlotillaError):
            await self.store_waiting()
        if self._timer is not None:
            self._timer.cancel()

    async def put_metrics(self, experiment_id: str, points: Sequence[PointRecord]) -> None:
        """Store points; one with the same name and step replaces the earlier one and moves to the end."""
        if points:
            await self._apply_one(PutMetrics(experiment_id, points))

    async def append_event(self, experiment_id: str, kind: str, at: float, data: Mapping[str, Any]) -> Event:
        """Store an event under the next id."""
        (event,) = await self._apply_one(AppendEvent(experiment_id, kind, at, data))
        return event

    async def put_answer(self, answer: StoredAnswer) -> None:
        """Keep the answer to an idempotency key."""
        await self._apply_one(PutRecord(answer))

    async def delete_answers(self, before: float) -> None:
        """Forget answers older than ``before``, seconds since the epoch."""
        await self._apply_one(DeleteAnswers(before))

    async def delete_deliveries(self, message_ids: Collection[str]) -> None:
        """Forget what has been sent to web hooks, or is given up."""
        await self._apply_one(DeleteDeliveries(message_ids))

    async def _apply_one(self, write: Write) -> list[Event]:
        return await in_time(asyncio.ensure_future(self.apply([write])))

    async def _settle(self, change: Transaction) -> None:
        try:
            # First: where an experiment is deleted, its measurements go with it.
            soon, self._soon = self._soon, []
            self._end_timer()
            if soon:
                await self._apply_with(soon, change.writes)
            elif change.writes:
                await self.apply(change.writes)
            change.take_effect()
        finally:
            self._turn.release()

    async def _apply_with(self, soon: list[Write], writes: Sequence[Write]) -> None:
        """Store a change together with what waited; neither keeps the other from being stored."""
        try:
            await self.apply([*soon, *writes])
            return
        except Unavailable:
            self._keep_waiting(soon)
            raise
        except FlotillaError as error:
            refused = error
        try:
            if writes:
                await self.apply(writes)
        except BaseException:
            # It was the change that is refused, or the database went away.
            self._keep_waiting(soon)
            raise
        log.error("what was measured is refused, and dropped", extra={"error": refused.detail})

    def _keep_waiting(self, soon: list[Write]) -> None:
        self._soon = [*soon, *self._soon]
        self._set_timer()


async def in_time(storing: "asyncio.Future[T]") -> T:
    """Wait for a statement within its deadline. A late one continues, and is done in its turn.

    Raises:
        Unavailable: it was late.
    """
    try:
        await asyncio.wait({storing}, timeout=ANSWER_SECONDS)
    finally:
        if not storing.done():
            storing.add_done_callback(_log_failure)
    if not storing.done():
        raise late()
    return storing.result()


def late() -> Unavailable:
    """Make the error of a database that does not answer in time."""
    return Unavailable(f"the database did not answer within {ANSWER_SECONDS:g} s")


def _log_failure(storing: "asyncio.Future[Any]") -> None:
    error = None if storing.cancelled() else storing.exception()
    if error is not None:
        log.error("a late statement failed", extra={"error": repr(error)})
