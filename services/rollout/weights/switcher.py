"""Makes the engine serve the committed version: from the staged image, one of this host, or a pulled one.

What cannot be served now is tried again, after pauses that grow, until something else is wanted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from flotilla.services.rollout.engines.base import (
    DiscardsWeights,
    Engine,
    GroupMember,
    OnEngineDeath,
    ProvesWeights,
    WeightTransfer,
)
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.staged_images import StagedImage, StagedImages
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.clock import Pauses
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import (
    DeadlineExceeded,
    NotFound,
    Unavailable,
    WeightsDiverged,
    WeightTransferFailed,
    WorkerDied,
)
from flotilla.shared.schemas.service import LONGEST_SERVED_DETAIL, DesiredState, ServedWeights
from flotilla.shared.weights.pull.source import OnArrived


class Reading:
    """Begins a ``WeightTransfer`` with the first bytes; the version is right if the block ends without an error.

    Args:
        engine: reads it.
        version: that it will be.
    """

    def __init__(self, engine: Engine, version: int) -> None:
        self._engine, self._version = engine, version
        self._transfer: tuple[Path, WeightTransfer] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abort(str(error) or kind.__name__)
        elif self._transfer is not None:
            self._transfer[1].complete()

    def advance(self, image: Path, num_bytes: int) -> None:
        """Note how far a file is; the pull has begun again if it is another one than before."""
        if self._transfer is not None and self._transfer[0] != image:
            self._abort("it is pulled again")
        if self._transfer is None:
            with contextlib.suppress(WorkerDied):  # the loader will notice
                self._transfer = image, self._engine.begin_transfer(image, self._version)
        if self._transfer is not None:
            self._transfer[1].advance(num_bytes)

    def _abort(self, reason: str) -> None:
        if self._transfer is not None:
            self._transfer[1].abort(reason)
            self._transfer = None


log = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0
"""Between two tries to serve a version: they grow, since a try may read or fetch gigabytes."""
MOST_DIVERGED = 3
"""Times in a row that an engine may find other weights in its memory than were published: then it is another process's
turn, in other memory."""


class VersionSwitcher:
    """Keeps one engine at the committed version.

    Args:
        engine: what serves.
        gate: learns each version that serves.
        images: where a received version waits.
        missed: finds versions that were missed.
        on_update: what happens to samples in flight.
        notify: called when another version serves.
        on_engine_death: called when the engine's process ended while it was to load a version.
        member: the engine, where it is a member of weight groups.
    """

    def __init__(
        self,
        engine: Engine,
        gate: VersionGate,
        images: StagedImages,
        missed: MissedVersions,
        on_update: OnWeightUpdate,
        notify: Callable[[], None],
        on_engine_death: OnEngineDeath,
        *,
        member: GroupMember | None = None,
    ) -> None:
        self._engine = engine
        self._member = member
        self._gate = gate
        self._images = images
        self._missed = missed
        self._on_update = on_update
        self._notify = notify
        self._on_engine_death = on_engine_death
        self._desired: DesiredState | None = None
        self._pulling: tuple[str | None, asyncio.Future[Path]] | None = None
        self._loading: asyncio.Future[None] | None = None
        self._due = asyncio.Event()
        self._engine_use = asyncio.Lock()
        """Held while the engine is given weights, or put to sleep."""
        self._is_reserved = self._is_to_be_reserved = False
        self._slept_at: int | None = None
        self._lacks_weights = False
        """Whether the engine has no weights: since it was put to sleep, or they were discarded."""
        self.is_asleep = False
        self.switches = 0
        self.served: ServedWeights | None = None
        self._refused: tuple[int, int, str] | None = None
        """A version that the engine cannot take, how often it was tried, and why."""

    @property
    def refusal(self) -> str | None:
        """Why the version that is wanted cannot be served, once that was tried twice; None while it can."""
        return None if self._refused is None or self._refused[1] < 2 else self._refused[2]

    @property
    def version(self) -> int | None:
        """The version that serves, or that did when the engine was put to sleep; None if none ever did."""
        return self._gate.version if self._slept_at is None else self._slept_at

    async def sleep(self) -> None:
        """Put the engine to sleep; new versions wait until ``wake``, one that is being loaded is abandoned for now.

        Raises:
            WorkerDied: its process ended.
            DeadlineExceeded: it does not answer.
        """
        self.is_asleep = True
        if self._pulling is not None:
            self._pulling[1].cancel()
        if self._loading is not None:
            # An engine that hangs would never end it: one asked to sleep is known to hang after a deadline.
            self._loading.cancel()
        async with self._engine_use:
            self._slept_at, self._lacks_weights = self.version, True
            await self._gate.set(None)
            await self._engine.sleep()

    def wake(self) -> None:
        """Give the engine weights again, those of the committed version."""
        self.is_asleep = False
        self.look()

    async def reserve(self) -> None:
        """Wait until no weights are being loaded; until ``release``, serve only what the engine has received itself.

        What it has received, and is committed by now, is served first.
        """
        if self._is_reserved and self._target() is None:
            return
        self._is_to_be_reserved = True
        try:
            await self._engine_use.acquire()
            self._is_reserved = True
        finally:
            self._is_to_be_reserved = False
            self.look()

    async def release(self, *, is_lost: bool) -> None:
        """Load weights again.

        Args:
            is_lost: whether the engine has none any more, so that the committed version has to be loaded.
        """
        if is_lost:
            self._slept_at, self._lacks_weights = self.version, True
            await self._gate.set(None)
        if self._is_reserved:
            self._is_reserved = False
            self._engine_use.release()
        self.look()

    def take(self, desired: DesiredState) -> None:
        """Record the desired state."""
        self._desired = desired
        if self._pulling is not None and _server_of(desired.weights_url) != _server_of(self._pulling[0]):
            # Its server is gone: do not wait for it until the deadline.
            self._pulling[1].cancel()
        self.look()

    def look(self) -> None:
        """Look again whether a version can be switched to."""
        self._due.set()

    async def run(self) -> None:
        """Follow what is wanted until cancelled."""
        pauses = Pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            await self._due.wait()
            self._due.clear()
            target = self._target()
            if target is None:
                continue
            try:
                await self._serve(target)
                pauses.reset()
                continue
            except NotFound as error:
                log.info("version cannot be pulled yet", extra={"version": target, "error": error.detail})
            except WorkerDied as error:
                self._on_engine_death(error)
                continue
            except WeightsDiverged as error:
                await self._take_out_of_service(target, error)
            except (Unavailable, DeadlineExceeded, WeightTransferFailed) as error:
                log.warning("version cannot be served", extra={"version": target, "error": error.detail})
                if isinstance(error, WeightTransferFailed):
                    self._note_refused(target, error.detail)
            await self._news_within(pauses.failed())

    def _note_refused(self, version: int, why: str) -> None:
        """Remember what cannot be served: it is reported if it persists."""
        known = self._refused
        times = 1 + (known[1] if known is not None and known[0] == version else 0)
        self._refused = version, times, f"version {version} cannot be served: {why}"
        self._notify()

    async def _take_out_of_service(self, version: int, error: WeightsDiverged) -> None:
        """Serve nothing until the version was loaded again and is right; the engine has given its weights up."""
        before = self.served
        times = 1 + (before.diverged if before is not None and before.version == version else 0)
        log.error("the engine does not serve what was published", extra={"version": version, "error": error.detail})
        self.served = ServedWeights(version=version, diverged=times, detail=error.detail[:LONGEST_SERVED_DETAIL])
        self._slept_at, self._lacks_weights = None, True
        await self._gate.set(None)
        self._notify()
        if times >= MOST_DIVERGED:
            self._on_engine_death(WorkerDied(f"{times} times in a row: {error.detail}"))

    def _target(self) -> int | None:
        if self.is_asleep or self._desired is None or self._desired.policy_version is None:
            return None
        wanted = self._desired.policy_version
        if self._is_reserved or self._is_to_be_reserved:
            return wanted if self._member is not None and self._member.received == wanted else None
        serving, hold = self._gate.version, self._desired.hold_version
        if serving is None:
            # The initial weights are there again: their evaluation needs no other service then.
            return 0 if hold == 0 else wanted
        if wanted <= serving or (hold is not None and wanted > hold):
            return None
        return wanted

    async def _serve(self, version: int) -> None:
        if self._is_reserved and self._member is not None:
            # As for a load from here on: the reservation for the next version waits until this one serves.
            self._is_reserved = False
            try:
                await self._gate.announce(version)
                await self._member.serve()
                await self._note_served(version)
            finally:
                self._engine_use.release()
        else:
            async with self._engine_use:
                desired = self._desired
                if self.is_asleep or desired is None or version not in {desired.policy_version, desired.hold_version}:
                    return
                await self._gate.announce(version)
                await self._load(version, desired)
                await self._note_served(version)
        self.switches += version > 0
        self._notify()
        # A newer version may have become due meanwhile.
        self._due.set()

    async def _load(self, version: int, desired: DesiredState) -> None:
        # What is desired may change meanwhile: another version's URL must never give this one.
        staged = self._images.staged
        if version == 0:
            # The engine started with the initial weights.
            if self._lacks_weights:
                await self._engine.wake()
        elif staged is not None and staged.is_of(version, desired.policy_checksum):
            await self._serve_staged(staged, desired.policy_digest)
        elif not await self._serve_located(version, desired):
            await self._serve_pulled(version, desired)

    async def _note_served(self, version: int) -> None:
        await self._gate.set(version)
        self._slept_at, self._lacks_weights = None, False
        self._refused = None

    async def _discard_unused(self) -> None:
        """Have the first version that serves overwrite the initial weights, which are not sampled from.

        A rollout that joins needs no new memory for it then, which takes longer to get than to fill.
        """
        if self._gate.version is None and not self._lacks_weights and isinstance(self._engine, DiscardsWeights):
            self._lacks_weights = True
            await self._engine.discard_weights()

    async def _serve_staged(self, staged: StagedImage, digest: str | None) -> None:
        """Load the image that waits; arguments and further errors as of ``_give``.

        Raises:
            WeightTransferFailed: the engine cannot read it, or its file is gone: then it is pulled the next time.
        """
        try:
            with self._images.using(staged.image):
                await self._give(staged.image.path, staged.version, digest)
        except WeightTransferFailed:
            self._drop(staged)
            raise
        if not staged.image.is_owner:
            self._drop(staged)  # The trainer may write into it again.

    def _drop(self, staged: StagedImage) -> None:
        if self._images.staged is staged:
            self._images.keep(None)

    async def _serve_located(self, version: int, desired: DesiredState) -> bool:
        """Serve the image that another process of this host has; returns whether there is a correct one."""
        located = await self._missed.located(desired)
        if located is None:
            return False
        await self._discard_unused()
        try:
            with Reading(self._engine, version) as reading:
                async with self._images.mapped(located.path, located.image_bytes) as image:
                    reading.advance(located.path, located.image_bytes)
                    found = await asyncio.to_thread(image.checksum)
                    if found != located.checksum:
                        raise WeightTransferFailed(f"checksum is {found}, it should be {located.checksum}")
                    self._images.keep(staged := StagedImage(version, found, image))
        except WeightTransferFailed as error:
            # Its owner writes the next version into it, or has removed it.
            log.info("image of this host is not used", extra={"version": version, "error": error.detail})
            return False
        await self._serve_staged(staged, desired.policy_digest)
        log.info("missed version was mapped, not pulled", extra={"version": version, "image": located.path.name})
        return True

    async def _serve_pulled(self, version: int, desired: DesiredState) -> None:
        self._missed.check_served(version, desired)
        await self._discard_unused()
        with Reading(self._engine, version) as reading:
            path = await self._pulled(version, desired, reading.advance)
        # It is kept: others may pull it here, and the next version may come as a patch for it.
        log.info("missed version was pulled", extra={"version": version})
        image = await self._images.adopt(path)
        committed = desired.policy_checksum
        with self._images.using(image):
            checksum = await asyncio.to_thread(image.checksum) if committed is None else committed
            self._images.keep(StagedImage(version, checksum, image))
            await self._give(path, version, desired.policy_digest)

    async def _give(self, image: Path, version: int, digest: str | None) -> None:
        """Have the engine load an image, and prove that it has, unless it is to sleep.

        Args:
            image, version: as of ``Engine.load_weights``.
            digest: of what was published; None if unknown.

        Raises:
            Unavailable: it is to sleep.
            WeightsDiverged: it has something else; other errors as of ``Engine.load_weights``.
        """
        asleep = Unavailable(f"version {version} is loaded once the engine may have its device again")
        if self.is_asleep:
            raise asleep
        self._loading = asyncio.ensure_future(self._loaded(image, version, digest))
        try:
            await _unless_cancelled(self._loading, asleep)
        finally:
            self._loading = None

    async def _loaded(self, image: Path, version: int, digest: str | None) -> None:
        engine, is_proved = self._engine, False
        if digest is not None and isinstance(engine, ProvesWeights):
            is_proved = await engine.load_proved(image, version, self._on_update, digest)
        else:
            await engine.load_weights(image, version, self._on_update)
        self.served = ServedWeights(version=version, digest=digest if is_proved else None)

    async def _pulled(self, version: int, desired: DesiredState, on_arrived: OnArrived) -> Path:
        pulling = asyncio.ensure_future(self._missed.pulled(version, desired, self._images.give_away, on_arrived))
        self._pulling = (desired.weights_url, pulling)
        try:
            return await _unless_cancelled(pulling, Unavailable(f"version {version} is served elsewhere now"))
        finally:
            self._pulling = None

    async def _news_within(self, seconds: float) -> None:
        """Wait before the next try, or until something else is wanted or there."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._due.wait()
        self._due.set()


async def _unless_cancelled(work: asyncio.Future[Result], error: Exception) -> Result:
    """Await work that another task may cancel; raises the error in that case."""
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise error from None


def _server_of(url: str | None) -> str | None:
    """Remove the version from the key: a newer one of the same trainer does not abort the arriving one."""
    return None if url is None else url.rpartition("/")[0]
