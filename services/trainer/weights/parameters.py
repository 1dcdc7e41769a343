"""What image pool, kept versions and checkpoints need of a model's weights, whoever has them."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

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
