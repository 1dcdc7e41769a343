"""A version goes from member to member over real connections: few for each, and the trainer helps where one fails."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from flotilla.services.gateway.publications.negotiation import (
    Epoch,
    MemberGone,
    Negotiation,
    Reported,
    announce,
    members_of,
    order_of,
)
from flotilla.services.gateway.publications.negotiation import transition as after
from flotilla.services.gateway.publications.relays import FAN_OUT, Beside
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.staged_images import StagedImage
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.schemas.publication import PublicationPhase, PublicationReport, ReceiveState, Transport
from flotilla.shared.schemas.service import DesiredState, WorkState
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.pull import client as pull_client
from flotilla.shared.weights.pull import http_source
from flotilla.shared.weights.pull import source as missing_module
from flotilla.shared.weights.pull.client import CONNECTIONS, WeightPuller
from flotilla.shared.weights.pull.sender import InlineSender
from tests.contract.weights.fleet import RecordingEngine
from tests.integration.weights.processes import an_image, images_of_this_process
from tests.integration.weights.test_direct import Send
from tests.integration.weights.test_pull import TOKEN, Server, a_server
from tests.integration.weights.test_sources import (
    PATIENCE,
    SIZE,
    Source,
    as_zeros,
    by_drops,
    halfway,
    in_silence,
    slowly,
    sources,
    without_end,
)

VERSION = 3


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=SIZE) as made:
        yield made


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_module, "RANGE_BYTES", 1 << 20)
    monkeypatch.setattr(pull_client, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(pull_client, "SPARE_SECONDS", 0.3)
    monkeypatch.setattr(http_source, "SILENCE_SECONDS", 10 * PATIENCE)


async def relayed(image: WeightImage, *asked: Source) -> bytes:
    """Fetch the image from a member and the trainer; gives its bytes, and leaves no file."""
    pull = WeightPuller(Credentials(TOKEN))
    urls, checksum = [each.url for each in asked], image.checksum()
    path = await pull.relayed(urls, VERSION, PATIENCE, checksum=checksum, image_bytes=image.image_bytes)
    try:
        return path.read_bytes()
    finally:
        path.unlink()


async def test_the_trainer_sends_nothing_while_a_member_does(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_client, "SPARE_SECONDS", PATIENCE)  # a busy machine is no stall
    async with sources(monkeypatch, image, image) as (member, trainer):
        assert await relayed(image, member, trainer) == image.view

    assert member.spans and trainer.spans == [] and trainer.server.faults.ranges == []


@pytest.mark.parametrize("wrong", [in_silence, halfway, as_zeros, without_end, by_drops])
async def test_the_trainer_sends_what_a_member_that_does_wrong_does_not(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch, wrong: Send
) -> None:
    before = images_of_this_process()
    async with sources(monkeypatch, image, image) as (member, trainer):
        member.send = wrong

        assert await relayed(image, member, trainer) == image.view

        assert trainer.spans
    assert images_of_this_process() == before


async def test_of_a_member_that_dies_half_way_what_came_is_kept(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sources(monkeypatch, image, image) as (member, trainer):
        listening = member.server.images.direct
        assert listening is not None

        def dies(image: WeightImage, connection: socket.socket, span: range) -> None:
            if span.start == 0:
                slowly(image, connection, span)
            else:
                halfway(image, connection, span)
                member.server.images.withdraw()
                listening.close()

        member.send = dies
        monkeypatch.setattr(pull_client, "SPARE_SECONDS", PATIENCE)

        assert await relayed(image, member, trainer) == image.view

        came_from_trainer = sum(len(span) for span in trainer.spans)
        assert 0 < came_from_trainer < image.image_bytes


async def test_a_member_without_the_version_or_with_another_one_leaves_it_to_the_trainer(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with an_image(num_megabytes=SIZE, seed=1) as other:
        async with sources(monkeypatch, other, image) as (member, trainer):
            assert await relayed(image, member, trainer) == image.view
            member.server.images.withdraw()
            assert await relayed(image, member, trainer) == image.view

    assert member.spans == []


@pytest.mark.parametrize("size", [SIZE // 2 << 20, 3 * SIZE << 20])
async def test_no_memory_is_taken_for_an_image_of_another_size(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    made, create = list[int](), missing_module.create_image

    async def noted(image_bytes: int, **how: Any) -> WeightImage:
        made.append(image_bytes)
        return await create(image_bytes, **how)

    monkeypatch.setattr(missing_module, "create_image", noted)
    with an_image(num_megabytes=SIZE, seed=1) as other:
        async with sources(monkeypatch, other, image) as (member, trainer):
            with other.path.open("r+b") as file:
                file.truncate(size)
            # It says what it has, under the checksum of the version.
            member.server.images.publish(VERSION, other.path, image.checksum())

            assert await relayed(image, member, trainer) == image.view

    assert made == [image.image_bytes]
    assert member.spans == []


async def test_wrong_bytes_of_both_are_refused(image: WeightImage, monkeypatch: pytest.MonkeyPatch) -> None:
    before = images_of_this_process()
    async with sources(monkeypatch, image, image) as (member, trainer):
        member.send = trainer.send = as_zeros

        with pytest.raises(WeightTransferFailed, match="checksum"):
            await relayed(image, member, trainer)
    assert images_of_this_process() == before


class Member:
    """A rollout's receiver with a server of its own."""

    def __init__(self, name: str, server: Server) -> None:
        self.name, self.server = name, server
        self.engine, self.gate = RecordingEngine(), VersionGate()
        puller = WeightPuller(Credentials(TOKEN))
        self.news = asyncio.Event()
        self.endpoint = EndpointClient()
        self.receiver = WeightReceiver(
            self.engine,  # type: ignore[arg-type]
            self.gate,
            self.endpoint,
            MissedVersions(puller, relayed=puller.relayed),
            OnWeightUpdate.DRAIN,
            self.news.set,
            lambda error: None,
            published=server.images,
        )

    async def hold(self, image: WeightImage) -> None:
        """Have the image, as a member of the group has after the broadcast."""
        images = self.receiver._images
        async with images.own(image.image_bytes) as mine:
            mine.view[:] = image.view
            images.keep(StagedImage(VERSION, image.checksum(), mine))


