"""Whose turn it is: slots go to callers in turn, and no caller can hold or wait for all that there is.

A caller that floods waits behind itself. Of the callers that wait, the one that holds fewest slots is next; a part of
the slots, and of the places to wait, is left for callers that hold few or none.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from flotilla.services.sandbox.isolation import Slot
from flotilla.shared.errors import DeadlineExceeded, Unavailable

LOOK_SECONDS = 1.0
"""How often a waiter checks whether its caller has hung up, and how often slots that are out of use are tried."""


def may_take(held: int, free: int, spare: int) -> bool:
    """Return whether a caller may have one more slot.

    Of the last ``spare`` slots a caller gets no more than half of what others leave, so one that holds none finds one.

    Args:
        held: slots that the caller has.
        free: unused slots.
        spare: how many one caller alone never gets.
    """
    return free > spare or 2 * held < free


def _nobody(_caller: str) -> bool:
    return False


def _stays() -> bool:
    return False


async def _as_it_is(slot: Slot) -> Slot:
    return slot


@dataclass(frozen=True)
class _Waiter:
    """A waiter: its place in the queue, and what it is given."""

    number: int
    turn: "asyncio.Future[Slot]"


class SlotPool:
    """Hands out slots in turn, to a bounded number of waiters for a bounded time.

    Args:
        slots: all of them, free.
        spare: how many of them one caller alone never gets.
        max_queued: how many calls of one caller may wait; of all callers twice as many.
        queue_seconds: how long.
        renewed: checks a slot that is given back; returns what is handed out next in its place, or None if it cannot
            be used for now.
        has_one: returns whether a caller gets no more than one slot now.
    """

    def __init__(
        self,
        slots: list[Slot],
        *,
        spare: int = 0,
        max_queued: int,
        queue_seconds: float,
        renewed: Callable[[Slot], Awaitable[Slot | None]] = _as_it_is,
        has_one: Callable[[str], bool] = _nobody,
    ) -> None:
        self.slots = tuple(slots)
        self._free = list(slots)
        self._spare = spare
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._numbers = itertools.count()
        self._renewed = renewed
        self._has_one = has_one
        self._returning: set[asyncio.Task[None]] = set()
        self._out_of_use: list[Slot] = []
        self._trying: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._max_queued = max_queued
        self._queue_seconds = queue_seconds

    def load(self) -> dict[str, float]:
        """Return what the service reports of its slots."""
        return {"running": float(self.num_running), "waiting": float(self.num_waiting)}

    @property
    def num_waiting(self) -> int:
        """Count the calls that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        """Count the slots in use."""
        return len(self.slots) - len(self._free) - self.num_out_of_use

    @property
    def num_out_of_use(self) -> int:
        """Count the slots in which something lives that could not be ended."""
        return len(self._out_of_use)

    @property
    def usable(self) -> list[Slot]:
        """List the slots that are not out of use."""
        numbers = {slot.number for slot in self._out_of_use}
        return [slot for slot in self.slots if slot.number not in numbers]

    @property
    def is_full(self) -> bool:
        """Whether a further caller would be refused."""
        return not self._free and self.num_waiting >= 2 * self._max_queued

    @asynccontextmanager
    async def taken(self, caller: str = "", is_gone: Callable[[], bool] = _stays) -> AsyncIterator[Slot]:
        """Wait for a slot, and give it back; it stays the caller's until it has been checked.

        Args:
            caller: for whom.
            is_gone: returns whether the answer is not awaited any more.

        Raises:
            Unavailable: too many wait already, or the answer is not awaited any more.
            DeadlineExceeded: no slot became free in time.
        """
        slot = await self._next(caller, is_gone)
        try:
            yield slot
        finally:
            # A task of its own: answers do not wait for it.
            self._start(self._return(slot, caller))

    async def settled(self) -> None:
        """Wait until every slot that was given back has been checked."""
        while self._returning:
            await asyncio.wait(self._returning)

    async def close(self) -> None:
        """Wait likewise, and try those that are out of use no more."""
        await self.settled()
        self._closing.set()
        if self._trying is not None:
            await asyncio.wait([self._trying])

    async def _next(self, caller: str, is_gone: Callable[[], bool]) -> Slot:
        own = self._waiting.setdefault(caller, deque())
        waiter = _Waiter(next(self._numbers), asyncio.get_running_loop().create_future())
        own.append(waiter)
        self._hand_out()
        try:
            if not waiter.turn.done():
                self._check_room(len(own) - 1)
            async with asyncio.timeout(self._queue_seconds):
                while not waiter.turn.done():
                    await asyncio.wait([waiter.turn], timeout=LOOK_SECONDS)
                    if is_gone():
                        raise Unavailable("the caller hung up before its turn")
                    self._hand_out()  # a bounded caller may no longer be so
        except BaseException as error:
            if waiter.turn.done():
                self._put(waiter.turn.result(), caller)
            else:
                own.remove(waiter)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no turn within {self._queue_seconds:g} s; try again later") from None
            raise
        finally:
            if not own and self._waiting.get(caller) is own:
                del self._waiting[caller]
        return waiter.turn.result()

    def _check_room(self, own: int) -> None:
        """Look whether one more call of a caller may wait, of which ``own`` do.

        Raises:
            Unavailable: too many of its own wait, or of all.
        """
        others = self.num_waiting - 1 - own
        if own >= min(self._max_queued, 2 * self._max_queued - own - others):
            raise Unavailable(f"{own} of your programs and {others} others wait for their turn; try again later")

    def _hand_out(self) -> None:
        """Give free slots to waiters that may have one."""
        while self._free:
            entitled = [
                (self._held[caller], waiters[0].number, caller)
                for caller, waiters in self._waiting.items()
                if waiters and self._may_take(caller)
            ]
            if not entitled:
                return
            _, _, caller = min(entitled)
            self._held[caller] += 1
            # The last that was given back: its fork server is warm.
            self._waiting[caller].popleft().turn.set_result(self._free.pop())

    def _may_take(self, caller: str) -> bool:
        held = self._held[caller]
        return may_take(held, len(self._free), self._spare) and not (held and self._has_one(caller))

    def _start(self, returning: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(returning)
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)
        return task

    async def _return(self, slot: Slot, caller: str) -> None:
        """Take a slot back from a caller."""
        self._put(await self._renewed(slot), caller, slot)

    def _put(self, renewed: Slot | None, caller: str, slot: Slot | None = None) -> None:
        if renewed is not None:
            self._free.append(renewed)
        elif slot is not None:
            self._out_of_use.append(slot)
            if self._trying is None or self._trying.done():
                self._trying = asyncio.create_task(self._try_out_of_use())
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._hand_out()

    async def _try_out_of_use(self) -> None:
        """Try slots that are out of use until all of them can be used, whether or not there is a waiter."""
        while self._out_of_use:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._closing.wait()
                    return
            for slot in list(self._out_of_use):
                if (renewed := await self._renewed(slot)) is not None:
                    self._out_of_use.remove(slot)
                    self._free.append(renewed)
                    self._hand_out()
