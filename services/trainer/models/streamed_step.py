"""AdamW with its moments in the host's memory: a step takes them to the device a few parameters at a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from flotilla.services.trainer.models.host_memory import ParkedTensors

BUCKET_BYTES = 256 << 20
"""So much of the parameters at a time; their moments take twice that."""


class StreamedStep:
    """Steps to the same bits as the optimiser would by itself: each element's update depends on no other's.

    Args:
        adam: the optimiser; its state is empty.
        masters: all parameters that it updates.
    """

    def __init__(self, adam: torch.optim.Optimizer, masters: Iterable[nn.Parameter]) -> None:
        self._adam = adam
        self._buckets = list(_buckets(masters))
        self._parked: dict[nn.Parameter, ParkedTensors] = {}

    def park(self) -> None:
        """Move the moments that were loaded to the host."""
        self._parked = {}
        for bucket in self._buckets:
            self._park_new(bucket)

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        gradients = {id(master): master.grad for bucket in self._buckets for master in bucket}
        self._show(gradients, None)
        for bucket in self._buckets:
            self._show(gradients, bucket)
            with ExitStack() as stack:
                for parked in filter(None, map(self._parked.get, bucket)):
                    stack.enter_context(parked.on_device())
                self._adam.step()
            self._park_new(bucket)
            self._show(gradients, None)
        for bucket in self._buckets:
            self._show(gradients, bucket)

    def on_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same tensors with their values in the host's memory."""
        found = dict(tensors)
        for parked in self._parked.values():
            found = {name: parked.on_host(tensor) for name, tensor in found.items()}
        return found

    def _show(self, gradients: Mapping[int, Tensor | None], bucket: Sequence[nn.Parameter] | None) -> None:
        """Let the optimiser see the gradients of a bucket; None: of nothing."""
        for master in bucket if bucket is not None else (each for shown in self._buckets for each in shown):
            master.grad = None if bucket is None else gradients[id(master)]

    def _park_new(self, bucket: Sequence[nn.Parameter]) -> None:
        """Park the moments that a bucket has got: a parameter has none before the first update with a gradient."""
        for master in bucket:
            state = self._adam.state.get(master)
            if state and master not in self._parked:
                self._parked[master] = ParkedTensors(each for each in state.values() if isinstance(each, Tensor))


def _buckets(masters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for master in masters:
        bucket.append(master)
        if sum(each.numel() * each.element_size() for each in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
