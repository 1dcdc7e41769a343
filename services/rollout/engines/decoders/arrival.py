"""Weights that are read while they arrive: a reader on one thread waits for bytes that another thread reports.

What arrived is not verified yet. So the reader is not done before the whole image is found right, and what it read of
an image that is aborted is thrown away.
"""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor, uint8

from flotilla.services.rollout.engines.decoders.checkpoint import TensorHeader
from flotilla.shared.errors import WeightTransferFailed
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Kind, Site
from flotilla.shared.weights.image.files import open_shared
from flotilla.shared.weights.image.image import layout_of
from flotilla.shared.weights.image.layout import LENGTH_BYTES, header_bytes
from flotilla.shared.weights.image.tensors import view_of

SILENCE_SECONDS = 900.0
"""Longest time between two signs of a transfer: far above the deadline at which a receiver gives one up."""


class Tensors(Protocol):
    """Weights that can be read, one tensor at a time."""

    headers: dict[str, TensorHeader]
    """What there is, in the order in which it is best read."""

    def read(self, name: str) -> Tensor:
        """Read a tensor; it may be a view of the file."""


class Arrival:
    """A ``WeightTransfer`` as its reader sees it: how far an image has come. Any thread may report; one waits.

    Args:
        image: the file.
        version: that it will be.
        silence_seconds: after which a waiter fails, though the transfer was not aborted.
    """

    def __init__(self, image: Path, version: int, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self.content = image, version
        self._silence_seconds = silence_seconds
        self._changed = threading.Condition()
        self._bytes_arrived = 0
        self._is_right = False
        self._abort_reason: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether the image is whole and its checksum right."""
        return self._is_right

    def advance(self, bytes_arrived: int) -> None:
        """Let the reader continue; see ``WeightTransfer.advance``."""
        with self._changed:
            self._bytes_arrived = max(self._bytes_arrived, bytes_arrived)
            self._changed.notify_all()

    def complete(self) -> None:
        """Let the reader end; see ``WeightTransfer.complete``."""
        with self._changed:
            self._is_right = self._abort_reason is None
            self._changed.notify_all()

    def abort(self, reason: str) -> None:
        """Let the reader fail; see ``WeightTransfer.abort``."""
        with self._changed:
            if not self._is_right and self._abort_reason is None:
                self._abort_reason = reason
            self._changed.notify_all()

    def wait_for(self, num_bytes: int) -> None:
        """Wait until so many bytes are there.

        Raises:
            WeightTransferFailed: the transfer was aborted, or nothing was heard of it for too long.
        """
        self._wait(lambda: self._is_right or self._bytes_arrived >= num_bytes)

    def wait_until_right(self) -> None:
        """Wait until the image is whole and its checksum right.

        Raises:
            WeightTransferFailed: the transfer was aborted, or nothing was heard of it for too long.
        """
        self._wait(lambda: self._is_right)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            while self._abort_reason is None and not is_there():
                if not self._changed.wait(self._silence_seconds):
                    raise WeightTransferFailed(f"nothing was heard of the weights for {self._silence_seconds:g} s")
            if self._abort_reason is not None:
                raise WeightTransferFailed(f"the transfer of the weights was aborted: {self._abort_reason}")


class ArrivingTensors:
    """The tensors of an image that is being received: each is read when its last byte has arrived.

    The mapping is a shared one, so that it shows what others write into the file.

    Args:
        image: the file, of its final size.
        arrival: of its bytes.

    Raises:
        WeightTransferFailed: the transfer was aborted, or what arrived is no weight image.
    """

    def __init__(self, image: Path, arrival: Arrival) -> None:
        self._arrival = arrival
        with open_shared(image) as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        arrival.wait_for(LENGTH_BYTES)
        arrival.wait_for(header_bytes(self._mapped[:LENGTH_BYTES]))
        layout = layout_of(self._mapped)
        self.metadata = layout.metadata
        self._specs = {spec.name: spec for spec in layout.tensors}
        self.headers = {name: TensorHeader(spec.dtype, spec.shape) for name, spec in self._specs.items()}

    def read(self, name: str) -> Tensor:
        """View a tensor when it is there.

        Raises:
            WeightTransferFailed: the transfer was aborted.
        """
        spec = self._specs[name]
        self._arrival.wait_for(spec.end)
        return view_of(self._mapped, spec)


def damaged(source: Tensors) -> Tensors:
    """Return the same tensors, unless a fault is due: then with one bit of the first changed, or half of them lost."""
    for kind in () if (faults := armed()) is None else faults.damage(Site.ENGINE_READ):
        source = DamagedTensors(source, kind)
    return source


class DamagedTensors:
    """Tensors that are read wrong, as of a machine that fails, or an engine that does.

    Args:
        source: what is there.
        kind: ``flip`` or ``half``.
    """

    def __init__(self, source: Tensors, kind: Kind) -> None:
        self._source, self._kind, self.headers = source, kind, source.headers
        self._first, *_ = self._names = list(source.headers)

    def read(self, name: str) -> Tensor:
        """Read a tensor, or the rest of it."""
        tensor = self._source.read(name)
        if self._kind is Kind.HALF:
            return tensor if self._names.index(name) < len(self._names) // 2 else tensor.new_zeros(tensor.shape)
        if name == self._first:
            tensor = tensor.clone()
            tensor.view(-1).view(uint8)[0] ^= 1
        return tensor
