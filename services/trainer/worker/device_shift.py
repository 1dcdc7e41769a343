"""When the worker has the device that it shares with the engines: it asks for it, uses it, and releases it on request.

The gateway decides whose shift it is. Within its own the worker keeps its weights on the device from one step to the
next; it releases them when the shift has ended and nothing uses them. Without an order it has the device all the time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import DeviceOrder, DeviceReport, Failure

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0

Move = Callable[[], Awaitable[None]]


class DeviceShift:
    """What this process has on the device.

    Args:
        offload: moves everything off the device.
        reload: moves it back.
        notify: called when there is something new to report.
        on_failure: called with why it cannot be released for now, and with None when it could.
    """

    def __init__(
        self, offload: Move, reload: Move, notify: Callable[[], None], on_failure: Callable[[Failure | None], None]
    ) -> None:
        self._offload, self._reload = offload, reload
        self._notify, self._on_failure = notify, on_failure
        self._order: DeviceOrder | None = None
        self._is_held = True
        self._is_moving = False
        self._wanted = 0
        self._changed = asyncio.Event()
        self._left_at: float | None = None
        self._away_seconds = self._back_seconds = 0.0

    def report(self) -> DeviceReport | None:
        """Return what is held and wanted; None before the first order."""
        if self._order is None:
            return None
        is_held = self._is_held or self._is_moving
        return DeviceReport(shift=self._order.shift, is_held=is_held, is_wanted=self._wanted > 0)

    def take(self, order: DeviceOrder | None) -> None:
        """Accept an order of the gateway."""
        if order is not None and order != self._order:
            self._order = order
            self._look()

    def claim(self) -> None:
        """Use the device without an order: no other service continues this experiment."""
        if self._order is not None:
            self._order = self._order.model_copy(update={"may_hold": True})
            self._look()

    @property
    def is_usable(self) -> bool:
        """Whether it could be used now without waiting for a shift."""
        return self._is_held or self._may_hold

    @property
    def is_shared(self) -> bool:
        """Whether others have it at times."""
        return self._order is not None

    async def acquire(self) -> bool:
        """Wait for the device, and keep it until ``release``; always True. It may be acquired again while held."""
        self._wanted += 1
        self._look()
        began = time.monotonic()
        if self._left_at is not None:
            self._away_seconds += began - self._left_at
            self._left_at = None
        try:
            while not self._is_held or self._is_moving:
                self._changed.clear()
                await self._changed.wait()
        except BaseException:
            self.release()
            raise
        self._back_seconds += time.monotonic() - began
        return True

    def take_seconds(self) -> tuple[float, float]:
        """Return for how long others had it while it was not wanted here, and for how long it was waited for, since the
        last call."""
        taken, self._away_seconds, self._back_seconds = (self._away_seconds, self._back_seconds), 0.0, 0.0
        return taken

    def release(self) -> None:
        """Need it no longer; it is kept until the shift ends."""
        self._wanted -= 1
        self._look()

    @contextlib.asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep the device while the block runs."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()

    async def run(self) -> None:
        """Move what has to be moved, until cancelled."""
        while True:
            due = self._due()
            if due is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._is_moving = True
            try:
                await due()
            finally:
                self._is_moving = False
            self._look()

    @property
    def _may_hold(self) -> bool:
        return self._order is None or self._order.may_hold

    def _due(self) -> Move | None:
        if self._is_held and not self._may_hold and not self._wanted:
            return self._give
        if not self._is_held and self._may_hold and self._wanted:
            return self._get
        return None

    async def _give(self) -> None:
        self._left_at = time.monotonic()
        try:
            await self._offload()
        except Unavailable as error:
            log.warning("the device cannot be released", extra={"error": error.detail})
            self._left_at = None
            self._on_failure(Failure(component="device", cause=error.detail, fatal=False))
            await asyncio.sleep(RETRY_SECONDS)
            return
        self._is_held = False
        self._on_failure(None)
        log.info("weights left the device", extra={"shift": self._order.shift if self._order else None})

    async def _get(self) -> None:
        await self._reload()
        self._is_held = True
        log.info("weights are on the device", extra={"shift": self._order.shift if self._order else None})

    def _look(self) -> None:
        self._changed.set()
        self._notify()


def always_held() -> DeviceShift:
    """Return the shift of a device that is not shared."""

    async def never() -> None:
        raise AssertionError("no order about the device")

    return DeviceShift(never, never, lambda: None, lambda _: None)
