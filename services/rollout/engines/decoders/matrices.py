"""The matrices of a model, multiplied the way that is fastest where they are.

On a CPU a float32 matrix is packed once, when its weights have been read: for the native kernels where these compute,
else, if it is large, for oneDNN. The plain product packs it in every call, which for a few dozen rows takes as long as
the product itself. For the native kernels it is packed from where it is read, so that memory is made for one copy.
"""

import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.native.kernels import Kernels

HAS_ONEDNN: bool = torch._C._has_mkldnn
PACKED_ELEMENTS = 1 << 17
"""Smaller matrices stay in the caches of the processor, and a plain product starts faster."""


class Matrix:
    """A weight [out, in], and its bias if it has one. It is read into what ``open`` returns, then packed, and so again.

    Args:
        shape: (out, in).
        dtype, device: of weight and bias.
        has_bias: whether it has one.
        kernels: those that will multiply by it, if any; nothing else can then.
        is_gated: its second half of outputs is multiplied by the activation of the first.
        shared: the weight, where it is another's too, and is read by that one.

    Attributes:
        plain: the weight; None once it is packed, or where native kernels compute.
        bias: [out], or None.
    """

    native: Tensor
    """Packed for the native kernels, if it is; it stays where it is."""
    _places: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_bias: bool = False,
        kernels: Kernels | None = None,
        is_gated: bool = False,
        shared: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self._kernels, self._is_gated, self._shared = kernels, is_gated, shared
        self._sources: list[Tensor] = []
        self.plain: Tensor | None = None
        self._transposed: Tensor | None = None
        self._packed: Tensor | None = None
        self.bias = torch.empty(shape[0], dtype=dtype, device=device) if has_bias else None

    def open(self) -> Tensor:
        """Begin to read the weight, for the first time or anew.

        Returns:
            What is to be filled by ``placed``: [out, in], or [out] int64 for the native kernels.
        """
        if self._kernels is not None:
            self._places = torch.empty(self.shape[0], dtype=torch.int64)
            if self._shared is not None:
                self._places.copy_(self.placed(self._shared))
        elif self.plain is None:
            self._packed = None
            whole = self._shared
            if whole is None:
                whole = torch.empty(self.shape, dtype=self._dtype, device=self._device)
            self.plain, self._transposed, self._places = whole, whole.t(), whole
        return self._places

    def close(self) -> None:
        """Let go of what was read and is not packed."""
        self._sources.clear()

    def placed(self, source: Tensor) -> Tensor:
        """Return what rows [n, in] are in ``open``: themselves, or where they lie, which they do until ``pack``."""
        if self._kernels is None:
            return source
        source = source.to(self._dtype).contiguous()
        self._sources.append(source)
        return source.data_ptr() + torch.arange(source.shape[0]) * (source.shape[1] * source.itemsize)

    def pack(self) -> None:
        """Pack the weight, which has been read, where that pays."""
        if self._kernels is not None:
            packed = (self._places, self.shape[1])
            self.native = self._kernels.pack(*packed, is_gated=self._is_gated, into=getattr(self, "native", None))
            self._sources.clear()
            return
        weight = self._places
        is_small = weight.numel() < PACKED_ELEMENTS
        if is_small or weight.device.type != "cpu" or weight.dtype != torch.float32 or not HAS_ONEDNN:
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.plain = self._transposed = None
        self._places = weight.new_empty(0)  # it is freed

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply rows [B, in]: [B, out]; written to ``out``, if that is given."""
        if out is not None:
            if self._transposed is None or self.bias is not None:
                return out.copy_(self(hidden))
            return torch.mm(hidden, self._transposed, out=out)
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
