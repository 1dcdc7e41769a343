"""The shared-memory transport between real processes, one of which dies or stops."""

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared.errors import DeadlineExceeded, WeightTransferFailed
from shared.weights.image import WeightImage
from shared.weights.shared_memory import SharedMemoryTransport
from tests.integration.weights.processes import an_image

DEADLINE = 20.0
RECEIVER = """
import asyncio, sys
from pathlib import Path
from shared.schemas.publication import Rendezvous
from shared.weights.shared_memory import SharedMemoryTransport

async def main():
    port, world_size, rank, epoch, path, image_bytes = sys.argv[1:]
    rendezvous = Rendezvous(host="127.0.0.1", port=port, epoch=epoch, world_size=world_size)
    transport = SharedMemoryTransport()
    await transport.open_receiver(rendezvous, int(rank), 20)
    await transport.joined(int(epoch), 20)
    print(await transport.receive(int(epoch), Path(path), int(image_bytes), 1, 20), flush=True)
    await transport.close()

asyncio.run(main())
"""


@asynccontextmanager
async def receivers(
    sender: SharedMemoryTransport, epoch: int, targets: list[WeightImage]
) -> AsyncIterator[list[Process]]:
    """Start a receiving process for each image, and wait until they have joined."""
    rendezvous = await sender.open_sender(epoch, len(targets) + 1, DEADLINE)
    started = []
    try:
        for rank, target in enumerate(targets, start=1):
            numbers = (rendezvous.port, rendezvous.world_size, rank, epoch, target.path, target.image_bytes)
            arguments = [sys.executable, "-c", RECEIVER, *map(str, numbers)]
            started.append(await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, stderr=PIPE))
        await sender.joined(epoch, DEADLINE)
        yield started
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def _send(sender: SharedMemoryTransport, epoch: int, source: WeightImage, deadline: float) -> None:
    await sender.send(epoch, source.path, source.image_bytes, 1, deadline)


@asynccontextmanager
async def a_sender(num_targets: int) -> AsyncIterator[tuple[SharedMemoryTransport, WeightImage, list[WeightImage]]]:
    with an_image(num_megabytes=20) as source:
        targets = [WeightImage.create(source.image_bytes) for _ in range(num_targets)]
        sender = SharedMemoryTransport()
        try:
            yield sender, source, targets
        finally:
            await sender.close()
            for target in targets:
                target.close()


async def test_three_processes_receive_the_image() -> None:
    async with a_sender(3) as (sender, source, targets), receivers(sender, 1, targets) as processes:
        await _send(sender, 1, source, DEADLINE)

        answers = [(await process.communicate())[0].decode().strip() for process in processes]

        assert answers == [source.checksum()] * 3
        assert all(target.view == source.view for target in targets)


async def test_a_killed_receiver_is_noticed_at_once_and_left_out_of_the_next_epoch() -> None:
    async with a_sender(2) as (sender, source, targets):
        async with receivers(sender, 1, targets) as processes:
            processes[1].kill()
            started = time.monotonic()

            with pytest.raises(WeightTransferFailed, match="rank 2 went away"):
                await asyncio.sleep(0.1)
                await _send(sender, 1, source, DEADLINE)

            assert time.monotonic() - started < 5
            await sender.close_epoch(1)
        async with receivers(sender, 2, targets[:1]) as processes:
            await _send(sender, 2, source, DEADLINE)

            assert (await processes[0].communicate())[0].decode().strip() == source.checksum()


async def test_a_stopped_receiver_costs_one_deadline() -> None:
    async with a_sender(2) as (sender, source, targets), receivers(sender, 1, targets) as processes:
        processes[1].send_signal(signal.SIGSTOP)
        started = time.monotonic()

        with pytest.raises(DeadlineExceeded):
            await _send(sender, 1, source, 1.0)

        assert time.monotonic() - started < 3
        assert (await processes[0].communicate())[0].decode().strip() == source.checksum()


async def test_a_receiver_notices_that_its_sender_is_gone() -> None:
    async with a_sender(1) as (sender, _, targets), receivers(sender, 1, targets) as processes:
        await sender.close_epoch(1)

        _, errors = await processes[0].communicate()

        assert "the sender of epoch 1 went away" in errors.decode()
