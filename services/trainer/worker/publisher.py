"""Publishes policy versions: a snapshot in shared memory, announced to the gateway, sent to the members of each epoch.

It runs beside training. The loop waits for it only when the next version is due and the last one is not settled yet.
The gateway decides on the members and when an epoch is closed; here its decisions are followed, and what is asked for
may be repeated.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from flotilla.services.trainer.worker.images import ImagePool
from flotilla.shared.concurrency.cancelling import until_done
from flotilla.shared.errors import Conflict, FlotillaError, NotFound, StalePolicyVersion
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.net.retry import GATEWAY, retry
from flotilla.shared.schemas.publication import Manifest, Publication, PublicationPhase, PublicationRequest
from flotilla.shared.weights.group.endpoint_client import EndpointClient

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
CALL_SECONDS = 10.0
REFUSED_SECONDS = 1.0
PAUSE_SECONDS = 0.2


class Publisher:
    """One publication at a time.

    Args:
        gateway: where versions are announced.
        endpoint: sends images.
        images: where snapshots are kept.
        experiment_id: whose versions these are.
        on_image: offers the image of a version to be pulled, with its checksum; the version is announced when this has
            returned.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        endpoint: EndpointClient,
        images: ImagePool,
        *,
        experiment_id: str,
        on_image: Callable[[int, Path, str], Awaitable[None]],
    ) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._images = images
        self._path = f"/v1/experiments/{experiment_id}/publications"
        self._on_image = on_image
        self._epoch: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self.published_version: int | None = None
        self.last_seconds = 0.0
        self.last_sent_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether the last publication is settled."""
        return self._task is None or self._task.done()

    async def publish(self, version: int, step: int, compute: Callable[[Callable[[], Path]], Awaitable[Path]]) -> None:
        """Start to publish; returns as soon as the snapshot is taken, so that training continues.

        Args:
            version: newer than the last one.
            step: optimiser steps that it contains.
            compute: does blocking work on the thread that may touch the weights.
        """
        await self.settled()
        path = await compute(self._images.snapshot)
        self._task = asyncio.create_task(self._publish(version, path, step), name=f"publication {version}")
        self._begun.set()

    async def watch(self) -> None:
        """Wait on every publication until cancelled, so that a failure is known when it happens.

        Raises:
            FlotillaError: the gateway refused a publication for good.
        """
        while True:
            await self._begun.wait()
            self._begun.clear()
            await self.settled()

    async def settled(self) -> None:
        """Wait until the last publication is committed, or found to be older than the gateway's.

        Raises:
            FlotillaError: the gateway refused it for good.
        """
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        """Abort what is under way and leave the weight group."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CALL_SECONDS)
        await self._leave_epoch()

    async def _leave_epoch(self) -> None:
        if self._epoch is not None:
            epoch, self._epoch = self._epoch, None
            await self._endpoint.close_epoch(epoch)

    async def _publish(self, version: int, path: Path, step: int) -> None:
        started = time.monotonic()
        manifest = await asyncio.to_thread(self._images.manifest, path, version)
        path = await self._offer(version, path, manifest.checksum)
        manifest = manifest.model_copy(update={"image_path": str(path)})
        while True:
            try:
                outcome = await self._negotiate(manifest, path, step)
            except StalePolicyVersion:
                # The gateway has it, from before this trainer came back.
                log.info("version is known already", extra={"version": manifest.version})
                break
            except Conflict as error:
                # The experiment is being stopped, or another trainer was appointed: the order to end is on its way.
                log.warning("the gateway refuses the publication", extra={"error": error.detail})
                await asyncio.sleep(REFUSED_SECONDS)
                continue
            if outcome.phase is PublicationPhase.COMMITTED:
                self._images.acknowledge(path, manifest)
                log.info("version is published", extra={"version": manifest.version, "members": len(outcome.members)})
                break
            log.warning(
                "publication was aborted, it is announced again",
                extra={"version": manifest.version, "reason": outcome.reason},
            )
            await asyncio.sleep(PAUSE_SECONDS)
        self.last_seconds = time.monotonic() - started
        self.published_version = manifest.version

    async def _offer(self, version: int, path: Path, checksum: str) -> Path:
        """Offer an image to be pulled: without a member the version is current at once. Returns where the image is.

        The server keeps it open, so from then on its file may be deleted.
        """
        while True:
            await self._on_image(version, path, checksum)
            offered, path = path, await asyncio.to_thread(self._images.renew, path)
            if path == offered:
                return path

    async def _negotiate(self, manifest: Manifest, path: Path, step: int) -> Publication:
        request = PublicationRequest(manifest=manifest, step=step)
        # Of members that map the image nothing is wanted: the answer waits for them, as far as the gateway knows how.
        publication = await self._call("POST", self._path, body=request, params={"wait": POLL_SECONDS})
        self._images.is_broadcast = _num_receivers(publication) > 0
        if publication.members and not self._images.is_broadcast:
            await self._leave_epoch()
        sent: int | None = None
        while publication.phase not in {PublicationPhase.COMMITTED, PublicationPhase.ABORTED}:
            try:
                if _num_receivers(publication) == 0:
                    # Its members map the image: there is nothing to send.
                    await self._leave_epoch()
                    publication = await self._watch(publication)
                elif publication.epoch != self._epoch:
                    publication = await self._enter(publication)
                elif publication.phase is PublicationPhase.TRANSFERRING and sent != publication.epoch:
                    sent = publication.epoch
                    publication = await self._send(publication, manifest, path)
                else:
                    publication = await self._watch(publication)
            except NotFound:
                log.warning("the gateway has forgotten the publication", extra={"version": manifest.version})
                publication = await self._call("POST", self._path, body=request)
                sent = None
            except Conflict as error:
                if isinstance(error, StalePolicyVersion):
                    raise
                # The epoch moved on while we acted on the old one.
                await asyncio.sleep(PAUSE_SECONDS)
                publication = await self._call("GET", f"{self._path}/{manifest.version}")
        return publication

    async def _enter(self, publication: Publication) -> Publication:
        """Open the publication's epoch as its sender."""
        version, epoch, deadline = publication.version, publication.epoch, publication.deadline_seconds
        await self._leave_epoch()
        if publication.rendezvous is not None:
            # Its store was hosted by a worker that is gone.
            return await self._failed(version, epoch, "the sender was started again")
        try:
            rendezvous = await self._endpoint.open_sender(epoch, _num_ranks(publication) + 1, deadline)
        except FlotillaError as error:
            return await self._failed(version, epoch, error.detail)
        self._epoch = epoch
        return await self._call("PUT", f"{self._path}/{version}/rendezvous", body=rendezvous)

    async def _send(self, publication: Publication, manifest: Manifest, path: Path) -> Publication:
        version, epoch, deadline = publication.version, publication.epoch, publication.deadline_seconds
        sending = asyncio.create_task(self._transfer(publication, manifest, path), name=f"send {version}")
        try:
            while not sending.done():
                # The gateway may close the epoch while the collective is stuck: then it is abandoned at once.
                watching = asyncio.create_task(self._watch(publication), name=f"watch {version}")
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
                if not watching.done():
                    watching.cancel()
                    await asyncio.wait({watching})
                    break
                publication = watching.result()
                if publication.epoch != epoch or publication.phase is PublicationPhase.ABORTED:
                    return publication
                if publication.phase is PublicationPhase.COMMITTED:
                    # Every member has it all: the sender's own end is a matter of moments, and the epoch stays usable.
                    await asyncio.wait({sending}, timeout=deadline)
                    if not sending.done() or sending.exception() is not None:
                        await self._leave_epoch()
                    return publication
            sending.result()
        except FlotillaError as error:
            log.warning("send failed", extra={"version": version, "epoch": epoch, "error": error.detail})
            return await self._failed(version, epoch, error.detail)
        finally:
            sending.cancel()
            await until_done(sending)
        body = {"epoch": epoch, "checksum": manifest.checksum}
        return await self._call("POST", f"{self._path}/{version}/sent", body=body)

    async def _transfer(self, publication: Publication, manifest: Manifest, path: Path) -> None:
        epoch, deadline, patch = publication.epoch, publication.deadline_seconds, self._images.patch
        await self._endpoint.joined(epoch, deadline)
        if publication.is_delta and patch is not None:
            path, num_bytes = patch.path, patch.image_bytes
        else:
            num_bytes = manifest.image_bytes
        await self._endpoint.send(epoch, path, num_bytes, manifest.slice_bytes, deadline)
        self.last_sent_bytes = num_bytes

    async def _watch(self, publication: Publication) -> Publication:
        """Wait for the gateway to change phase or epoch."""
        return await self._call(
            "GET",
            f"{self._path}/{publication.version}",
            params={"wait": POLL_SECONDS, "phase": publication.phase.value, "epoch": publication.epoch},
        )

    async def _failed(self, version: int, epoch: int, detail: str) -> Publication:
        body = {"epoch": epoch, "detail": detail}
        return await self._call("POST", f"{self._path}/{version}/failed", body=body)

    async def _call(self, method: str, path: str, *, body: Any = None, params: Any = None) -> Publication:
        """Call until the gateway answers: while it is absent, nothing is decided and nothing is lost."""
        call = partial(
            self._gateway.call, method, path, body=body, params=params, deadline_seconds=CALL_SECONDS + POLL_SECONDS
        )
        return Publication.model_validate(await retry(call, waiting_for=GATEWAY))


def _num_receivers(publication: Publication) -> int:
    """Count the members that the weights are sent to."""
    return sum(member.rank is not None for member in publication.members)


def _num_ranks(publication: Publication) -> int:
    """Count the ranks of those members."""
    return sum(member.num_ranks for member in publication.members if member.rank is not None)
