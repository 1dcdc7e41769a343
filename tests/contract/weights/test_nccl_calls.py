"""The calls that the NCCL broadcast makes, on a recorded group: the calls alone, no GPU."""

from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import BroadcastOptions

from flotilla.shared.errors import DeadlineExceeded, WeightTransferFailed
from flotilla.shared.weights.group import group as group_module
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.group.endpoint_protocol import Command, Direction, Opening
from flotilla.shared.weights.group.nccl import NcclBroadcast
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.mapped.mappings import KeptMappings


@dataclass
class RecordedWork:
    """Completes after some polls, as told."""

    polls_left: int
    error: str | None = None
    waits: int = 0

    def is_completed(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise RuntimeError(self.error)


@dataclass
class RecordedGroup:
    """Records calls; each broadcast becomes the next of these works, and fills its buffer with ``sent``."""

    works: list[RecordedWork]
    sent: torch.Tensor | None = None
    calls: list[tuple[torch.Tensor, int, int, timedelta]] = field(default_factory=list)
    num_aborts: int = 0

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> RecordedWork:
        (tensor,) = tensors
        self.calls.append((tensor, options.rootRank, options.rootTensor, options.timeout))
        if self.sent is not None:
            tensor.copy_(self.sent)
        return self.works[len(self.calls) - 1]

    def abort(self) -> None:
        self.num_aborts += 1


def _broadcast(group: RecordedGroup, *, is_sender: bool) -> NcclBroadcast:
    ticks = count()
    return NcclBroadcast(
        group, torch.device("cpu"), is_sender=is_sender, now=lambda: next(ticks) * 0.1, pause=lambda seconds: None
    )


def test_the_sender_broadcasts_a_copy_of_each_slice_from_rank_0() -> None:
    works = [RecordedWork(polls_left=number) for number in range(3)]
    group = RecordedGroup(works)
    broadcast = _broadcast(group, is_sender=True)
    pieces = torch.split(torch.arange(10, dtype=torch.uint8), 4)

    under_way = [broadcast.start(piece, end=60) for piece in pieces]
    for each in under_way:
        each.wait()

    assert [call[0].tolist() for call in group.calls] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(call[0].data_ptr() != piece.data_ptr() for call, piece in zip(group.calls, pieces, strict=True))
    assert all(call[1:3] == (0, 0) for call in group.calls)
    assert all(timedelta(0) < call[3] <= timedelta(seconds=60) for call in group.calls)
    assert [work.waits for work in works] == [1, 1, 1]
    assert group.num_aborts == 0


def test_a_receiver_has_the_slice_in_its_image_when_it_has_waited() -> None:
    sent = torch.arange(4, dtype=torch.uint8)
    piece = torch.zeros(4, dtype=torch.uint8)

    under_way = _broadcast(RecordedGroup([RecordedWork(polls_left=2)], sent), is_sender=False).start(piece, end=60)
    assert piece.tolist() == [0, 0, 0, 0]
    under_way.wait()

    assert piece.tolist() == sent.tolist()


def test_a_slice_that_does_not_arrive_is_given_up_at_its_deadline_and_the_device_is_freed() -> None:
    piece = torch.zeros(4, dtype=torch.uint8)
    group = RecordedGroup([RecordedWork(polls_left=10**9)], sent=piece + 1)

    with pytest.raises(DeadlineExceeded):
        _broadcast(group, is_sender=False).start(piece, end=2).wait()

    assert piece.tolist() == [0, 0, 0, 0]
    assert group.num_aborts == 1


def test_a_failed_broadcast_fails_the_wait_and_is_aborted() -> None:
    group = RecordedGroup([RecordedWork(polls_left=0, error="NCCL communicator was aborted")])

    with pytest.raises(RuntimeError, match="communicator was aborted"):
        _broadcast(group, is_sender=True).start(torch.zeros(1, dtype=torch.uint8), end=2).wait()

    assert group.num_aborts == 1


class OneAfterTheOther:
    """A group that sends ``image``, and says in which order broadcasts were started and waited for."""

    def __init__(self, image: bytes, *, fails_at: int | None = None) -> None:
        self.image = torch.frombuffer(bytearray(image), dtype=torch.uint8)
        self.fails_at = fails_at
        self.events: list[str] = []
        self._num_sent = self._num_started = 0

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> "NumberedWork":
        (tensor,) = tensors
        self.events.append(f"start {self._num_started}")
        tensor.copy_(self.image[self._num_sent : self._num_sent + tensor.numel()])
        work = NumberedWork(self, self._num_started)
        self._num_sent, self._num_started = self._num_sent + tensor.numel(), self._num_started + 1
        return work

    def abort(self) -> None:
        self.events.append("abort")


@dataclass
class NumberedWork:
    group: OneAfterTheOther
    number: int

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.group.events.append(f"wait {self.number}")
        if self.number == self.group.fails_at:
            raise RuntimeError("NCCL error: remote process exited")


def _received(monkeypatch: pytest.MonkeyPatch, image: WeightImage, group: OneAfterTheOther) -> str | None:
    """Receive an image in slices as a member does whose epoch is of NCCL: its store is real, its group recorded."""
    mappings = KeptMappings()
    monkeypatch.setattr(group_module, "form_nccl_group", lambda *args: group)
    monkeypatch.setattr(group_module, "KeptMappings", lambda: mappings)
    host = "127.0.0.1"
    store = TCPStore(host, 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    opening = Opening(
        epoch=1,
        rank=1,
        world_size=2,
        bind_host=host,
        host=host,
        port=store.port,
        address=None,
        timeout_seconds=10,
        device="cpu",
    )
    member = group_module.WeightGroup(opening, on_opened=lambda port: None)
    command = Command(
        direction=Direction.RECEIVE,
        image_path=image.path,
        image_bytes=image.image_bytes,
        slice_bytes=1000,
        deadline_seconds=10,
    )
    try:
        return member.transfer(command, on_arrived=lambda count: None)
    finally:
        mappings.close()


def test_an_image_is_received_with_two_slices_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bytes(range(256)) * 18
    group = OneAfterTheOther(sent)
    with WeightImage.create(len(sent), directory=tmp_path) as image:
        checksum = _received(monkeypatch, image, group)

        assert bytes(image.view) == sent
    assert checksum == xxhash.xxh3_64_hexdigest(sent)
    order = "start 0, start 1, wait 0, start 2, wait 1, start 3, wait 2, start 4, wait 3, wait 4"
    assert group.events == order.split(", ")


def test_nothing_is_started_after_a_slice_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = OneAfterTheOther(bytes(5000), fails_at=1)
    with (
        WeightImage.create(5000, directory=tmp_path) as image,
        pytest.raises(RuntimeError, match="remote process exited"),
    ):
        _received(monkeypatch, image, group)

    assert group.events == ["start 0", "start 1", "wait 0", "start 2", "wait 1", "abort"]


def test_the_calls_are_those_of_torch() -> None:
    backend = torch._C._distributed_c10d.Backend  # type: ignore[attr-defined]

    assert callable(backend.broadcast) and callable(backend.abort)
    assert callable(torch.distributed.Work.is_completed) and callable(torch.distributed.Work.wait)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
async def test_a_build_without_nccl_is_named_by_its_member() -> None:
    async with EndpointClient(device="cuda:0") as endpoint:
        await endpoint.open_sender(1, 2, 10.0)

        with pytest.raises(WeightTransferFailed, match="no NCCL"):
            await endpoint.joined(1, 10.0)
