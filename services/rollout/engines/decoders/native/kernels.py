"""Calls into ``kernels.c``: on a CPU, on as many threads as torch has; the bits do not depend on their number.

All is computed in float32. Matrices and the embedding may be bfloat16: half the memory, and half of what is read for
each token, for the same results as by the same numbers in float32.

At a hundred rows of a small model the matrix products are a fifth of what a step in torch's operators takes; the rest
is attention over padded rows, a dozen small operators per layer and what calling each costs. So a forward pass is one
call, whose products end in what follows them (residual, activation) while their sums are in registers.
"""

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flotilla.shared.models.native_code import load_library
from flotilla.shared.weights.image.digests import WORD_BYTES, Words, multipliers

SOURCE = Path(__file__).with_name("kernels.c")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_SUMMED = 64
MOST_THREADS = 16
"""Each has scores of its own to work with, and more would wait for each other."""
_SIGNATURES = {
    "pack": (_POINTER, _POINTER, *(_SIZE,) * 4),
    "row_sums": (_POINTER, _POINTER, _POINTER, *(_SIZE,) * 3),
    "packed_size": (_SIZE,) * 3,
    "work_size": (_POINTER, *(_SIZE,) * 3),
    "is_worth_threads": (_SIZE,) * 3,
    "forward": (*(_POINTER,) * 3, _SIZE, *(_POINTER,) * 4, *(_SIZE,) * 3, *(_POINTER,) * 3),
    "copy_rows": (*(_POINTER,) * 3, *(_SIZE,) * 4),
    "sample": (*(_POINTER,) * 7, _SIZE, _SIZE),
}
_COUNTING = {"packed_size", "work_size", "is_worth_threads"}


class LayerPointers(ctypes.Structure):
    """Where the weights of a layer are; null where it has none."""

    _fields_ = [
        (name, _POINTER)
        for name in ("input_norm", "qkv_bias", "head_norms", "post_norm", "qkv", "output", "gate_up", "down")
    ]


class ModelPointers(ctypes.Structure):
    """Where the weights of a model are, and its sizes."""

    _fields_ = [
        *((name, _POINTER) for name in ("layers", "embedding", "head", "final_norm", "rotations")),
        ("epsilon", ctypes.c_double),
        *(
            (name, _SIZE)
            for name in ("num_layers", "hidden", "heads", "kv_heads", "dims", "intermediate", "vocab", "is_half")
        ),
    ]


class AdapterPointers(ctypes.Structure):
    """Where A and B of a weight are, and what of the outputs they add to; rank 0 where there are none."""

    _fields_ = [(name, _POINTER) for name in ("low", "high")] + [(name, _SIZE) for name in ("rank", "first", "outputs")]


class AdaptersPointers(ctypes.Structure):
    """Where the adapters of the cache's rows are, and what is worked with."""

    _fields_ = [(name, _POINTER) for name in ("of_row", "of", "plus", "gates")]


