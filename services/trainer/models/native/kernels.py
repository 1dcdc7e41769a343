"""Calls of ``training_kernels.c``, on the CPU and as many threads as torch has. Every tensor is contiguous.

Rows are float32 or bfloat16, all of a call alike; statistics of logits, and factors of norms, are float32.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flotilla.shared.models.native_code import load_library

SOURCE = Path(__file__).with_name("training_kernels.c")
_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_OF_ROWS = {
    "rms_norm": (_POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _SIZE, _SIZE, _INT),
    "rms_norm_backward": (*(_POINTER,) * 6, _SIZE, _SIZE, _SIZE, _INT),
    "silu_mul": (*(_POINTER,) * 3, _SIZE, _INT),
    "silu_mul_backward": (*(_POINTER,) * 5, _SIZE, _INT),
    "rotate_halves": (*(_POINTER,) * 3, _INT, _POINTER, *(_SIZE,) * 3, _INT),
    "take_rows": (*(_POINTER,) * 3, _SIZE, _SIZE, _INT),
    "sum_rows": (*(_POINTER,) * 4, _SIZE, _SIZE, _INT),
}
_OF_LOGITS = {
    "token_statistics": (_POINTER, _POINTER, _FLOAT, *(_POINTER,) * 4, _SIZE, _SIZE, _INT),
    "statistics_backward": (_POINTER, _POINTER, _FLOAT, *(_POINTER,) * 4, _SIZE, _SIZE, _INT),
}
_SUFFIXES = {torch.float32: "", torch.bfloat16: "_bfloat16"}
_PARTS = 16
"""Sums of a weight's gradient are made over that many parts of the rows, however many threads there are: so they have
the same bits with any number of them."""


class Kernels:
    """Calls into the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _OF_LOGITS.items():
            self._declared(name, arguments)
        self._of_rows = {
            (name, dtype): self._declared(name + suffix, arguments)
            for name, arguments in _OF_ROWS.items()
            for dtype, suffix in _SUFFIXES.items()
        }

    def _declared(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes, function.restype = arguments, None
        declared: Callable[..., None] = function
        return declared

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Normalise rows [..., N] by their root mean square, times ``weight`` [N]; also each row's factor [...]."""
        out, factors = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        self._of_rows["rms_norm", x.dtype](
            *(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), factors.data_ptr()),
            *(factors.numel(), x.shape[-1], torch.get_num_threads()),
        )
        return out, factors

    def rms_norm_backward(self, of_out: Tensor, x: Tensor, weight: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by x and by the weight."""
        of_x, of_weight = torch.empty_like(x), factors.new_empty((_PARTS, x.shape[-1]))
        self._of_rows["rms_norm_backward", x.dtype](
            *(of_out.data_ptr(), x.data_ptr(), weight.data_ptr(), factors.data_ptr()),
            *(of_x.data_ptr(), of_weight.data_ptr(), factors.numel(), x.shape[-1], _PARTS, torch.get_num_threads()),
        )
        return of_x, of_weight.sum(0).to(weight.dtype)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute ``silu(gate) * up``."""
        out = torch.empty_like(gate)
        pointers = (each.data_ptr() for each in (gate, up, out))
        self._of_rows["silu_mul", gate.dtype](*pointers, gate.numel(), torch.get_num_threads())
        return out

    def silu_mul_backward(self, of_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by gate and up."""
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        self._of_rows["silu_mul_backward", gate.dtype](
            *(of_out.data_ptr(), gate.data_ptr(), up.data_ptr(), of_gate.data_ptr(), of_up.data_ptr()),
            *(gate.numel(), torch.get_num_threads()),
        )
        return of_gate, of_up

    def rotate_halves(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_gradient: bool) -> Tensor:
        """Turn heads [B, T, H, D] by angles of [B, T, D]; or make the gradient by the heads of that by the result."""
        out = torch.empty_like(x)
        self._of_rows["rotate_halves", x.dtype](
            *(x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), is_gradient, out.data_ptr()),
            *(x.shape[0] * x.shape[1], x.shape[2], x.shape[3], torch.get_num_threads()),
        )
        return out

    def take_rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Gather rows of x [.., N] by index [R] int64: [R, N]; 0 where the index is -1."""
        out = x.new_empty((index.shape[0], x.shape[1]))
        pointers = (each.data_ptr() for each in (x, index, out))
        self._of_rows["take_rows", x.dtype](*pointers, *out.shape, torch.get_num_threads())
        return out

    def sum_rows(self, x: Tensor, sources: Tensor, starts: Tensor) -> Tensor:
        """Add up rows of x [.., N]: row r of the result those that ``sources[starts[r] : starts[r + 1]]`` names."""
        out = x.new_empty((starts.shape[0] - 1, x.shape[1]))
        pointers = (each.data_ptr() for each in (x, sources, starts, out))
        self._of_rows["sum_rows", x.dtype](*pointers, *out.shape, torch.get_num_threads())
        return out

    def token_statistics(
        self, logits: Tensor, labels: Tensor, temperature: float, outputs: tuple[Tensor, Tensor, Tensor, Tensor | None]
    ) -> None:
        """Write what ``TokenStatistics`` has of logits [T, V], not yet divided by the temperature.

        Args:
            outputs: [T] each: log-probability of the label, logarithm of the normaliser, entropy, sum of p^2 or None.
        """
        pointers = [None if each is None else each.data_ptr() for each in outputs]
        self._library.token_statistics(
            *(logits.data_ptr(), labels.data_ptr(), temperature, *pointers, *logits.shape, torch.get_num_threads())
        )

    def statistics_backward(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        normalisers: Tensor,
        entropies: Tensor,
        gradients: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Turn logits [T, V] into the gradient by them, in place.

        Args:
            gradients: by log-probability and by entropy, [T] each.
        """
        pointers = [None if each is None else each.data_ptr() for each in gradients]
        self._library.statistics_backward(
            *(logits.data_ptr(), labels.data_ptr(), temperature, normalisers.data_ptr(), entropies.data_ptr()),
            *(*pointers, *logits.shape, torch.get_num_threads()),
        )


@functools.cache
def _kernels() -> Kernels | None:
    library = load_library(SOURCE)
    return None if library is None else Kernels(library)


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Return the kernels where they compute with such tensors: whole, on the CPU, of one type; none is traced."""
    if torch.compiler.is_compiling() or len({each.dtype for each in tensors}) > 1:
        return None
    for each in tensors:
        if each.dtype not in _SUFFIXES or each.device.type != "cpu" or isinstance(each, DTensor):
            return None
    return _kernels()
