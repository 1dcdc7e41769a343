"""The publisher follows the gateway's decisions through epochs, absences and refusals."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flotilla.services.trainer.weights.flat_parameters import FlatParameters
from flotilla.services.trainer.worker.images import ImagePool
from flotilla.services.trainer.worker.publisher import Publisher
from flotilla.shared.errors import InvalidRequest, StalePolicyVersion, Unavailable, WeightTransferFailed
from flotilla.shared.schemas.publication import (
    Member,
    Publication,
    PublicationPhase,
    PublicationRequest,
    Rendezvous,
    Transport,
)
from flotilla.shared.weights.image.image import WeightImage

PREPARING, TRANSFERRING, COMMITTED, ABORTED = PublicationPhase


class FakeGateway:
    """Keeps one publication; a test moves it on."""

    def __init__(self, *members: str) -> None:
        self.members = tuple(Member(service_id=name, rank=rank) for rank, name in enumerate(members, start=1))
        self.current: Publication | None = None
        self.request: PublicationRequest | None = None
        self.calls: list[str] = []
        self.errors: list[Exception] = []
        self._changed = asyncio.Condition()

    async def call(self, method: str, path: str, *, body: Any = None, params: Any = None, **_: Any) -> Any:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        name = path.rsplit("/", 1)[-1]
        self.calls.append(f"{method} {name}")
        if method == "POST" and name == "publications":
            self.request = body
            phase = PREPARING if self.members else COMMITTED
            self.current = self._publication(1, phase, body.manifest.version)
        elif name == "rendezvous":
            await self.move(rendezvous=body, phase=TRANSFERRING)
        elif name == "sent":
            await self.move(phase=COMMITTED)
        elif name == "failed":
            assert self.current is not None
            await self.move(epoch=self.current.epoch + 1, phase=PREPARING, rendezvous=None, reason=body["detail"])
        elif params and params.get("wait"):
            await self._until_changed(params)
        assert self.current is not None
        return self.current.model_dump(mode="json")

    async def move(self, **changes: Any) -> None:
        async with self._changed:
            assert self.current is not None
            self.current = self.current.model_copy(update=changes)
            self._changed.notify_all()

    async def _until_changed(self, params: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: (self.current.phase, self.current.epoch) != (params["phase"], params["epoch"])
            )

    def _publication(self, epoch: int, phase: PublicationPhase, version: int) -> Publication:
        return Publication(
            experiment_id="e", version=version, epoch=epoch, phase=phase, members=self.members, deadline_seconds=5.0
        )


class FakeSender:
    """A weight group; ``on_send`` may stall or fail."""

    def __init__(self, on_send: Callable[[int], Any] = lambda epoch: None) -> None:
        self.open: list[int] = []
        self.world_sizes: list[int] = []
        self.sent: list[tuple[int, bytes]] = []
        self._on_send = on_send

    async def open_sender(self, epoch: int, world_size: int, timeout_seconds: float) -> Rendezvous:
        self.open.append(epoch)
        self.world_sizes.append(world_size)
        return Rendezvous(host="h", port=1, epoch=epoch, world_size=world_size)

    async def joined(self, epoch: int, deadline_seconds: float) -> None:
        await asyncio.sleep(0)

    async def send(self, epoch: int, image_path: Path, image_bytes: int, slice_bytes: int, deadline: float) -> None:
        waiting = self._on_send(epoch)
        if waiting is not None:
            await waiting
        self.sent.append((epoch, image_path.read_bytes()))

    async def close_epoch(self, epoch: int) -> None:
        self.open.remove(epoch)

    async def close(self) -> None:
        self.open.clear()


class Rig:
    """A publisher of one tiny layer."""

    def __init__(self, directory: Path, gateway: FakeGateway, sender: FakeSender) -> None:
        self.layer = nn.Linear(4, 4)
        self.images = ImagePool(FlatParameters(self.layer), directory=directory)
        self.offered: list[int] = []
        self.publisher = Publisher(
            gateway,
            sender,
            self.images,
            experiment_id="e",
            on_image=self._offer,
        )

    async def _offer(self, version: int, path: Path, checksum: str) -> None:
        self.offered.append(version)

    async def publish(self, version: int) -> None:
        async def at_once(work: Callable[[], Path]) -> Path:
            return work()

        await self.publisher.publish(version, version, at_once)


MakeRig = Callable[[FakeGateway, FakeSender], Rig]


@pytest.fixture
def a_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(gateway: FakeGateway, sender: FakeSender) -> Rig:
        rigs.append(Rig(tmp_path, gateway, sender))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.images.close()


async def test_without_members_a_version_is_committed_at_once(a_rig: MakeRig) -> None:
    gateway, sender = FakeGateway(), FakeSender()
    rig = a_rig(gateway, sender)

    await rig.publish(1)
    await rig.publisher.settled()

    assert gateway.calls == ["POST publications"]
    assert (rig.offered, rig.publisher.published_version, sender.open) == ([1], 1, [])


async def test_members_get_the_image_and_the_next_version_uses_the_same_epoch(a_rig: MakeRig, tmp_path: Path) -> None:
    gateway, sender = FakeGateway("a", "b"), FakeSender()
    rig = a_rig(gateway, sender)

    for version in (1, 2):
        await rig.publish(version)
        async with asyncio.timeout(2):
            if version == 2:
                # Not before it is announced: the manifest is made on another thread, in its own time.
                while gateway.current is None or gateway.current.version != version:
                    await asyncio.sleep(0)
                await gateway.move(phase=TRANSFERRING)
            await rig.publisher.settled()

    assert [epoch for epoch, _ in sender.sent] == [1, 1]
    assert gateway.calls.count("PUT rendezvous") == 1
    assert gateway.request is not None
    image = tmp_path / "copy"
    image.write_bytes(sender.sent[-1][1])
    with WeightImage.attach(image) as received:
        assert received.checksum() == gateway.request.manifest.checksum


async def test_a_send_that_fails_is_reported_and_goes_on_in_the_next_epoch(a_rig: MakeRig) -> None:
    def fail_once(epoch: int) -> None:
        if epoch == 1:
            raise WeightTransferFailed("connection reset")

    gateway, sender = FakeGateway("a"), FakeSender(fail_once)
    rig = a_rig(gateway, sender)

    await rig.publish(1)
    async with asyncio.timeout(2):
        await rig.publisher.settled()

    assert [epoch for epoch, _ in sender.sent] == [2]
    assert sender.open == [2]
    assert gateway.current is not None
    assert gateway.current.reason == "connection reset"


async def test_a_stuck_send_is_abandoned_when_the_gateway_closes_the_epoch(a_rig: MakeRig) -> None:
    gateway = FakeGateway("a", "b")
    sender = FakeSender(lambda epoch: asyncio.Event().wait() if epoch == 1 else None)
    rig = a_rig(gateway, sender)

    await rig.publish(1)
    async with asyncio.timeout(2):
        while not any(call.startswith("GET") for call in gateway.calls):
            await asyncio.sleep(0)
        await gateway.move(epoch=2, phase=PREPARING, rendezvous=None, members=gateway.members[:1])
        await rig.publisher.settled()

    assert [epoch for epoch, _ in sender.sent] == [2]
    assert sender.open == [2]


async def test_a_publisher_that_is_closed_while_it_abandons_a_send_opens_no_other_epoch(a_rig: MakeRig) -> None:
    is_ending, may_end = asyncio.Event(), asyncio.Event()

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await may_end.wait()

    gateway, sender = FakeGateway("a"), FakeSender(lambda epoch: stuck() if epoch == 1 else None)
    rig = a_rig(gateway, sender)
    await rig.publish(1)
    async with asyncio.timeout(5):
        while not any(call.startswith("GET") for call in gateway.calls):
            await asyncio.sleep(0)
        await gateway.move(epoch=2, phase=PREPARING, rendezvous=None)
        await is_ending.wait()

        closing = asyncio.create_task(rig.publisher.close())
        await asyncio.sleep(0.01)
        may_end.set()
        await closing

    assert rig.publisher.is_idle
    assert (len(sender.world_sizes), sender.open) == (1, [])


async def test_a_version_that_the_gateway_knows_is_passed_over(a_rig: MakeRig) -> None:
    gateway = FakeGateway("a")
    gateway.errors = [StalePolicyVersion("version 1 is not newer than 3")]
    rig = a_rig(gateway, FakeSender())

    await rig.publish(1)
    await rig.publisher.settled()

    assert gateway.calls == []
    assert rig.publisher.published_version == 1


async def test_an_absent_gateway_is_waited_for(a_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.worker.publisher.PAUSE_SECONDS", 0.001)
    gateway = FakeGateway("a")
    gateway.errors = [Unavailable("connection refused")] * 3
    rig = a_rig(gateway, FakeSender())

    await rig.publish(1)
    async with asyncio.timeout(2):
        await rig.publisher.settled()

    assert rig.publisher.published_version == 1


async def test_an_aborted_publication_is_announced_again(a_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.services.trainer.worker.publisher.PAUSE_SECONDS", 0.001)
    gateway = FakeGateway("a")
    sender = FakeSender()
    rig = a_rig(gateway, sender)
    opened = sender.open_sender

    async def aborted_meanwhile(*arguments: Any) -> Rendezvous:
        sender.open_sender = opened  # type: ignore[method-assign]
        await gateway.move(phase=ABORTED, reason="the trainer was away")
        raise WeightTransferFailed("no port")

    sender.open_sender = aborted_meanwhile  # type: ignore[method-assign]
    gateway_failed = gateway.call

    async def keep_aborted(method: str, path: str, **arguments: Any) -> Any:
        if path.endswith("/failed"):
            assert gateway.current is not None
            return gateway.current.model_dump(mode="json")
        return await gateway_failed(method, path, **arguments)

    gateway.call = keep_aborted  # type: ignore[method-assign]

    await rig.publish(1)
    async with asyncio.timeout(2):
        await rig.publisher.settled()

    assert gateway.calls.count("POST publications") == 2
    assert rig.publisher.published_version == 1


async def test_an_image_that_is_read_is_not_written(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    images = ImagePool(FlatParameters(layer), directory=tmp_path)
    first = images.snapshot()
    with WeightImage.attach(first) as reader:
        before = bytes(reader.view)
        with torch.no_grad():
            layer.weight += 1

        others = {images.snapshot() for _ in range(6)}

        assert first not in others
        assert bytes(reader.view) == before
    assert len(list(tmp_path.glob("*.safetensors"))) <= 4
    images.close()
    assert not list(tmp_path.glob("*.safetensors"))


async def test_images_that_are_read_for_long_do_not_keep_the_trainer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla.services.trainer.worker.images.PATIENCE_SECONDS", 0.01)
    images = ImagePool(FlatParameters(nn.Linear(4, 4)), directory=tmp_path)
    with ExitStack() as stack:
        readers = [stack.enter_context(WeightImage.attach(images.snapshot())) for _ in range(4)]

        newest = images.snapshot()

        assert newest not in {reader.path for reader in readers}
        assert [reader.is_withdrawn for reader in readers] == [True, False, False, False]
        assert all(len(reader.view) for reader in readers)
    images.close()


async def test_members_that_map_the_image_are_sent_nothing(a_rig: MakeRig) -> None:
    gateway, sender = FakeGateway("a"), FakeSender()
    mapping = Member(service_id="a", rank=None, transport=Transport.SHARED_MEMORY)
    gateway.members = (mapping,)
    rig = a_rig(gateway, sender)

    await rig.publish(1)
    while "GET 1" not in gateway.calls:
        await asyncio.sleep(0.001)
    await gateway.move(phase=COMMITTED)
    async with asyncio.timeout(2):
        await rig.publisher.settled()

    assert (sender.open, sender.sent) == ([], [])
    assert gateway.request is not None
    assert Path(gateway.request.manifest.image_path).is_file()


async def test_the_announcement_waits_for_members_that_map_the_image_and_nothing_else_is_asked(a_rig: MakeRig) -> None:
    gateway, sender = FakeGateway("a"), FakeSender()
    gateway.members = (Member(service_id="a", rank=None, transport=Transport.SHARED_MEMORY),)
    asked: list[Any] = []
    call = gateway.call

    async def commits(method: str, path: str, *, body: Any = None, params: Any = None, **_: Any) -> Any:
        asked.append((method, params))
        answer = await call(method, path, body=body)
        return answer | {"phase": "committed"}

    gateway.call = commits  # type: ignore[method-assign]
    rig = a_rig(gateway, sender)

    await rig.publish(1)
    async with asyncio.timeout(2):
        await rig.publisher.settled()

    assert asked == [("POST", {"wait": 5.0})]
    assert (rig.publisher.published_version, sender.sent) == (1, [])


async def test_training_goes_on_while_the_image_is_read_for_its_checksum(
    a_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = a_rig(FakeGateway(), FakeSender())
    may_go_on = threading.Event()
    describe = rig.images.manifest
    monkeypatch.setattr(rig.images, "manifest", lambda *arguments: may_go_on.wait(2) and describe(*arguments))

    await rig.publish(1)

    assert rig.offered == []
    may_go_on.set()
    await rig.publisher.settled()
    assert rig.offered == [1]


async def test_a_refusal_for_good_is_known_at_once(a_rig: MakeRig) -> None:
    gateway = FakeGateway("a")
    gateway.errors = [InvalidRequest("the manifest is not valid")]
    rig = a_rig(gateway, FakeSender())
    watching = asyncio.create_task(rig.publisher.watch())

    await rig.publish(1)

    with pytest.raises(InvalidRequest, match="manifest"):
        async with asyncio.timeout(2):
            await watching


async def test_the_group_has_a_place_for_every_rank_of_an_engine(a_rig: MakeRig) -> None:
    gateway, sender = FakeGateway("a", "b"), FakeSender()
    gateway.members = tuple(each.model_copy(update={"num_ranks": 4}) for each in gateway.members)
    rig = a_rig(gateway, sender)

    await rig.publish(1)
    await rig.publisher.settled()

    assert sender.world_sizes == [9]
