"""Weights from GPU to GPU: the same broadcast of flat slices, over NCCL and inside the caller's process.

Nothing here has run on a GPU in this project: it is written against the documented interface of ``torch.distributed``
and kept thin, and a recorded fake group checks the calls it makes. Two differences from gloo are NCCL's own: a finished
``wait`` only orders streams, so completion is polled; and ``abort`` does abort, so no process has to be killed.
All methods block: call them from a thread that may wait.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import BroadcastOptions

from shared.errors import DeadlineExceeded, WeightTransferFailed
from shared.schemas.publication import Rendezvous

POLL_SECONDS = 0.001


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
        """Abort what is under way and give up the communicator."""


class DeviceBroadcast:
    """Broadcasts flat device buffers from rank 0 to the other members of one epoch, each into its own buffers.

    Args:
        group: formed for this epoch, such as by :func:`form_nccl_group`.
        now: monotonic seconds.
        pause: sleeps for some seconds.
    """

    def __init__(
        self,
        group: CollectiveGroup,
        *,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._group = group
        self._now = now
        self._pause = pause
        self._is_open = True

    def transfer(self, buffers: Sequence[Tensor], slice_bytes: int, deadline_seconds: float) -> None:
        """Broadcast the buffers slice by slice; every member passes buffers of the same sizes in the same order.

        Args:
            buffers: one per dtype, each contiguous and of one dimension, such as ``FlatParameters.buffers``.
            slice_bytes: size of one broadcast, a multiple of every element size.
            deadline_seconds: for all of them.

        Raises:
            WeightTransferFailed: a collective failed; the group is aborted.
            DeadlineExceeded: a member stalled; likewise.
        """
        if not self._is_open:
            raise WeightTransferFailed("the weight group is closed")
        end = self._now() + deadline_seconds
        try:
            under_way = [self._start(piece, end) for buffer in buffers for piece in _slices(buffer, slice_bytes)]
            for work in under_way:
                while not work.is_completed():
                    if self._now() >= end:
                        raise DeadlineExceeded(f"the broadcast took more than {deadline_seconds} s")
                    self._pause(POLL_SECONDS)
                work.wait()
        except RuntimeError as error:
            self.close()
            raise WeightTransferFailed(f"the broadcast failed: {error}") from error
        except DeadlineExceeded:
            self.close()
            raise

    def close(self) -> None:
        """Abort what is under way and leave the group. May be called twice."""
        if self._is_open:
            self._is_open = False
            self._group.abort()

    def _start(self, piece: Tensor, end: float) -> Work:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(end - self._now(), POLL_SECONDS))
        return self._group.broadcast([piece], options)


def form_nccl_group(rendezvous: Rendezvous, rank: int, timeout_seconds: float, device: torch.device) -> CollectiveGroup:
    """Join the NCCL group of an epoch over the sender's store; the first collective connects the members.

    Args:
        rendezvous: of a store that is already hosted (``EndpointClient.open_sender`` hosts one).
        rank: 0 for the sender.
        timeout_seconds: of the store, and default of each collective.
        device: the GPU of this member.

    Raises:
        WeightTransferFailed: this build of torch has no NCCL, or the store is not there.
    """
    distributed: Any = torch.distributed
    if not distributed.is_nccl_available():
        raise WeightTransferFailed("this build of torch has no NCCL")
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = distributed.TCPStore(
            rendezvous.host, rendezvous.port, rendezvous.world_size, timeout=timeout, wait_for_workers=False
        )
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with torch.cuda.device(device):
            prefixed = distributed.PrefixStore(f"device-epoch-{rendezvous.epoch}", store)
            group: CollectiveGroup = distributed.ProcessGroupNCCL(prefixed, rank, rendezvous.world_size, options)
    except RuntimeError as error:
        raise WeightTransferFailed(f"cannot form the NCCL group: {error}") from error
    return group


def _slices(buffer: Tensor, slice_bytes: int) -> tuple[Tensor, ...]:
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"a flat buffer has one contiguous dimension, got shape {tuple(buffer.shape)}")
    if slice_bytes < 1 or slice_bytes % buffer.element_size():
        raise ValueError(f"slices of {slice_bytes} bytes cut elements of {buffer.element_size()} bytes")
    pieces: tuple[Tensor, ...] = torch.split(buffer, slice_bytes // buffer.element_size())
    return pieces
