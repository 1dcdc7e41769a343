"""Weight images between processes of one host: the sender names its image, each receiver copies it out.

A receiver holds a shared lock on the sender's image while it copies, and a sender writes its next version into an image
that nobody holds: nobody ever reads bytes that change.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import xxhash

from shared.errors import Conflict, DeadlineExceeded, FlotillaError, NotFound, WeightTransferFailed
from shared.schemas.publication import Rendezvous
from shared.weights.mappings import KeptMappings
from shared.weights.same_host import Answer, HostedGroup, JoinedGroup, Offer

COPY_BYTES = 256 << 10
"""Copied, and then hashed while it is still in the processor's cache."""


class SharedMemoryTransport:
    """Both ends, ``WeightSender`` and ``WeightReceiver``, between processes that see the same ``/dev/shm``.

    Args:
        bind_host: address of this host that the sender listens on.
    """

    def __init__(self, *, bind_host: str = "127.0.0.1") -> None:
        self._bind_host = bind_host
        self._hosted: dict[int, HostedGroup] = {}
        self._joined: dict[int, JoinedGroup] = {}
        self._mappings = KeptMappings()

    async def open_sender(self, epoch: int, world_size: int, timeout_seconds: float) -> Rendezvous:
        """See :class:`WeightSender`; members that do not come within the time-out are for ``joined`` to notice."""
        self._check_closed(epoch)
        self._hosted[epoch] = group = HostedGroup(epoch, world_size)
        try:
            async with asyncio.timeout(timeout_seconds):
                port = await group.open(self._bind_host)
        except BaseException:
            await self.close_epoch(epoch)
            raise
        return Rendezvous(host=self._bind_host, port=port, epoch=epoch, world_size=world_size)

    async def open_receiver(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        """See :class:`WeightReceiver`."""
        self._check_closed(rendezvous.epoch)
        self._joined[rendezvous.epoch] = JoinedGroup(rendezvous, rank, timeout_seconds)

    async def joined(self, epoch: int, deadline_seconds: float) -> None:
        """See :class:`WeightMember`."""
        group = self._hosted.get(epoch)
        waiting = group.joined if group is not None else self._membership(epoch).joining
        async with _deadline(deadline_seconds, f"joining the weight group of epoch {epoch}"):
            await asyncio.shield(waiting)

    async def send(
        self, epoch: int, image_path: Path, image_bytes: int, slice_bytes: int, deadline_seconds: float
    ) -> None:
        """See :class:`WeightSender`; returns when every receiver has its copy. ``slice_bytes`` has no bearing here."""
        group = self._hosted.get(epoch)
        if group is None:
            raise NotFound(f"epoch {epoch} is not open")
        try:
            async with _deadline(deadline_seconds, f"transferring the weights in epoch {epoch}"):
                await asyncio.shield(group.joined)
                await group.offer(Offer(image_path=image_path, image_bytes=image_bytes))
        except DeadlineExceeded:
            group.fail("a receiver stalled")
            raise

    async def receive(
        self, epoch: int, image_path: Path, image_bytes: int, slice_bytes: int, deadline_seconds: float
    ) -> str:
        """See :class:`WeightReceiver`. ``slice_bytes`` has no bearing here."""
        group = self._membership(epoch)
        abandoned = threading.Event()
        try:
            async with _deadline(deadline_seconds, f"transferring the weights in epoch {epoch}"):
                offer = await group.next_offer()
                checksum = await asyncio.to_thread(self._copy, offer, image_path, image_bytes, abandoned)
        except FlotillaError as error:
            if group.is_connected:
                group.answer(Answer(failure=error.detail))
            raise
        finally:
            abandoned.set()
        group.answer(Answer())
        return checksum

    async def close_epoch(self, epoch: int) -> None:
        """See :class:`WeightMember`."""
        hosted, joined = self._hosted.pop(epoch, None), self._joined.pop(epoch, None)
        if hosted is not None:
            hosted.close()
        if joined is not None:
            await joined.close()
        if not self._joined:
            await asyncio.to_thread(self._mappings.close)

    async def close(self) -> None:
        """See :class:`WeightMember`."""
        for epoch in [*self._hosted, *self._joined]:
            await self.close_epoch(epoch)

    def _check_closed(self, epoch: int) -> None:
        if epoch in self._hosted or epoch in self._joined:
            raise Conflict(f"epoch {epoch} is open already")

    def _membership(self, epoch: int) -> JoinedGroup:
        try:
            return self._joined[epoch]
        except KeyError:
            raise NotFound(f"epoch {epoch} is not open") from None

    def _copy(self, offer: Offer, image_path: Path, image_bytes: int, abandoned: threading.Event) -> str:
        """Copy and hash at once; runs in a thread, which ends soon after it is abandoned."""
        if offer.image_bytes != image_bytes:
            raise WeightTransferFailed(f"{offer.image_bytes} bytes are sent, the manifest says {image_bytes}")
        with self._mappings.use((offer.image_path, image_bytes), (image_path, image_bytes)) as (source, target):
            origin, copied = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
            digest = xxhash.xxh3_64()
            for start in range(0, image_bytes, COPY_BYTES):
                if abandoned.is_set():
                    raise WeightTransferFailed("the copy was abandoned")
                piece = copied[start : start + COPY_BYTES]
                np.copyto(piece, origin[start : start + COPY_BYTES])
                digest.update(piece.data)
            return digest.hexdigest()


@contextlib.asynccontextmanager
async def _deadline(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} took more than {seconds} s") from None
