"""Weights of earlier policy versions, kept to compute log-probs under the version that sampled a token."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shared.weights.flat_parameters import FlatParameters

_PREFIX = "version"


class VersionedWeights:
    """Copies of the flat weights, one for each version that a trained token may have.

    Args:
        flat: the model's weights.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._kept: dict[int, dict[torch.dtype, Tensor]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are kept, oldest first."""
        return tuple(sorted(self._kept))

    def keep(self, version: int, oldest: int) -> None:
        """Copy the present weights as this version's samplers have them, and forget versions before ``oldest``.

        Version 0 is never published: every engine starts with the weights of the model's directory.
        """
        copied = self._flat.as_published() if version else {d: b.clone() for d, b in self._flat.buffers.items()}
        self._kept[version] = copied
        for old in [each for each in self._kept if each < oldest]:
            del self._kept[old]

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Put a version's weights into the model while the block runs; the present ones come back bit by bit.

        Raises:
            KeyError: the version is not kept.
        """
        chosen = self._kept[version]
        present = {dtype: buffer.clone() for dtype, buffer in self._flat.buffers.items()}
        try:
            self._fill(chosen)
            yield
        finally:
            self._fill(present)

    def state(self) -> dict[str, Tensor]:
        """Return the copies as named tensors."""
        return {
            f"{_PREFIX}/{version}/{str(dtype).removeprefix('torch.')}": buffer
            for version, buffers in self._kept.items()
            for dtype, buffer in buffers.items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned, in place of what was kept."""
        self._kept = {}
        for name, tensor in tensors.items():
            _, version, dtype = name.split("/")
            device = self._flat.buffers[getattr(torch, dtype)].device
            self._kept.setdefault(int(version), {})[getattr(torch, dtype)] = tensor.to(device).clone()

    @torch.no_grad()
    def _fill(self, buffers: Mapping[torch.dtype, Tensor]) -> None:
        for dtype, buffer in buffers.items():
            self._flat.buffers[dtype].copy_(buffer)