class Relaying:
    """A publication to one member of the group and to many beside it."""

    def __init__(self, image: WeightImage, members: list[Member], trainer: Server) -> None:
        self.members = {each.name: each for each in members}
        first, *others = members
        transports = dict.fromkeys([each.name for each in members], Transport.GLOO)
        self.checksum = image.checksum()
        manifest = image.manifest(VERSION)
        epoch = Epoch(1, "trainer", members_of(transports, beside=Beside([each.name for each in others])))
        self.state: Negotiation = announce(VERSION, VERSION, manifest, epoch)
        self.addresses = {"trainer": trainer.address} | {each.name: each.server.address for each in members}
        self.tell(first.name, ReceiveState.RECEIVED)

    def tell(self, name: str, state: ReceiveState) -> None:
        report = PublicationReport(version=VERSION, epoch=1, state=state, checksum=self.checksum)
        self.state = after(self.state, Reported(name, report))

    async def run(self) -> None:
        """Do as the gateway does, until the version is committed."""
        while self.state.phase is not PublicationPhase.COMMITTED:
            for name, member in self.members.items():
                report = member.receiver.report
                if report is not None:
                    self.state = after(self.state, Reported(name, report))
                order = order_of(name, self.state, 30.0, self.addresses.get)
                wanted = DesiredState(tag="t", state=WorkState.RUNNING, policy_version=0, publication=order)
                member.receiver.take(wanted)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def relaying(image: WeightImage, num: int) -> AsyncIterator[tuple[Relaying, Server]]:
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(a_server()) for _ in range(num + 1)]
        for server in servers:
            stack.enter_context(server.images.served_directly("127.0.0.1", InlineSender()))
        trainer, *others = servers
        trainer.images.publish(VERSION, image, image.checksum())
        members = [Member(f"r{number}", server) for number, server in enumerate(others)]
        await members[0].hold(image)
        running = [asyncio.create_task(each.receiver.run()) for each in members[1:]]
        try:
            yield Relaying(image, members, trainer), trainer
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for member in members:
                await member.receiver.close()


async def test_ten_receivers_take_few_connections_each_and_none_of_the_trainer(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_client, "SPARE_SECONDS", PATIENCE)
    lock, now, most = threading.Lock(), Counter[int](), Counter[int]()

    def counted(image: WeightImage, connection: socket.socket, span: range) -> None:
        port = connection.getsockname()[1]
        with lock:
            now[port] += 1
            most[port] = max(most[port], now[port])
        try:
            slowly(image, connection, span)
        finally:
            with lock:
                now[port] -= 1

    monkeypatch.setattr(WeightImage, "send", counted)
    before = images_of_this_process()
    async with relaying(image, 10) as (publication, trainer):
        await asyncio.wait_for(publication.run(), PATIENCE)

        held = {each.receiver.held_image for each in publication.members.values()}
        assert held == {image.checksum()}
        assert publication.state.received == publication.members.keys()
        assert trainer.faults.ranges == []
        assert 2 < len(most) <= 9 and max(most.values()) <= FAN_OUT * CONNECTIONS
    assert images_of_this_process() == before


async def test_a_member_that_dies_while_it_passes_the_version_on_holds_nobody_up(
    image: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relaying(image, 4) as (publication, trainer):
        first = publication.members["r0"]
        direct, sent = first.server.images.direct, asyncio.Event()
        assert direct is not None
        loop, port = asyncio.get_running_loop(), direct.port

        def dies(image: WeightImage, connection: socket.socket, span: range) -> None:
            if connection.getsockname()[1] == port:
                halfway(image, connection, span)
                first.server.images.withdraw()
                loop.call_soon_threadsafe(sent.set)
            else:
                slowly(image, connection, span)

        monkeypatch.setattr(WeightImage, "send", dies)
        running = asyncio.create_task(publication.run())
        await sent.wait()
        del publication.members["r0"], publication.addresses["r0"]
        publication.state = after(publication.state, MemberGone("r0"))

        await asyncio.wait_for(running, PATIENCE)

        assert publication.state.epoch.number == 1
        assert publication.state.received == {"r1", "r2", "r3"}
        assert len(trainer.faults.ranges) > 0
        for member in publication.members.values():
            assert member.receiver.held_image == image.checksum()
