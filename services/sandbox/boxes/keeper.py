"""The boxes of a service: some are kept warm, each has an owner or is removed, and orphans are found.

The wait for a box is bounded; a box that comes later is removed again, or kept warm.
A box that could not be removed, or of which only the provider knows, is found by its labels at the next scan.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from flotilla.services.sandbox.providers.base import (
    BOX,
    OWNER,
    Box,
    Cause,
    Found,
    Provider,
    ProviderFailed,
    Wanted,
    is_orphan,
)
from flotilla.shared.net.retry import Backoff

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 60.0
"""How often the provider is asked what boxes there are; sooner after one could not be made or taken away."""
SOON_SECONDS: Final = 2.0
CLOSE_SECONDS: Final = 20.0
WARM_SECONDS: Final = 1800.0
"""How long a box is kept warm; less where half of its life is."""


@dataclass(frozen=True)
class Kept:
    """What boxes a service has.

    Attributes:
        image: the default image of boxes.
        warm: how many of them are kept ready.
        start_seconds: for which one is waited.
        lifetime_seconds: of one that is kept warm; a session that lasts longer gets another one.
        memory_bytes, processors, processes, has_network: of each.
    """

    image: str
    warm: int
    start_seconds: float
    lifetime_seconds: float
    memory_bytes: int
    processors: float
    processes: int
    has_network: bool

    @property
    def least_seconds(self) -> float:
        """Return the minimum remaining life of a box that is kept warm."""
        return max(self.lifetime_seconds - WARM_SECONDS, self.lifetime_seconds / 2)

    def wanted(self, image: str, lifetime_seconds: float) -> Wanted:
        """Describe a box that is to be made."""
        return Wanted(
            f"flotilla-{secrets.token_hex(8)}",
            image,
            lifetime_seconds,
            self.memory_bytes,
            self.processors,
            self.processes,
            self.has_network,
        )


class Boxes:
    """All boxes of a service.

    Args:
        provider: makes them.
        kept: what they are.
        owner: the label of this service.
        now: a clock in seconds that never goes back.
    """

    def __init__(
        self, provider: Provider, kept: Kept, owner: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.provider = provider
        self.kept = kept
        self.failures: Counter[Cause] = Counter()
        """How often the provider failed, by why."""
        self.num_orphans = 0
        """How many boxes without an owner were removed."""
        self._owner, self._now = owner, now
        self._held: set[str] = set()
        self._making: set[str] = set()
        self._warm: list[Box] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._is_short, self._look_soon = asyncio.Event(), asyncio.Event()
        self._is_closing = False

    @property
    def num_held(self) -> int:
        """Count the boxes that there are, warm ones too."""
        return len(self._held)

    @property
    def num_warm(self) -> int:
        """Count the boxes that wait to be used."""
        return len(self._warm)

    async def open(self) -> None:
        """Take away what a service left that was killed here, and begin to keep boxes warm.

        Raises:
            ProviderFailed: the provider refuses its credentials. One that is absent may come later.
        """
        try:
            await self.look()
        except ProviderFailed as error:
            if error.cause in {Cause.REFUSED, Cause.LOST}:
                raise
            log.warning("the provider of sandboxes does not answer", extra={"error": error.detail})
        self._is_short.set()
        self._loops = [asyncio.create_task(self._keep_warm()), asyncio.create_task(self._keep_looking())]

    async def take(self, image: str | None, seconds: float, *, is_fresh: bool = False) -> Box:
        """Return a fresh box, which lives for so long at least.

        Args:
            image: None: the one of warm boxes.
            seconds: of its life.
            is_fresh: make it now: whatever ended one box may have ended those that were warm.

        Raises:
            ProviderFailed: none could be made in time.
        """
        image = image or self.kept.image
        if image == self.kept.image and not is_fresh:
            for box in self._warm:
                if box.ends_at - self._now() >= seconds:
                    self._warm.remove(box)
                    self._is_short.set()
                    return box
        # Its life may begin before it is there: with the pull of its image.
        lifetime = seconds + self.kept.start_seconds
        if image == self.kept.image:
            lifetime = max(lifetime, self.kept.lifetime_seconds)
        making = self._start(self._make(image, lifetime))
        try:
            async with asyncio.timeout(self.kept.start_seconds):
                return await asyncio.shield(making)
        except TimeoutError:
            making.add_done_callback(self._came_late)
            self.failures[Cause.LATE] += 1
            detail = f"no sandbox of {image!r} was there within {self.kept.start_seconds:g} s"
            raise ProviderFailed(Cause.LATE, detail) from None
        except asyncio.CancelledError:
            making.add_done_callback(self._came_late)
            raise

    def drop(self, box: Box) -> None:
        """Remove a box in the background."""
        self._start(self._destroy(box.id))

    def count(self, error: ProviderFailed) -> None:
        """Count a failure of the provider."""
        self.failures[error.cause] += 1

    async def look(self) -> None:
        """List the boxes, and remove those that are not needed.

        Raises:
            ProviderFailed: the provider does not say.
        """
        making, held = set(self._making), set(self._held)
        listed = await self.provider.list()
        await asyncio.gather(*(self._sweep(found.id) for found in listed if self._is_nobodys(found, making, held)))

    async def _sweep(self, box_id: str) -> None:
        """Remove a box without an owner; one that cannot be is retried at the next scan, and delays no other."""
        try:
            await self.provider.destroy(box_id)
        except ProviderFailed as error:
            self.count(error)
            facts = {"box": box_id, "error": error.detail}
            log.warning("an orphaned sandbox could not be removed", extra=facts)
        else:
            self.num_orphans += 1
            log.warning("an orphaned sandbox was removed", extra={"box": box_id})

    def _is_nobodys(self, found: Found, making: set[str], held: set[str]) -> bool:
        if found.labels.get(OWNER) == self._owner:
            # What was made meanwhile is not in the sets of before, and what was being made may have been listed.
            names = found.labels.get(BOX) in making | self._making
            return not names and found.id not in held | self._held
        return is_orphan(found, self._owner, time.time())

    async def close(self) -> None:
        """Remove all boxes and close the provider, within bounds: the rest ends by itself."""
        self._is_closing = True
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._tasks or self._held:
                    ending = map(self._destroy, list(self._held))
                    await asyncio.gather(*self._tasks, *ending, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.provider.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _make(self, image: str, lifetime_seconds: float) -> Box:
        wanted = self.kept.wanted(image, lifetime_seconds)
        self._making.add(wanted.name)
        try:
            box = await self.provider.create(wanted)
            self._held.add(box.id)
        except ProviderFailed as error:
            self.count(error)
            self._look_soon.set()  # there may be half of it
            raise
        finally:
            self._making.discard(wanted.name)
        return box

    def _came_late(self, making: "asyncio.Task[Box]") -> None:
        """Use a box that is no longer waited for."""
        if making.cancelled() or making.exception() is not None:
            return
        box = making.result()
        if not self._is_closing and box.image == self.kept.image and self.num_warm < self.kept.warm:
            self._warm.append(box)
        else:
            self.drop(box)

    async def _destroy(self, box_id: str) -> None:
        try:
            await self.provider.destroy(box_id)
        except ProviderFailed as error:
            self.count(error)
            self._look_soon.set()
            log.warning("a sandbox could not be taken away yet", extra={"box": box_id, "error": error.detail})
        finally:
            self._held.discard(box_id)

    async def _keep_warm(self) -> None:
        """Make boxes until as many as wanted are ready, whenever there are fewer."""
        pauses = Backoff(1.0, LOOK_SECONDS)
        while True:
            self._is_short.clear()
            for box in [box for box in self._warm if box.ends_at - self._now() < self.kept.least_seconds]:
                self._warm.remove(box)
                self.drop(box)
            if self.num_warm < self.kept.warm:
                try:
                    self._warm.append(await self._start(self._make(self.kept.image, self.kept.lifetime_seconds)))
                    pauses.reset()
                except ProviderFailed as error:
                    log.warning("no sandbox can be kept warm", extra={"error": error.detail})
                    await asyncio.sleep(pauses.after(error))
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._is_short.wait()

    async def _keep_looking(self) -> None:
        """Scan for boxes without an owner."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._look_soon.wait()
                    await asyncio.sleep(SOON_SECONDS)
            self._look_soon.clear()
            try:
                await self.look()
            except ProviderFailed as error:
                self.count(error)
                log.warning("sandboxes cannot be listed", extra={"error": error.detail})
