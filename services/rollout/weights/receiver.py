"""Follows publications: receives, maps or fetches each image, and checks it.

The engine serves the old version until the whole new image is here, its checksum is right and the gateway has
committed it; then ``switcher`` makes it serve. A member that cannot follow a publication reports it, and catches up by
pulling the committed version.

Has an engine that is itself a member of weight groups follow the publications that it takes part in.

The engine is paused when it has joined, so an order is either followed to the commit or abandoned. A group that breaks
is no failure of this member: it stays paused for the next epoch, which the gateway opens at once, and gives up where
that is without it. It does not stay so for a gateway that is absent: it waits for its word for a while, then continues
sampling. What was lost on the way is loaded like any version that was missed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from flotilla.services.rollout.engines.base import Engine, GroupBroken, GroupMember, OnEngineDeath, WeightTransfer
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.staged_images import StagedImage, StagedImages
from flotilla.services.rollout.weights.switcher import VersionSwitcher
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.concurrency.cancelling import to_the_end
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import (
    DeadlineExceeded,
    FlotillaError,
    NotFound,
    Unauthorized,
    Unavailable,
    WeightTransferFailed,
    WorkerDied,
)
from flotilla.shared.schemas.publication import (
    DeltaManifest,
    PublicationOrder,
    PublicationPhase,
    PublicationReport,
    ReceiveState,
    Transport,
)
from flotilla.shared.schemas.service import DesiredState, ServedWeights
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.delta import apply_patch
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.off_loop import close_images, create_image
from flotilla.shared.weights.pull.server import PublishedImages

OPEN = frozenset({PublicationPhase.PREPARING, PublicationPhase.TRANSFERRING})
CLOSE_SECONDS = 5.0
WORD_PHASES = 2
"""Deadlines of a phase until the gateway has said what follows on joining: it takes one at most."""
EPOCH_PHASES = 5
"""The same once tensors have come, which are lost if this is abandoned: one until the others have them or are found
missing, three for the sender to open the next epoch."""


class GroupOrders:
    """Follows one order at a time.

    Args:
        member: the engine.
        switcher: serves what was received, and loads what was lost.
        on_update: what happens to samples in flight.
        report: called with how far the member is, and why it failed.
        on_engine_death: called when the engine's process ended.
    """

    def __init__(
        self,
        member: GroupMember,
        switcher: VersionSwitcher,
        on_update: OnWeightUpdate,
        report: Callable[[PublicationOrder, ReceiveState, str | None], None],
        on_engine_death: OnEngineDeath,
    ) -> None:
        self._member = member
        self._switcher = switcher
        self._on_update = on_update
        self._report = report
        self._on_engine_death = on_engine_death
        self._following: tuple[PublicationOrder, asyncio.Task[None]] | None = None
        self._is_sending = asyncio.Event()
        self._received: int | None = None
        self._hold: int | None = None

    async def follow(self, desired: DesiredState, tasks: asyncio.TaskGroup) -> None:
        """Do what is wanted now, which may be what was wanted before."""
        order, self._hold = desired.publication, desired.hold_version
        if order is None or order.phase not in OPEN or order.transport is not Transport.ENGINE:
            await self._settle(desired.policy_version)
            return
        if order.rendezvous is None:
            return
        if self._following is not None:
            current, task = self._following
            if (current.version, current.epoch) == (order.version, order.epoch):
                if order.phase is PublicationPhase.TRANSFERRING:
                    self._is_sending.set()
                return
            await _cancelled(task)
        self._is_sending = asyncio.Event()
        if order.phase is PublicationPhase.TRANSFERRING:
            self._is_sending.set()
        self._following = order, tasks.create_task(self._take_part(order), name=f"receive version {order.version}")

    async def close(self) -> None:
        """Leave what is going on, as far as the engine answers in time: it is closed next, which ends the rest."""
        leaving = asyncio.create_task(self._leave(), name="leaving the weight group")
        await asyncio.wait([leaving], timeout=CLOSE_SECONDS)

    async def _leave(self) -> None:
        if self._following is not None:
            await _cancelled(self._following[1])
        with contextlib.suppress(FlotillaError):
            await self._member.give_up()

    async def _settle(self, committed: int | None) -> None:
        """Leave an order that is over: the switcher serves what was committed, anything else is dropped."""
        if self._following is None:
            return
        (_, task), self._following = self._following, None
        await _cancelled(task)
        if self._received is None or self._received != committed:
            await self._give_up()

    async def _take_part(self, order: PublicationOrder) -> None:
        """Take part until the gateway's next word, which ends this: it comes with a commit or with another order."""
        try:
            try:
                await self._join(order)
                self._report(order, ReceiveState.JOINED, None)
                await _told(self._is_sending, WORD_PHASES * order.deadline_seconds)
                self._check_hold(order)
                await self._member.receive(order)
                self._received = order.version
                self._report(order, ReceiveState.RECEIVED, None)
                self._switcher.look()
                await _told(asyncio.Event(), EPOCH_PHASES * order.deadline_seconds)
            except GroupBroken as error:
                log.info("the weight group broke", extra={"version": order.version, "cause": str(error)})
                await _told(asyncio.Event(), EPOCH_PHASES * order.deadline_seconds)
        except WorkerDied as error:
            self._on_engine_death(error)
        except (WeightTransferFailed, DeadlineExceeded, Unavailable) as error:
            log.warning("publication was not received", extra={"version": order.version, "error": error.detail})
            await self._give_up()
            self._report(order, ReceiveState.FAILED, error.detail)

    async def _join(self, order: PublicationOrder) -> None:
        try:
            async with asyncio.timeout(order.deadline_seconds):
                await self._switcher.reserve()
                self._received = None
                self._check_hold(order)
                await self._member.join(order, self._on_update)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not stop sampling and join within {order.deadline_seconds} s"
            ) from None

    def _check_hold(self, order: PublicationOrder) -> None:
        # Asked again before the first tensor: the evaluation may have begun since.
        if self._hold is not None and order.version > self._hold:
            held = f"an evaluation holds version {self._hold}: its weights cannot be written over"
            raise WeightTransferFailed(held)

    async def _give_up(self) -> None:
        self._received = None
        try:
            is_lost = not await self._member.give_up()
        except WorkerDied as error:
            self._on_engine_death(error)
            return
        await self._switcher.release(is_lost=is_lost)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


