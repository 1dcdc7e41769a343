"""The calls that the NCCL broadcast makes, on a recorded group: the calls alone, no GPU."""

from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count

import pytest
import torch
from torch.distributed.distributed_c10d import BroadcastOptions

from shared.errors import DeadlineExceeded, WeightTransferFailed
from shared.weights.endpoint_client import EndpointClient
from shared.weights.nccl import NcclBroadcast


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

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> RecordedWork:
        (tensor,) = tensors
        self.calls.append((tensor, options.rootRank, options.rootTensor, options.timeout))
        if self.sent is not None:
            tensor.copy_(self.sent)
        return self.works[len(self.calls) - 1]


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


def test_a_receiver_has_the_slice_in_its_image_when_it_has_waited() -> None:
    sent = torch.arange(4, dtype=torch.uint8)
    piece = torch.zeros(4, dtype=torch.uint8)

    under_way = _broadcast(RecordedGroup([RecordedWork(polls_left=2)], sent), is_sender=False).start(piece, end=60)
    assert piece.tolist() == [0, 0, 0, 0]
    under_way.wait()

    assert piece.tolist() == sent.tolist()


def test_a_slice_that_does_not_arrive_is_given_up_at_its_deadline() -> None:
    piece = torch.zeros(4, dtype=torch.uint8)
    group = RecordedGroup([RecordedWork(polls_left=10**9)], sent=piece + 1)

    with pytest.raises(DeadlineExceeded):
        _broadcast(group, is_sender=False).start(piece, end=2).wait()

    assert piece.tolist() == [0, 0, 0, 0]


def test_a_failed_broadcast_fails_the_wait() -> None:
    group = RecordedGroup([RecordedWork(polls_left=0, error="NCCL communicator was aborted")])

    with pytest.raises(RuntimeError, match="communicator was aborted"):
        _broadcast(group, is_sender=True).start(torch.zeros(1, dtype=torch.uint8), end=2).wait()


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
async def test_a_build_without_nccl_is_named_by_its_member() -> None:
    async with EndpointClient(device="cuda:0") as endpoint:
        await endpoint.open_sender(1, 2, 10.0)

        with pytest.raises(WeightTransferFailed, match="no NCCL"):
            await endpoint.joined(1, 10.0)
