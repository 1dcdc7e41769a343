"""Takes publications in: receives or maps each image, checks it, switches the engine when told to.

The engine serves the old version until the whole new image is here, its checksum is right and the gateway has
committed it. A member that cannot follow a publication says so and catches up by pulling the committed version.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from services.rollout.engines.base import Engine
from services.rollout.staged_images import Spare, StagedImages
from services.rollout.version import VersionGate
from shared.config.asynchrony import OnWeightUpdate
from shared.errors import DeadlineExceeded, FlotillaError, NotFound, Unavailable, WeightTransferFailed, WorkerDied
from shared.schemas.publication import (
    DeltaManifest,
    PublicationOrder,
    PublicationPhase,
    PublicationReport,
    ReceiveState,
    Rendezvous,
    Transport,
)
from shared.schemas.service import DesiredState
from shared.weights.delta import apply_patch
from shared.weights.image import WeightImage
from shared.weights.off_loop import close_images, create_image

log = logging.getLogger(__name__)

PULL_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0
"""Between two tries to serve a version: they grow, since a try may read or fetch gigabytes."""


class GroupEndpoint(Protocol):
    """The process that owns this service's side of a weight group."""

    async def open_receiver(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        """Start to form the group of an epoch."""

    async def joined(self, epoch: int, deadline_seconds: float) -> None:
        """Wait until the group is formed."""

    async def receive(
        self,
        epoch: int,
        image_path: Path,
        image_bytes: int,
        slice_bytes: int,
        deadline_seconds: float,
        on_arrived: Callable[[int], None] | None = None,
    ) -> str:
        """Receive an image into a file, telling how many bytes are there, and give its checksum."""

    async def close_epoch(self, epoch: int) -> None:
        """Leave the group at once, whatever it is doing."""


class Puller(Protocol):
    """Fetches a committed version over HTTP."""

    async def __call__(self, url: str, version: int, directory: Path | None, deadline_seconds: float) -> Path:
        """Write the verified image into a file of ``directory``, or of shared memory."""


class WeightReceiver:
    """Keeps one engine at the version that the gateway wants.

    Args:
        engine: what serves.
        gate: learns each version that serves.
        endpoint: joins weight groups.
        pull: fetches versions that were missed.
        on_update: what happens to samples in flight.
        tell: called when there is something new to report.
        on_engine_death: called when the engine's process ended while it was to load a version.
        keeps_pulled: whether a pulled image stays in memory, to be patched.
    """

    def __init__(
        self,
        engine: Engine,
        gate: VersionGate,
        endpoint: GroupEndpoint,
        pull: Puller,
        on_update: OnWeightUpdate,
        tell: Callable[[], None],
        on_engine_death: Callable[[WorkerDied], None],
        *,
        keeps_pulled: bool = False,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._endpoint = endpoint
        self._pull = pull
        self._images = StagedImages()
        self._transfers = itertools.count(1)
        self._on_update = on_update
        self._tell = tell
        self._on_engine_death = on_engine_death
        self._keeps_pulled = keeps_pulled
        self._desired: DesiredState | None = None
        self._pulling: tuple[str, asyncio.Future[Path]] | None = None
        self._order_due = asyncio.Event()
        self._switch_due = asyncio.Event()
        self._epoch: int | None = None
        self._receiving: tuple[PublicationOrder, asyncio.Task[None]] | None = None
        self.report: PublicationReport | None = None
        self.switches = 0

    @property
    def held_image(self) -> str | None:
        """Checksum of the image that a patch can be applied to."""
        spare = self._images.spare
        return spare.checksum if spare is not None and spare.image.is_owner else None

    def take(self, desired: DesiredState) -> None:
        """Learn what is wanted now."""
        self._desired = desired
        if self._pulling is not None and _server_of(desired.weights_url) != _server_of(self._pulling[0]):
            # Whoever served it is gone: do not wait for it until the deadline.
            self._pulling[1].cancel()
        self._order_due.set()
        self._switch_due.set()

    async def run(self) -> None:
        """Follow what is wanted until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._switch_when_due(), name="weight switch")
            while True:
                await self._order_due.wait()
                self._order_due.clear()
                if self._desired is not None:
                    await self._follow_order(self._desired.publication, tasks)

    async def close(self) -> None:
        """Leave the group and delete the spare images."""
        if self._epoch is not None:
            with contextlib.suppress(FlotillaError):
                await self._endpoint.close_epoch(self._epoch)
        await self._images.close()

    async def _follow_order(self, order: PublicationOrder | None, tasks: asyncio.TaskGroup) -> None:
        if order is None or order.phase not in {PublicationPhase.PREPARING, PublicationPhase.TRANSFERRING}:
            return
        if order.rendezvous is None and order.transport is not Transport.SHARED_MEMORY:
            return
        if self._receiving is not None:
            current, task = self._receiving
            if (current.version, current.epoch) == (order.version, order.epoch):
                return
            task.cancel()
            await asyncio.wait([task])
        self._receiving = (order, tasks.create_task(self._receive(order), name=f"receive version {order.version}"))

    async def _receive(self, order: PublicationOrder) -> None:
        try:
            transfer: int | None = None
            if order.transport is Transport.SHARED_MEMORY:
                await self._take_mapped(order)
            else:
                transfer = await self._take_broadcast(order)
            self._say(order, ReceiveState.RECEIVED, checksum=order.manifest.checksum)
            if self._images.spare is not None:
                # Right, but not committed yet: until it is, the engine only reads it.
                await self._engine.prepare_weights(self._images.spare.image.path, order.version, transfer)
            self._switch_due.set()
        except WorkerDied as error:
            self._on_engine_death(error)
        except (WeightTransferFailed, DeadlineExceeded, Unavailable) as error:
            log.warning("publication was not received", extra={"version": order.version, "error": error.detail})
            await self._leave(order.epoch)
            self._say(order, ReceiveState.FAILED, detail=error.detail)
        except asyncio.CancelledError:
            await asyncio.shield(self._leave(order.epoch))
            raise

    async def _take_mapped(self, order: PublicationOrder) -> None:
        """Map the trainer's image and read it once, for the checksum: no byte of it is copied."""
        manifest, spare = order.manifest, self._images.spare
        if spare is not None and spare.is_of(order.version, manifest.checksum) and not spare.image.is_withdrawn:
            return
        if manifest.image_path is None:
            raise WeightTransferFailed("the trainer offers no image to map")
        async with self._images.mapped(Path(manifest.image_path), manifest.image_bytes) as image:
            self._keep(order, image, await asyncio.to_thread(image.checksum))

    async def _take_broadcast(self, order: PublicationOrder) -> int | None:
        """Receive the image; returns the number of its transfer if the engine expected it."""
        await self._join(order)
        self._say(order, ReceiveState.JOINED)
        manifest = order.manifest
        async with self._images.own(manifest.image_bytes) as image:
            if manifest.delta is not None:
                self._keep(order, image, await self._receive_patched(order, manifest.delta, image))
                return None
            if self._is_version_waiting():
                # The engine may be about to read that one.
                self._keep(order, image, await self._receive_into(order, image))
                return None
            return await self._receive_expected(order, image)

    def _is_version_waiting(self) -> bool:
        spare, serving = self._images.spare, self._gate.version
        return spare is not None and (serving is None or spare.version > serving)

    async def _receive_expected(self, order: PublicationOrder, image: WeightImage) -> int:
        """Receive an image which the engine reads as it arrives."""
        transfer = next(self._transfers)
        await self._engine.expect_weights(image.path, order.version, transfer)
        try:
            checksum = await self._receive_into(order, image, partial(self._engine.weights_arrived, transfer))
            self._keep(order, image, checksum)
        except BaseException:
            self._engine.forget_weights(transfer)
            raise
        return transfer

    async def _receive_into(
        self, order: PublicationOrder, image: WeightImage, on_arrived: Callable[[int], None] | None = None
    ) -> str:
        slice_bytes, deadline = order.manifest.slice_bytes, 2 * order.deadline_seconds
        facts = (order.epoch, image.path, image.image_bytes, slice_bytes, deadline)
        return await self._endpoint.receive(*facts, on_arrived)

    async def _receive_patched(self, order: PublicationOrder, delta: DeltaManifest, image: WeightImage) -> str:
        """Receive a patch and make the image of it and the one that is held."""
        base = self._images.spare
        if base is None or base.checksum != delta.base_checksum:
            raise WeightTransferFailed("the patch is for another image than the one that is held")
        with self._images.using(base.image):
            patch = await create_image(delta.patch_bytes)
            try:
                checksum = await self._receive_into(order, patch)
                if checksum != delta.checksum:
                    found = f"checksum of the patch is {checksum}, the manifest says {delta.checksum}"
                    raise WeightTransferFailed(found)
                work = (patch.view, base.image.view, image.view, delta.block_bytes)
                return await _to_the_end(asyncio.to_thread(apply_patch, *work))
            finally:
                await close_images(patch)

    def _keep(self, order: PublicationOrder, image: WeightImage, checksum: str) -> None:
        if checksum != order.manifest.checksum:
            raise WeightTransferFailed(f"checksum is {checksum}, the manifest says {order.manifest.checksum}")
        self._images.keep(Spare(order.version, checksum, image))

    async def _join(self, order: PublicationOrder) -> None:
        if self._epoch == order.epoch:
            return
        if self._epoch is not None:
            await self._leave(self._epoch)
        assert order.rendezvous is not None and order.rank is not None
        self._epoch = order.epoch
        await self._endpoint.open_receiver(order.rendezvous, order.rank, order.deadline_seconds)
        await self._endpoint.joined(order.epoch, order.deadline_seconds)

    async def _leave(self, epoch: int) -> None:
        if self._epoch == epoch:
            self._epoch = None
        with contextlib.suppress(FlotillaError):
            await self._endpoint.close_epoch(epoch)

    def _say(self, order: PublicationOrder, state: ReceiveState, **facts: str | None) -> None:
        self.report = PublicationReport(version=order.version, epoch=order.epoch, state=state, **facts)
        self._tell()

    async def _switch_when_due(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await self._switch_due.wait()
            self._switch_due.clear()
            target = self._target()
            if target is None:
                continue
            try:
                await self._serve(target)
                pause = FIRST_PAUSE_SECONDS
                continue
            except NotFound as error:
                log.info("version cannot be pulled yet", extra={"version": target, "error": error.detail})
            except WorkerDied as error:
                self._on_engine_death(error)
                continue
            except (Unavailable, DeadlineExceeded, WeightTransferFailed) as error:
                log.warning("version cannot be served", extra={"version": target, "error": error.detail})
            await self._news_within(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _target(self) -> int | None:
        if self._desired is None or self._desired.policy_version is None:
            return None
        wanted = self._desired.policy_version
        serving = self._gate.version
        if serving is not None and wanted <= serving:
            return None
        hold = self._desired.hold_version
        if hold is not None and serving is not None and wanted > hold:
            return None
        return wanted

    async def _serve(self, version: int) -> None:
        if version == 0:
            # The engine started with the initial weights.
            await self._gate.set(0)
            self._tell()
            return
        spare = self._images.spare
        if spare is not None and spare.is_of(version, self._committed_checksum(version)):
            await self._serve_spare(spare)
        else:
            await self._serve_pulled(version)
        await self._gate.set(version)
        self.switches += 1
        self._tell()
        # A newer version may have become due meanwhile.
        self._switch_due.set()

    def _committed_checksum(self, version: int) -> str | None:
        desired = self._desired
        return desired.policy_checksum if desired is not None and desired.policy_version == version else None

    async def _serve_spare(self, spare: Spare) -> None:
        """Load the image that waits.

        Raises:
            WeightTransferFailed: the engine cannot read it, or its file is gone: then it is pulled the next time.
        """
        try:
            with self._images.using(spare.image):
                await self._engine.load_weights(spare.image.path, spare.version, self._on_update)
        except WeightTransferFailed:
            self._drop(spare)
            raise
        if not spare.image.is_owner:
            self._drop(spare)  # The trainer may write into it again.

    def _drop(self, spare: Spare) -> None:
        if self._images.spare is spare:
            self._images.keep(None)

    async def _serve_pulled(self, version: int) -> None:
        url = self._desired.weights_url if self._desired else None
        if url is None:
            raise NotFound(f"nobody serves version {version} now")
        path = await self._pulled(url, version)
        if self._keeps_pulled:
            # The next version may come as a patch for this one.
            image = await self._images.adopt(path)
            with self._images.using(image):
                self._images.keep(Spare(version, await asyncio.to_thread(image.checksum), image))
                await self._engine.load_weights(path, version, self._on_update)
            return
        try:
            await self._engine.load_weights(path, version, self._on_update)
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _pulled(self, url: str, version: int) -> Path:
        pulling = asyncio.ensure_future(self._pull(url, version, None, PULL_SECONDS))
        self._pulling = (url, pulling)
        try:
            return await pulling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Unavailable(f"version {version} is served elsewhere now") from None
        finally:
            self._pulling = None

    async def _news_within(self, seconds: float) -> None:
        """Wait before the next try, or until something else is wanted or there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._switch_due.wait()
        self._switch_due.set()


def _server_of(url: str | None) -> str | None:
    """Cut the version off: a newer one of the same trainer is no reason to give up what comes."""
    return None if url is None else url.rpartition("/")[0]


async def _to_the_end(work: Coroutine[Any, Any, str]) -> str:
    """Await work of a thread, also when cancelled: what it writes to must not be used for anything else meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