async def _told(word: asyncio.Event, seconds: float) -> None:
    """Wait for the gateway, while nothing is sampled.

    Raises:
        DeadlineExceeded: it said nothing.
    """
    try:
        async with asyncio.timeout(seconds):
            await word.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the gateway has not said within {seconds:g} s what follows: sampling goes on under the version that is "
            "committed"
        ) from None


log = logging.getLogger(__name__)


class WeightReceiver:
    """Keeps one engine at the version that the gateway wants.

    Args:
        engine: what serves; where it is itself a member of weight groups, the endpoint is not used.
        gate: learns each version that serves.
        endpoint: joins weight groups.
        missed: finds versions that were missed.
        on_update: what happens to samples in flight.
        notify: called when there is something new to report.
        on_engine_death: called when the engine's process ended while it was to load a version.
        published: where other rollouts get the images that this one keeps; None offers none.

    Attributes:
        gate: the version that serves.
    """

    def __init__(
        self,
        engine: Engine,
        gate: VersionGate,
        endpoint: EndpointClient,
        missed: MissedVersions,
        on_update: OnWeightUpdate,
        notify: Callable[[], None],
        on_engine_death: OnEngineDeath,
        *,
        published: PublishedImages | None = None,
    ) -> None:
        self._engine = engine
        self.gate = gate
        self._endpoint = endpoint
        self._images = StagedImages(published)
        self._missed = missed
        self._notify = notify
        self._on_engine_death = on_engine_death
        member = engine if isinstance(engine, GroupMember) else None
        self._switcher = VersionSwitcher(
            engine, gate, self._images, missed, on_update, notify, on_engine_death, member=member
        )
        self._group = (
            GroupOrders(member, self._switcher, on_update, self._report_group, on_engine_death) if member else None
        )
        self._desired: DesiredState | None = None
        self._order_due = asyncio.Event()
        self._epoch: int | None = None
        self._receiving: tuple[PublicationOrder, asyncio.Task[None]] | None = None
        self.report: PublicationReport | None = None

    @property
    def held_image(self) -> str | None:
        """Checksum of the image that a patch can be applied to."""
        staged = self._images.staged
        return staged.checksum if staged is not None and staged.image.is_owner else None

    @property
    def switches(self) -> int:
        """How many versions were switched to."""
        return self._switcher.switches

    @property
    def version(self) -> int | None:
        """The version that serves, or that did before the engine was put to sleep."""
        return self._switcher.version

    @property
    def served(self) -> ServedWeights | None:
        """What the engine found in its memory when it last loaded a version."""
        return self._switcher.served

    @property
    def refusal(self) -> str | None:
        """Why the version that is wanted cannot be served; None while it can."""
        return self._switcher.refusal

    async def sleep(self) -> None:
        """Put the engine to sleep; publications are received all the same. Errors as of ``VersionSwitcher.sleep``."""
        await self._switcher.sleep()

    def wake(self) -> None:
        """Give the engine weights again."""
        self._switcher.wake()

    def take(self, desired: DesiredState) -> None:
        """Record the desired state."""
        self._desired = desired
        self._order_due.set()
        self._switcher.take(desired)

    async def run(self) -> None:
        """Follow what is wanted until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._switcher.run(), name="weight switch")
            while True:
                await self._order_due.wait()
                self._order_due.clear()
                if self._desired is None:
                    continue
                if self._group is not None:
                    await self._group.follow(self._desired, tasks)
                else:
                    await self._follow_order(self._desired.publication, tasks)

    async def close(self) -> None:
        """Leave the group and delete the staged images."""
        if self._epoch is not None:
            with contextlib.suppress(FlotillaError):
                await self._endpoint.close_epoch(self._epoch)
        if self._group is not None:
            await self._group.close()
        await self._images.close()

    async def _follow_order(self, order: PublicationOrder | None, tasks: asyncio.TaskGroup) -> None:
        if order is None or order.phase not in {PublicationPhase.PREPARING, PublicationPhase.TRANSFERRING}:
            return
        if order.is_relayed_to and not order.sources:
            return
        if order.rendezvous is None and order.rank is not None:
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
            transfer: WeightTransfer | None = None
            if order.transport is Transport.SHARED_MEMORY:
                await self._take_mapped(order)
            elif order.is_relayed_to:
                await self._take_relayed(order)
            else:
                transfer = await self._take_broadcast(order)
            self._report(order, ReceiveState.RECEIVED, checksum=order.manifest.checksum)
            if transfer is None and self._images.staged is not None:
                transfer = self._engine.begin_transfer(self._images.staged.image.path, order.version)
            if transfer is not None:
                # Right, but not committed yet: until it is, the engine only reads it.
                transfer.complete()
            self._switcher.look()
        except WorkerDied as error:
            self._on_engine_death(error)
        except (WeightTransferFailed, DeadlineExceeded, Unavailable, NotFound, Unauthorized) as error:
            log.warning("publication was not received", extra={"version": order.version, "error": error.detail})
            await self._leave(order.epoch)
            self._report(order, ReceiveState.FAILED, detail=error.detail)
        except asyncio.CancelledError:
            await asyncio.shield(self._leave(order.epoch))
            raise

    async def _take_mapped(self, order: PublicationOrder) -> None:
        """Map the trainer's image and read it once, for the checksum: no byte of it is copied."""
        manifest = order.manifest
        if self._has(order):
            return
        if manifest.image_path is None:
            raise WeightTransferFailed("the trainer offers no image to map")
        await self._map(order, Path(manifest.image_path))

    async def _take_relayed(self, order: PublicationOrder) -> None:
        """Take the image of a member that passes it on: mapped where it is on this host, else fetched.

        A fetched one is passed on to others, a mapped one is not: its owner does that.
        """
        if self._epoch is not None:
            await self._leave(self._epoch)
        if self._has(order):
            return
        located = await self._missed.located_at_member(order)
        if located is not None:
            try:
                await self._map(order, located.path)
                return
            except WeightTransferFailed as error:
                log.info("image of this host is not used", extra={"version": order.version, "error": error.detail})
        path = await self._missed.passed_on(order, self._images.give_away)
        image = await self._images.adopt(path)
        with self._images.using(image):
            self._keep(order, image, order.manifest.checksum)  # It was checked when it was fetched.

    def _has(self, order: PublicationOrder) -> bool:
        staged = self._images.staged
        return (
            staged is not None
            and staged.is_of(order.version, order.manifest.checksum)
            and not staged.image.is_withdrawn
        )

    async def _map(self, order: PublicationOrder, path: Path) -> None:
        async with self._images.mapped(path, order.manifest.image_bytes) as image:
            self._keep(order, image, await asyncio.to_thread(image.checksum))

    async def _take_broadcast(self, order: PublicationOrder) -> WeightTransfer | None:
        """Receive the image; gives the engine's transfer where it has read the image as it arrived."""
        await self._join(order)
        self._report(order, ReceiveState.JOINED)
        manifest = order.manifest
        async with self._images.own(manifest.image_bytes) as image:
            if manifest.delta is not None:
                self._keep(order, image, await self._receive_patched(order, manifest.delta, image))
                return None
            if self._is_version_waiting():
                # The engine may be about to read that one.
                self._keep(order, image, await self._receive_into(order, image))
                return None
            transfer = self._engine.begin_transfer(image.path, order.version)
            try:
                self._keep(order, image, await self._receive_into(order, image, transfer.advance))
            except BaseException as error:
                transfer.abort(str(error) or type(error).__name__)
                raise
            return transfer

    def _is_version_waiting(self) -> bool:
        staged, serving = self._images.staged, self.gate.version
        return staged is not None and (serving is None or staged.version > serving)

    async def _receive_into(
        self, order: PublicationOrder, image: WeightImage, on_arrived: Callable[[int], None] | None = None
    ) -> str:
        return await self._endpoint.receive(
            order.epoch,
            image.path,
            image.image_bytes,
            order.manifest.slice_bytes,
            2 * order.deadline_seconds,
            on_arrived,
        )

    async def _receive_patched(self, order: PublicationOrder, delta: DeltaManifest, image: WeightImage) -> str:
        """Receive a patch and make the image of it and the one that is held."""
        base = self._images.staged
        if base is None or base.checksum != delta.base_checksum:
            raise WeightTransferFailed("the patch is for another image than the one that is held")
        with self._images.using(base.image):
            patch = await create_image(delta.patch_bytes)
            try:
                checksum = await self._receive_into(order, patch)
                if checksum != delta.checksum:
                    found = f"checksum of the patch is {checksum}, the manifest says {delta.checksum}"
                    raise WeightTransferFailed(found)
                # What the thread writes to must not be used for anything else meanwhile.
                patching = asyncio.to_thread(apply_patch, patch.view, base.image.view, image.view, delta.block_bytes)
                return await to_the_end(asyncio.ensure_future(patching))
            finally:
                await close_images(patch)

    def _keep(self, order: PublicationOrder, image: WeightImage, checksum: str) -> None:
        if checksum != order.manifest.checksum:
            raise WeightTransferFailed(f"checksum is {checksum}, the manifest says {order.manifest.checksum}")
        self._images.keep(StagedImage(order.version, checksum, image))

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

    def _report_group(self, order: PublicationOrder, state: ReceiveState, detail: str | None) -> None:
        # The engine has no image with a checksum: its report that it took every tensor has to suffice.
        checksum = order.manifest.checksum if state is ReceiveState.RECEIVED else None
        self._report(order, state, checksum=checksum, detail=detail)

    def _report(self, order: PublicationOrder, state: ReceiveState, **facts: str | None) -> None:
        self.report = PublicationReport(version=order.version, epoch=order.epoch, state=state, **facts)
        self._notify()
