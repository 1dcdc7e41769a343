"""The matrices of a model, multiplied the way that is fastest where they are.

On a CPU a float32 matrix is packed once, when its weights have been read: for the native kernels where these compute,
else, if it is large, for oneDNN. The plain product packs it in every call, which for a few dozen rows takes as long as
the product itself.
"""

import torch
from torch import Tensor
from torch.nn import functional

from services.rollout.engines.decoders.native.kernels import Kernels

HAS_ONEDNN: bool = torch._C._has_mkldnn
PACKED_ELEMENTS = 1 << 17
"""Smaller matrices stay in the caches of the processor, and a plain product starts faster."""


class Matrix:
    """A weight [out, in], and its bias if it has one.

    Attributes:
        plain: where the weight is read to; None once it is packed.
        bias: [out], or None.
    """

    native: Tensor
    """Packed for the native kernels, if it is."""

    def __init__(self, plain: Tensor, bias: Tensor | None = None) -> None:
        self.plain: Tensor | None = plain
        self._transposed: Tensor | None = plain.t()
        self.bias = bias
        self._packed: Tensor | None = None

    def pack(self, kernels: Kernels | None = None, *, is_gated: bool = False) -> None:
        """Pack the weight, which has been read, where that pays.

        Args:
            kernels: those that will multiply by it, if any; nothing else can then.
            is_gated: its second half of outputs is multiplied by the activation of the first.
        """
        assert self.plain is not None
        if kernels is not None:
            self.native = kernels.pack(self.plain, is_gated=is_gated)
            self.plain = self._transposed = None
            return
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
