"""Tensors whose bytes are in the host's memory, and whose memory on the device is free but while they are used.

A tensor stays what it is: its storage is emptied in place, and filled again. On a GPU the host's copies are pinned.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flotilla.services.trainer.models.offloading import bytes_of, storages_of
from flotilla.services.trainer.weights.parts import local_of


class ParkedTensors:
    """Some tensors, parked from the beginning; those that map a file or are small stay on the device.

    Args:
        tensors: whose storages nobody else uses.
        is_constant: whether nobody writes to them: then they are copied to the host once.
    """

    def __init__(self, tensors: Iterable[Tensor], *, is_constant: bool = False) -> None:
        self._is_constant = is_constant
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        for storage in storages_of(tensors):
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            kept.copy_(bytes_of(storage))
            storage.resize_(0)
            self._parked.append((storage, kept))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have them on the device while the block runs."""
        for storage, kept in self._parked:
            storage.resize_(len(kept))
            bytes_of(storage).copy_(kept)
        try:
            yield
        finally:
            for storage, kept in self._parked:
                if not self._is_constant:
                    kept.copy_(bytes_of(storage))
                storage.resize_(0)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values in the host's memory, sharded as it is; one that is not parked, as it is."""
        local = local_of(tensor.detach())
        for storage, kept in self._parked:
            # An emptied storage has no address, and is known by being the same one.
            if local.untyped_storage()._cdata == storage._cdata:
                first = local.storage_offset() * local.element_size()
                values = kept[first:].view(local.dtype).as_strided(local.shape, local.stride())
                if isinstance(tensor, DTensor):
                    return DTensor(values, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                return values
        return tensor