class Kernels:
    """The functions of the library; every tensor is contiguous float32 on the CPU unless said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _SIZE if name in _COUNTING else None
        self._pack, self._packed_size, self._row_sums = library.pack, library.packed_size, library.row_sums
        self._forward, self._work_size = library.forward, library.work_size
        self._is_worth_threads = library.is_worth_threads
        self._copy_rows, self._sample = library.copy_rows, library.sample

    def pack(
        self,
        rows: Tensor,
        depth: int,
        dtype: torch.dtype = torch.float32,
        *,
        is_gated: bool = False,
        into: Tensor | None = None,
    ) -> Tensor:
        """Lay a weight [out, in] out as products read it, on one thread.

        Args:
            rows: [out] int64, where each of its rows lies in memory.
            depth: elements of a row.
            dtype: of its elements, float32 or bfloat16.
            is_gated: whether the halves of its outputs are gates, and gated.
            into: what an earlier weight of this shape was packed into, which is written over; None: new memory.
        """
        outputs = rows.shape[0]
        packed = torch.empty(self._packed_size(outputs, depth, is_gated), dtype=dtype) if into is None else into
        self._pack(rows.data_ptr(), packed.data_ptr(), outputs, depth, is_gated, dtype == torch.bfloat16)
        return packed

    def row_sums(self, packed: Tensor, shape: tuple[int, int], *, is_gated: bool) -> Words:
        """Sum the rows of a packed weight [out, in]: [out]; see ``digests.row_sums``."""
        outputs, depth = shape
        width = self._packed_size(1, 1, False)
        # A panel is [depth, width]: of each row one column, of a gated weight half of them of its second half.
        places = multipliers(0, -(-depth * packed.itemsize // WORD_BYTES))
        sums, is_half = np.empty(packed.numel() // depth, np.uint64), packed.dtype == torch.bfloat16
        self._row_sums(packed.data_ptr(), places.ctypes.data, sums.ctypes.data, sums.size // width, depth, is_half)
        if not is_gated:
            return sums[:outputs]
        halves = sums.reshape(-1, 2, width // 2).transpose(1, 0, 2).reshape(2, -1)
        found: Words = halves[:, : outputs // 2].reshape(-1)
        return found

    def is_worth_threads(self, rows: int, depth: int, outputs: int) -> bool:
        """Whether a product of rows [rows, depth] with a weight [outputs, depth] is made by several threads."""
        return bool(self._is_worth_threads(rows, depth, outputs))

    def work_size(self, model: ModelPointers, capacity: int, at_once: int) -> int:
        """Count the floats that ``forward`` works with."""
        size: int = self._work_size(ctypes.byref(model), capacity, at_once, MOST_THREADS)
        return size

    def forward(
        self,
        model: ModelPointers,
        caches: tuple[object, object, int],
        tokens: tuple[Tensor, Tensor, Tensor, Tensor | None],
        at_once: int,
        work: Tensor,
        logits: Tensor,
        adapters: AdaptersPointers | None = None,
    ) -> None:
        """Append tokens to rows of the cache, and compute the logits behind them.

        Args:
            model: pointers to its weights.
            caches: arrays of pointers to each layer's keys and values [rows, Hkv, capacity, D], and the capacity.
            tokens: their ids, rows and places, and which of them logits are wanted of (None: all); each [N] int64,
                those of a row in order.
            at_once: tokens that pass through the model together.
            work: ``work_size`` floats.
            logits: [wanted, V], written.
            adapters: of rows of the cache; None: no row has any.
        """
        keys, values, capacity = caches
        ids, rows, places, wanted = tokens
        self._forward(
            *(ctypes.byref(model), keys, values, capacity, ids.data_ptr(), rows.data_ptr(), places.data_ptr()),
            None if wanted is None else wanted.data_ptr(),
            *(ids.shape[0], at_once, min(torch.get_num_threads(), MOST_THREADS), work.data_ptr(), logits.data_ptr()),
            None if adapters is None else ctypes.byref(adapters),
        )

    def copy_rows(self, cache: Tensor, sources: Tensor, targets: Tensor, num_tokens: int) -> None:
        """Copy the first tokens of rows of a cache [rows, Hkv, capacity, D] to other rows [N] int64."""
        _, kv_heads, capacity, dims = cache.shape
        pointers = (cache.data_ptr(), sources.data_ptr(), targets.data_ptr())
        self._copy_rows(*pointers, sources.shape[0], kv_heads, num_tokens * dims, capacity * dims)

    def sample(self, logits: Tensor, draws: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sample as ``embedded.sampling.sample`` does where no row is greedy, or has top-k or top-p.

        Args:
            logits: [B, V].
            draws: [B] float64.
            temperatures: [B], or None for 1.
        """
        rows, size = logits.shape
        tokens, log_probs = torch.empty(rows, dtype=torch.int64), logits.new_empty(rows)
        scratch, sums = logits.new_empty(size), draws.new_empty(-(-size // _SUMMED))
        self._sample(
            *(logits.data_ptr(), draws.data_ptr(), None if temperatures is None else temperatures.data_ptr()),
            *(scratch.data_ptr(), sums.data_ptr(), tokens.data_ptr(), log_probs.data_ptr(), rows, size),
        )
        return tokens, log_probs


@functools.cache
def _kernels() -> Kernels | None:
    library = load_library(SOURCE)
    return None if library is None else Kernels(library)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels where they can be used: on a CPU, for weights of this type, with a compiler."""
    if device.type != "cpu" or dtype not in {torch.float32, torch.bfloat16}:
        return None
    return _kernels()
