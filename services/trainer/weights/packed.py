"""Weights that are not in memory as they are published, but packed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor


class Packed(Protocol):
    """One of them."""

    @property
    def shape(self) -> torch.Size:
        """Of the weight as it is published."""

    @property
    def dtype(self) -> torch.dtype:
        """Likewise."""

    def unpacked(self) -> Tensor:
        """Make the weight, anew each time."""


NONE_PACKED: Mapping[str, Packed] = MappingProxyType({})
