"""When requests may be sent and when new weights may be loaded: the order that the engine protocol promises.

The server knows nothing of requests that hold the weights, nor of draining: here they wait before they are sent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from flotilla.shared.config.sections.asynchrony import OnWeightUpdate


class UpdateGate:
    """Counts the requests at the server, and lets one weight update at a time pass between them."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._updating = asyncio.Lock()
        self._pending: OnWeightUpdate | None = None
        self._is_switching = False
        self._is_held = False
        self._num_inside = 0
        self._num_holding = 0

    @property
    def is_switching(self) -> bool:
        """Whether the server is being paused, loads weights or continues again."""
        return self._is_switching

    @property
    def is_held(self) -> bool:
        """Whether it stays so from one call to the next."""
        return self._is_held

    @asynccontextmanager
    async def inside(self, *, holds_weights: bool, gives_up: Callable[[], bool]) -> AsyncIterator[bool]:
        """Wait until a request may be sent, and count it while the block runs.

        Args:
            holds_weights: whether updates wait for it.
            gives_up: whether it need not be sent any more; asked again at each ``look``.

        Yields:
            Whether it may be sent; not if it gave up first.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: gives_up() or self._may_enter(holds_weights))
            is_inside = not gives_up()
            self._num_inside += is_inside
            self._num_holding += is_inside and holds_weights
        try:
            yield is_inside
        finally:
            self._num_inside -= is_inside
            self._num_holding -= is_inside and holds_weights
            await self.look()

    @asynccontextmanager
    async def updating(self, mode: OnWeightUpdate) -> AsyncIterator[None]:
        """Wait for earlier updates, then send nothing in the block that the mode holds back.

        A gate that is held is taken over, and stays so unless the block switches.
        """
        if not self._is_held:
            await self._updating.acquire()
        self._is_held, self._pending = False, mode
        try:
            yield
        finally:
            if self._is_switching:
                self._is_held = True
            else:
                await self._open()

    async def hold(self, mode: OnWeightUpdate) -> None:
        """Send nothing from when weights may be loaded until ``release``, or until an update that takes over ends."""
        await self._updating.acquire()
        self._pending = mode
        try:
            async with self._changed:
                await self._changed.wait_for(self._may_switch)
                self._is_switching = self._is_held = True
        except BaseException:
            await self._open()
            raise

    async def release(self) -> None:
        """Let requests in again after ``hold``."""
        self._is_switching = self._is_held = False
        await self._open()

    async def _open(self) -> None:
        self._pending = None
        self._updating.release()
        await self.look()

    @asynccontextmanager
    async def switching(self) -> AsyncIterator[None]:
        """Within ``updating``: wait until weights may be loaded, and send nothing at all in the block."""
        async with self._changed:
            # What is inside of a gate that was held waits for this.
            await self._changed.wait_for(lambda: self._is_switching or self._may_switch())
            self._is_switching = True
        try:
            yield
        finally:
            self._is_switching = False

    async def until_open(self, gives_up: Callable[[], bool]) -> None:
        """Wait, inside, until the server samples again, or until it need not any more; see ``inside``."""
        async with self._changed:
            await self._changed.wait_for(lambda: gives_up() or not self._is_switching)

    async def until_empty(self) -> None:
        """Wait until no request is at the server."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._num_inside)

    async def look(self) -> None:
        """Wake all waiters; all of them check again, also when this is cancelled."""
        await asyncio.shield(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _may_enter(self, holds_weights: bool) -> bool:
        if self._is_switching:
            return False
        return self._pending is None or not (holds_weights or self._pending is OnWeightUpdate.DRAIN)

    def _may_switch(self) -> bool:
        return not (self._num_inside if self._pending is OnWeightUpdate.DRAIN else self._num_holding)
