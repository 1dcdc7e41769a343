"""The matrices of a model, multiplied the way that is fastest where they are.

On a CPU a large float32 matrix is packed for oneDNN once, when its weights have been read: the plain product packs it
in every call, which for a few dozen rows takes as long as the product itself.
"""

import torch
from torch import Tensor
from torch.nn import functional

HAS_ONEDNN: bool = torch._C._has_mkldnn
PACKED_ELEMENTS = 1 << 17
"""Smaller matrices stay in the caches of the processor, and a plain product starts faster."""


class Matrix:
    """A weight [out, in], and its bias if it has one.

    Attributes:
        plain: where the weight is read to; None once it is packed.
        bias: [out], or None.
    """

    def __init__(self, plain: Tensor, bias: Tensor | None = None) -> None:
        self.plain: Tensor | None = plain
        self._transposed: Tensor | None = plain.t()
        self.bias = bias
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Pack the weight, which has been read, where that pays."""
        assert self.plain is not None
        is_small = self.plain.numel() < PACKED_ELEMENTS
        if is_small or self.plain.device.type != "cpu" or self.plain.dtype != torch.float32 or not HAS_ONEDNN:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.plain)
        self.plain = self._transposed = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Multiply rows [B, in]: [B, out]."""
        if self._packed is None:
            assert self.plain is not None
            return functional.linear(hidden, self.plain, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return product

    def add_to(self, total: Tensor, hidden: Tensor) -> None:
        """Add the product of rows [B, in] to ``total`` [B, out], in place."""
        if self._transposed is not None and self.bias is None:
            total.addmm_(hidden, self._transposed)
        else:
            total.add_(self(hidden))
