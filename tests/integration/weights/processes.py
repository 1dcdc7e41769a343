"""What the tests of the weight plane share: images, fleets of endpoints, and a look at what is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from flotilla.shared.schemas.publication import Manifest
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.files import SHARED_MEMORY
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import ImageLayout

SLICE_BYTES = 1 << 20


def an_image(num_megabytes: int, seed: int = 0) -> WeightImage:
    """Make an image of random float32 weights."""
    layout = ImageLayout.of({"weight": ((num_megabytes, 512, 512), "F32"), "bias": ((7,), "BF16")})
    image = WeightImage.create(layout.image_bytes)
    weight = np.random.default_rng(seed).random((num_megabytes, 512, 512), dtype=np.float32)
    image.write_from(layout, [weight.data, bytes(range(14))])
    return image


@dataclass(frozen=True)
class Receiver:
    """One receiving service: its endpoint and the image it receives into."""

    client: EndpointClient
    image: WeightImage


@dataclass(frozen=True)
class Fleet:
    """A sender, its receivers and what is published."""

    sender: EndpointClient
    source: WeightImage
    manifest: Manifest
    receivers: list[Receiver]

    async def form(self, epoch: int, receivers: list[Receiver], deadline_seconds: float) -> None:
        """Form the group of an epoch with these receivers."""
        rendezvous = await self.sender.open_sender(epoch, len(receivers) + 1, deadline_seconds)
        for rank, receiver in enumerate(receivers, start=1):
            await receiver.client.open_receiver(rendezvous, rank, deadline_seconds)
        clients = [self.sender, *(receiver.client for receiver in receivers)]
        await asyncio.gather(*(client.joined(epoch, deadline_seconds) for client in clients))

    async def send(self, epoch: int, deadline_seconds: float) -> None:
        """Send the image to the epoch's group."""
        await self.sender.send(
            epoch, self.source.path, self.manifest.image_bytes, self.manifest.slice_bytes, deadline_seconds
        )

    async def receive(self, receiver: Receiver, epoch: int, deadline_seconds: float) -> str:
        """Receive the image at one receiver."""
        return await receiver.client.receive(
            epoch, receiver.image.path, self.manifest.image_bytes, self.manifest.slice_bytes, deadline_seconds
        )

    async def transfer(self, epoch: int, receivers: list[Receiver], deadline_seconds: float) -> list[str]:
        """Send to these receivers and return their checksums."""
        _, *checksums = await asyncio.gather(
            self.send(epoch, deadline_seconds),
            *(self.receive(receiver, epoch, deadline_seconds) for receiver in receivers),
        )
        return checksums

    async def close_epoch(self, epoch: int) -> None:
        """Close the epoch everywhere."""
        for client in [self.sender, *(receiver.client for receiver in self.receivers)]:
            await client.close_epoch(epoch)


@asynccontextmanager
async def a_fleet(clients: list[EndpointClient], num_receivers: int, num_megabytes: int) -> AsyncIterator[Fleet]:
    """Make a fleet of these clients, with images; on leaving, assert that its epochs leave nothing behind."""
    images_before = images_of_this_process()
    sender, *others = clients
    async with AsyncExitStack() as stack:
        source = stack.enter_context(an_image(num_megabytes))
        manifest = source.manifest(version=1, slice_bytes=SLICE_BYTES)
        images = [stack.enter_context(WeightImage.create(manifest.image_bytes)) for _ in range(num_receivers)]
        for client in clients:
            for epoch in (1, 2):
                stack.push_async_callback(client.close_epoch, epoch)
        receivers = [Receiver(client, image) for client, image in zip(others, images, strict=False)]
        yield Fleet(sender, source, manifest, receivers)
    assert len(endpoint_processes()) <= len(clients)
    assert images_of_this_process() == images_before


def endpoint_processes() -> list[psutil.Process]:
    """List the endpoints and members that this test process has started and that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "flotilla.shared.weights.group.endpoint" in process.cmdline():
                found.append(process)
    return found


def member_process(client: EndpointClient, epoch: int) -> psutil.Process:
    """Find the process that is a client's member of an epoch."""
    return psutil.Process(client.member_pid(epoch))


def images_of_this_process() -> set[Path]:
    """List the image files that this process has in shared memory."""
    return set(SHARED_MEMORY.glob(f"flotilla-weights-{psutil.Process().pid}-*"))
