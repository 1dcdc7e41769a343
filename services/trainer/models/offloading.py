"""Moves tensors out of a device's memory and back, so that another process can use it meanwhile.

From a GPU they go to the host's memory; what is in the host's memory already goes to a file without a name, which
vanishes with the process. Storages are emptied and filled again in place: tensors, and views of them, stay what they
are, so that neither a model nor its optimiser notices.

``ParkedTensors`` are on the device only while they are used. On a GPU the host's copies are pinned.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flotilla.services.trainer.weights.parts import local_of
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.own_memory import return_freed_memory
from flotilla.shared.weights.image.tensors import host_memory

LEAST_BYTES = 1 << 16
"""Smaller storages stay: they free nothing worth the while."""


@dataclass(frozen=True)
class _Moved:
    """A storage that is empty now.

    Attributes:
        kept: its bytes in the host's memory; None where they are in the file.
        start: its first byte in the file.
    """

    storage: torch.UntypedStorage
    num_bytes: int
    kept: Tensor | None
    start: int


class Offloader:
    """Keeps what was moved.

    Args:
        directory: for the file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._moved: list[_Moved] = []

    @property
    def num_bytes(self) -> int:
        """What is moved now."""
        return sum(moved.num_bytes for moved in self._moved)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the storages of tensors.

        Raises:
            Unavailable: the disk has no room for them; nothing was moved.
        """
        storages = storages_of(tensors)
        on_host = sum(each.nbytes() for each in storages if each.device.type == "cpu")
        if on_host:
            self._reserve(on_host)
        start = 0
        for storage in storages:
            num_bytes, is_on_host = storage.nbytes(), storage.device.type == "cpu"
            if is_on_host:
                self._write(storage, start)
            self._moved.append(_Moved(storage, num_bytes, None if is_on_host else bytes_of(storage).cpu(), start))
            storage.resize_(0)
            start += num_bytes if is_on_host else 0
        _return_memory(storages)

    def reload(self) -> None:
        """Move everything back; what fails half-way may be tried again.

        Raises:
            torch.OutOfMemoryError: the device has no room yet.
        """
        while self._moved:
            moved = self._moved[-1]
            moved.storage.resize_(moved.num_bytes)
            if moved.kept is not None:
                bytes_of(moved.storage).copy_(moved.kept)
            else:
                self._read(moved)
            self._moved.pop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reserve(self, num_bytes: int) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (it lives until ``reload``)
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except BaseException:
                file.close()
                raise
            self._file = file
        except OSError as error:
            raise Unavailable(
                f"weights cannot leave memory for {num_bytes} bytes of {self._directory}: {error}"
            ) from error

    def _write(self, storage: torch.UntypedStorage, start: int) -> None:
        assert self._file is not None
        view = host_memory(storage.data_ptr(), storage.nbytes())
        while view:
            written = os.pwrite(self._file.fileno(), view, start)
            view, start = view[written:], start + written

    def _read(self, moved: _Moved) -> None:
        assert self._file is not None
        view, start = host_memory(moved.storage.data_ptr(), moved.storage.nbytes()), moved.start
        while view:
            found = os.preadv(self._file.fileno(), [view], start)
            if not found:
                raise OSError(f"the file of offloaded weights ends at byte {start}")
            view, start = view[found:], start + found


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Find the storages that can be emptied, each once; what maps a file takes no memory of its own."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.detach()
        storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
        if storage.nbytes() >= LEAST_BYTES and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """View a storage's bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _return_memory(storages: Iterable[torch.UntypedStorage]) -> None:
    return_freed_memory()
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.empty_cache()


class ParkedTensors:
    """Some tensors, parked from the beginning; those that map a file or are small stay on the device.

    Args:
        tensors: the only users of their storages.
        is_constant: whether they never change: then they are copied to the host once.
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
