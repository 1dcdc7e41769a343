"""The trainer's end of a group with ranks of engines: a process forms it as SGLang does, and has each tensor."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import xxhash

from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.schemas.publication import Rendezvous
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.group.engine_group import buckets_of, group_name
from flotilla.shared.weights.image.image import WeightImage
from tests.integration.weights.processes import an_image

DEADLINE = 60.0
BUCKET_BYTES = 1 << 20
RANK = Path(__file__).with_name("engine_rank.py")


@asynccontextmanager
async def a_rank(rendezvous: Rendezvous, rank: int, sizes: list[int]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process that joins as a rank of an engine, and receives broadcasts of these sizes."""
    name = group_name(rendezvous.epoch, rendezvous.port)
    words = [rendezvous.host, rendezvous.port, rank, rendezvous.world_size, name, json.dumps(sizes)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(RANK), *map(str, words), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said_by(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE):
        return (await process.stdout.readline()).decode().strip()


def slices_of(image: WeightImage) -> list[bytes]:
    buckets = buckets_of(image.manifest(1).tensors, BUCKET_BYTES)
    return [bytes(image.view[bucket[0].start : bucket[-1].end]) for bucket in buckets]


async def test_two_ranks_of_engines_have_every_tensor_and_a_broken_group_ends_those_who_wait() -> None:
    async with EndpointClient(sends_to_engines=True) as sender:
        with an_image(3) as image:
            sent = slices_of(image)
            assert len(sent) == 2, "tensors of two dtypes go apart"
            sizes = [len(each) for each in sent]
            rendezvous = await sender.open_sender(1, 3, DEADLINE)
            # One of them expects another broadcast than comes.
            async with a_rank(rendezvous, 1, sizes) as first, a_rank(rendezvous, 2, [*sizes, 4]) as second:
                await sender.joined(1, DEADLINE)
                await sender.send(1, image.path, image.image_bytes, BUCKET_BYTES, DEADLINE)
                assert await said_by(first) == await said_by(second) == "waiting"
                expected = xxhash.xxh3_64(b"".join(sent)).hexdigest()
                assert await said_by(first) == await said_by(second) == f"received {expected}"

                await sender.close_epoch(1)
                assert (await said_by(second)).startswith("failed")

            rendezvous = await sender.open_sender(2, 3, DEADLINE)
            async with a_rank(rendezvous, 1, sizes) as alone:
                assert await said_by(alone) == "waiting"
                await sender.close_epoch(2)
                assert (await said_by(alone)).startswith("failed"), "who waits for a member that never comes is woken"


async def test_an_image_that_is_none_is_not_sent(tmp_path: Path) -> None:
    async with EndpointClient(sends_to_engines=True) as sender:
        with WeightImage.create(64) as image:
            await sender.open_sender(1, 1, DEADLINE)
            await sender.joined(1, DEADLINE)

            with pytest.raises(WeightTransferFailed):
                await sender.send(1, image.path, 64, BUCKET_BYTES, DEADLINE)
