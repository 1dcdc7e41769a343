"""Weights of earlier policy versions, kept to compute log-probs under the version that sampled a token."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from flotilla.services.trainer.weights.parts import Part, local_of, localized
from flotilla.services.trainer.weights.sharded_parameters import ShardedParameters
from flotilla.shared.errors import ModelError
from flotilla.shared.weights.image.layout import ImageLayout


class Parameters(Protocol):
    """The weights of a model, on one rank or sharded over several; names and layout are the checkpoint's."""

    @property
    def layout(self) -> ImageLayout:
        """Of the image that they make."""

    def copies(self, *, as_published: bool) -> dict[str, Tensor]:
        """Copy what this rank has of them: as they are, or as receivers have them after a publication."""

    def fill(self, copies: Mapping[str, Tensor]) -> None:
        """Put copies back, in place."""

    def from_runs(self, runs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy what this rank has of weights that lie as one run of elements per dtype, by the dtype's name."""


_PREFIX = "version"


class VersionedWeights:
    """Copies of the weights, one for each version that a trained token may have.

    Args:
        weights: the model's.
    """

    def __init__(self, weights: Parameters) -> None:
        self._weights = weights
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are kept, oldest first."""
        return tuple(sorted(self._kept))

    def keep(self, version: int, oldest: int) -> None:
        """Copy the present weights as this version's samplers have them, and forget versions before ``oldest``.

        Version 0 is never published: every engine starts with the weights of the model's directory.
        """
        self._kept[version] = self._weights.copies(as_published=bool(version))
        for old in [each for each in self._kept if each < oldest]:
            del self._kept[old]

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Put a version's weights into the model while the block runs; the present ones come back bit by bit.

        Raises:
            KeyError: the version is not kept.
        """
        chosen = self._kept[version]
        present = self._weights.copies(as_published=False)
        try:
            self._weights.fill(chosen)
            yield
        finally:
            self._weights.fill(present)

    def tensors(self) -> Iterator[Tensor]:
        """Return what is kept on this rank, whole or sharded."""
        for copies in self._kept.values():
            yield from copies.values()

    def state(self) -> dict[str, Tensor]:
        """Return the copies that one rank has whole as named tensors: one run of elements per version and dtype."""
        return {
            f"{_PREFIX}/{version}/{dtype}": run for version, runs in self._kept.items() for dtype, run in runs.items()
        }

    def parts(self) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], list[Part]]:
        """Return the same names with shape and dtype, and this rank's parts of them."""
        assert isinstance(self._weights, ShardedParameters)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        parts: list[Part] = []
        for version, copies in self._kept.items():
            prefix = f"{_PREFIX}/{version}"
            for dtype, count in self._weights.run_lengths().items():
                shapes[f"{prefix}/{str(dtype).removeprefix('torch.')}"] = ((count,), dtype)
            parts += self._weights.run_parts(copies, prefix)
        return shapes, parts

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned, in place of what was kept."""
        runs: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            _, version, dtype = name.split("/")
            runs.setdefault(int(version), {})[dtype] = tensor
        self._kept = {version: self._weights.from_runs(of_version) for version, of_version in runs.items()}


class WeightAverage:
    """``average = decay * average + (1 - decay) * weight``, beginning as the weights are.

    Args:
        weights: by name, float32; sharded ones are averaged shard by shard.
        decay: at least 0 and below 1.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], decay: float) -> None:
        self._weights, self._decay = weights, decay
        self._averages: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Begin again with the weights as they are now."""
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        for name, average in self._averages.items():
            local_of(average).lerp_(local_of(self._weights[name].detach()), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """Return the averages by name."""
        return dict(self._averages)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``state`` returned.

        Raises:
            ModelError: it is of other weights.
        """
        shapes = {name: average.shape for name, average in self._averages.items()}
        if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
            raise ModelError("the checkpoint's moving average is of other weights than those that are trained")
        self._averages = {name: localized(tensors[name], self._averages[name]) for name in self._averages}
