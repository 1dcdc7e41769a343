"""Slices of weight images over NCCL: through a buffer on the GPU at either end, in the member's own process.

It is written against the documented interface of ``torch.distributed`` and kept thin; a recorded group checks the calls
it makes, and three members on one GPU ran it (docs/gpu-status.md). Two differences from gloo are NCCL's own: a finished
``wait`` only orders streams, so completion is polled; and members must be on different GPUs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions

from flotilla.shared.errors import DeadlineExceeded, WeightTransferFailed

POLL_SECONDS = 0.001
SLICES_IN_FLIGHT = 2
"""Broadcasts under way at once: the checksum of one slice is computed while the next one arrives. Each takes a buffer
on the GPU."""


class Work(Protocol):
    """A collective under way."""

    def is_completed(self) -> bool:
        """Whether it has ended on the device, well or not."""

    def wait(self) -> Any:
        """Order the current stream behind it; raises what it failed with."""


class CollectiveGroup(Protocol):
    """The part of ``ProcessGroupNCCL`` that is used."""

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> Work:
        """Broadcast from the root rank."""

    def abort(self) -> None:
        """End what is under way on the device (``ncclCommAbort``); the group is of no use afterwards."""


@dataclass(frozen=True)
class SliceUnderWay:
    """One slice on its way; ``wait`` returns when it is where it should be.

    Attributes:
        group: of the collective; aborted where it does not end well.
        work: the collective.
        piece: the slice in host memory.
        buffer: the same on the device.
        end: deadline on the clock ``now``.
    """

    group: CollectiveGroup
    work: Work
    piece: Tensor
    buffer: Tensor
    is_sender: bool
    end: float
    now: Callable[[], float]
    pause: Callable[[float], None]

    def wait(self) -> None:
        """Wait for the device, then copy what was received into host memory.

        Raises:
            DeadlineExceeded: a member stalled.
            RuntimeError: the collective failed.
        """
        try:
            while not self.work.is_completed():
                if self.now() >= self.end:
                    raise DeadlineExceeded("the broadcast did not finish within its deadline")
                self.pause(POLL_SECONDS)
            self.work.wait()
        except (DeadlineExceeded, RuntimeError):
            # A kernel that waits for a silent peer spins on the device until it is aborted.
            self.group.abort()
            raise
        if not self.is_sender:
            self.piece.copy_(self.buffer)


class NcclBroadcast:
    """Starts broadcasts of slices of host memory from rank 0.

    Args:
        group: formed for this epoch, such as by :func:`form_nccl_group`.
        device: the GPU of this member.
        is_sender: whether this is rank 0.
        now: monotonic seconds.
        pause: sleeps for some seconds.
    """

    in_flight = SLICES_IN_FLIGHT

    def __init__(
        self,
        group: CollectiveGroup,
        device: torch.device,
        *,
        is_sender: bool,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._group = group
        self._device = device
        self._is_sender = is_sender
        self._now = now
        self._pause = pause

    def start(self, piece: Tensor, end: float) -> SliceUnderWay:
        """Start to broadcast a slice; what is returned is to be waited for.

        Args:
            piece: [N] uint8 in host memory: what is sent, or where it is received.
            end: deadline in monotonic seconds.
        """
        sends, device = self._is_sender, self._device
        buffer = piece.to(device, copy=True) if sends else torch.empty_like(piece, device=device)
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(end - self._now(), POLL_SECONDS))
        work = self._group.broadcast([buffer], options)
        return SliceUnderWay(self._group, work, piece, buffer, self._is_sender, end, self._now, self._pause)


def form_nccl_group(
    store: Any, rank: int, world_size: int, timeout_seconds: float, device: torch.device
) -> CollectiveGroup:
    """Join the NCCL group of an epoch over its store; the first collective connects the members.

    Args:
        store: of this epoch.
        rank: 0 for the sender.
        world_size: members, the sender included.
        timeout_seconds: default of each collective.
        device: the GPU of this member.

    Raises:
        WeightTransferFailed: this build of torch has no NCCL, or the group cannot be formed.
    """
    distributed: Any = torch.distributed
    if not distributed.is_nccl_available():
        raise WeightTransferFailed("this build of torch has no NCCL")
    try:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        torch.cuda.set_device(device)
        group: CollectiveGroup = distributed.ProcessGroupNCCL(store, rank, world_size, options)
    except RuntimeError as error:
        raise WeightTransferFailed(f"cannot form the NCCL group: {error}") from error
    return group
