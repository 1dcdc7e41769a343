"""The calls that the NCCL broadcast makes, on a recorded group: the calls alone, no GPU."""

from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count

import pytest
import torch
from torch.distributed.distributed_c10d import BroadcastOptions

from shared.errors import DeadlineExceeded, WeightTransferFailed
from shared.schemas.publication import Rendezvous
from shared.weights.nccl import DeviceBroadcast, form_nccl_group


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
    """Records calls; each broadcast becomes the next of these works."""

    works: list[RecordedWork]
    calls: list[object] = field(default_factory=list)

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> RecordedWork:
        (tensor,) = tensors
        self.calls.append((tensor, options.rootRank, options.rootTensor, options.timeout))
        return self.works[len(self.calls) - 1]

    def abort(self) -> None:
        self.calls.append("abort")


def _broadcast(group: RecordedGroup) -> DeviceBroadcast:
    ticks = count()
    return DeviceBroadcast(group, now=lambda: next(ticks) * 0.1, pause=lambda seconds: None)


def test_buffers_are_broadcast_in_slices_of_their_own_memory() -> None:
    works = [RecordedWork(polls_left=number) for number in range(4)]
    group = RecordedGroup(works)
    floats, halves = torch.arange(10, dtype=torch.float32), torch.arange(3, dtype=torch.bfloat16)

    _broadcast(group).transfer([floats, halves], slice_bytes=16, deadline_seconds=60)

    tensors = [call[0] for call in group.calls]
    assert [tensor.tolist() for tensor in tensors] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2]]
    assert [tensor.data_ptr() - floats.data_ptr() for tensor in tensors[:3]] == [0, 16, 32]
    assert all(call[1:3] == (0, 0) for call in group.calls)
    assert all(timedelta(0) < call[3] <= timedelta(seconds=60) for call in group.calls)
    assert [work.waits for work in works] == [1, 1, 1, 1]


def test_a_broadcast_that_does_not_complete_is_aborted_at_its_deadline() -> None:
    group = RecordedGroup([RecordedWork(polls_left=10**9)])
    broadcast = _broadcast(group)

    with pytest.raises(DeadlineExceeded, match="more than 2"):
        broadcast.transfer([torch.zeros(1)], slice_bytes=4, deadline_seconds=2)

    assert group.calls[-1] == "abort"
    with pytest.raises(WeightTransferFailed, match="closed"):
        broadcast.transfer([torch.zeros(1)], slice_bytes=4, deadline_seconds=2)


def test_a_failed_broadcast_is_aborted() -> None:
    group = RecordedGroup([RecordedWork(polls_left=0, error="NCCL communicator was aborted")])

    with pytest.raises(WeightTransferFailed, match="communicator was aborted"):
        _broadcast(group).transfer([torch.zeros(1)], slice_bytes=4, deadline_seconds=2)

    assert group.calls[-1] == "abort"


def test_closing_aborts_once() -> None:
    group = RecordedGroup([])
    broadcast = _broadcast(group)

    broadcast.close()
    broadcast.close()

    assert group.calls == ["abort"]


@pytest.mark.parametrize(
    ("buffer", "slice_bytes"),
    [(torch.zeros(2, 2), 4), (torch.zeros(8)[::2], 4), (torch.zeros(2), 6), (torch.zeros(2), 0)],
)
def test_what_is_not_flat_or_would_be_cut_is_refused(buffer: torch.Tensor, slice_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"flat buffer|cut elements"):
        _broadcast(RecordedGroup([])).transfer([buffer], slice_bytes, deadline_seconds=2)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this build of torch has NCCL")
def test_a_build_without_nccl_is_named() -> None:
    rendezvous = Rendezvous(host="127.0.0.1", port=1, epoch=1, world_size=2)

    with pytest.raises(WeightTransferFailed, match="no NCCL"):
        form_nccl_group(rendezvous, 1, 1.0, torch.device("cuda"))
