"""What a transport that broadcasts promises to the two ends of a weight group."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from flotilla.shared.errors import Conflict, DeadlineExceeded, NotFound, WeightTransferFailed
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.image import WeightImage
from tests.integration.weights.processes import an_image, images_of_this_process

DEADLINE = 20.0
SLICE_BYTES = 1 << 20
Transport = EndpointClient


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=[EndpointClient], ids=["gloo"])
async def members(request: pytest.FixtureRequest) -> AsyncIterator[list[Transport]]:
    """A sender and two receivers, which the tests use one after the other: an endpoint takes seconds to start."""
    made = [request.param() for _ in range(3)]
    yield made
    for member in made:
        await member.close()


@dataclass(frozen=True)
class Group:
    """A sender with its image, receivers with theirs."""

    sender: Transport
    source: WeightImage
    receivers: list[Transport]
    targets: list[WeightImage]

    async def open(self, epoch: int) -> None:
        rendezvous = await self.sender.open_sender(epoch, len(self.receivers) + 1, DEADLINE)
        for rank, receiver in enumerate(self.receivers, start=1):
            await receiver.open_receiver(rendezvous, rank, DEADLINE)
        await asyncio.gather(*(member.joined(epoch, DEADLINE) for member in [self.sender, *self.receivers]))

    async def send(self, epoch: int, deadline: float = DEADLINE) -> None:
        await self.sender.send(epoch, self.source.path, self.source.image_bytes, SLICE_BYTES, deadline)

    async def receive(self, number: int, epoch: int, deadline: float = DEADLINE) -> str:
        target = self.targets[number]
        return await self.receivers[number].receive(epoch, target.path, target.image_bytes, SLICE_BYTES, deadline)


@asynccontextmanager
async def a_group(members: list[Transport], num_receivers: int) -> AsyncIterator[Group]:
    before = images_of_this_process()
    async with AsyncExitStack() as stack:
        source = stack.enter_context(an_image(num_megabytes=5))
        targets = [stack.enter_context(WeightImage.create(source.image_bytes)) for _ in range(num_receivers)]
        for member in members:
            for epoch in (1, 2):
                stack.push_async_callback(member.close_epoch, epoch)
        yield Group(members[0], source, members[1 : num_receivers + 1], targets)
    assert images_of_this_process() == before


async def test_receivers_hold_the_image_and_say_its_checksum(members: list[Transport]) -> None:
    async with a_group(members, 2) as group:
        await group.open(1)

        _, *checksums = await asyncio.gather(group.send(1), group.receive(0, 1), group.receive(1, 1))

        assert checksums == [group.source.checksum()] * 2
        assert all(target.view == group.source.view for target in group.targets)


async def test_the_next_version_goes_through_the_same_epoch(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        await group.open(1)
        await asyncio.gather(group.send(1), group.receive(0, 1))
        with group.source.writing() as view:
            view[-1] ^= 255

        _, checksum = await asyncio.gather(group.send(1), group.receive(0, 1))

        assert checksum == group.source.checksum() == group.targets[0].checksum()


async def test_bytes_that_changed_after_the_manifest_are_noticed(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        manifest = group.source.manifest(version=1)
        group.source.view[-1] ^= 1
        await group.open(1)

        _, checksum = await asyncio.gather(group.send(1), group.receive(0, 1))

        assert checksum != manifest.checksum


async def test_an_image_is_free_to_be_written_after_its_transfer(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        await group.open(1)
        await asyncio.gather(group.send(1), group.receive(0, 1))

        for image in [group.source, *group.targets]:
            with image.writing():
                pass


async def test_an_image_that_is_being_written_is_not_sent(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        await group.open(1)

        with group.source.writing():
            results = await asyncio.gather(group.send(1, 3.0), group.receive(0, 1, 3.0), return_exceptions=True)

        assert any("being written" in str(result) for result in results)
        assert all(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in results)


async def test_sizes_that_differ_are_refused(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        await group.open(1)
        receiver, target = group.receivers[0], group.targets[0]

        with pytest.raises(WeightTransferFailed, match="the manifest says 7"):
            await asyncio.gather(group.send(1, 3.0), receiver.receive(1, target.path, 7, 7, 3.0))


async def test_a_receiver_that_leaves_fails_the_sender(members: list[Transport]) -> None:
    async with a_group(members, 2) as group:
        await group.open(1)
        await group.receivers[1].close_epoch(1)

        results = await asyncio.gather(group.send(1, 3.0), group.receive(0, 1, 3.0), return_exceptions=True)

        assert any(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in results)


async def test_a_sender_that_leaves_fails_the_receivers(members: list[Transport]) -> None:
    async with a_group(members, 2) as group:
        await group.open(1)
        await group.sender.close_epoch(1)

        results = await asyncio.gather(group.receive(0, 1, 3.0), group.receive(1, 1, 3.0), return_exceptions=True)

        assert all(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in results)


async def test_a_receiver_that_does_not_take_part_costs_one_deadline(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        await group.open(1)
        started = time.monotonic()

        with pytest.raises(DeadlineExceeded):
            # More than the sockets' buffers hold, and nobody receives.
            await group.send(1, 1.0)

        assert time.monotonic() - started < 10


async def test_a_member_that_is_missing_is_noticed(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        rendezvous = await group.sender.open_sender(1, 3, DEADLINE)
        await group.receivers[0].open_receiver(rendezvous, 1, DEADLINE)

        for member in (group.sender, group.receivers[0]):
            with pytest.raises((DeadlineExceeded, WeightTransferFailed)):
                await member.joined(1, 1.5)


async def test_after_a_failure_the_next_epoch_works(members: list[Transport]) -> None:
    async with a_group(members, 2) as group:
        await group.open(1)
        with pytest.raises(DeadlineExceeded):
            await group.send(1, 1.0)
        for member in [group.sender, *group.receivers]:
            await member.close_epoch(1)

        await group.open(2)
        _, *checksums = await asyncio.gather(group.send(2), group.receive(0, 2), group.receive(1, 2))

        assert checksums == [group.source.checksum()] * 2


async def test_an_epoch_opens_once(members: list[Transport]) -> None:
    async with a_group(members, 1) as group:
        rendezvous = await group.sender.open_sender(1, 2, DEADLINE)
        await group.receivers[0].open_receiver(rendezvous, 1, DEADLINE)

        with pytest.raises(Conflict):
            await group.sender.open_sender(1, 2, DEADLINE)
        with pytest.raises(Conflict):
            await group.receivers[0].open_receiver(rendezvous, 1, DEADLINE)


async def test_an_epoch_that_is_not_open_cannot_be_used(members: list[Transport]) -> None:
    member = members[0]

    with pytest.raises(NotFound):
        await member.joined(1, 1.0)
    with pytest.raises(NotFound):
        await member.send(1, Path("image"), 1, 1, 1.0)
    with pytest.raises(NotFound):
        await member.receive(1, Path("image"), 1, 1, 1.0)
    await member.close_epoch(1)


async def test_a_closed_transport_can_be_closed_and_used_again(members: list[Transport]) -> None:
    for member in members:
        await member.close()
        await member.close()

    async with a_group(members, 1) as group:
        await group.open(1)
        await asyncio.gather(group.send(1), group.receive(0, 1))
