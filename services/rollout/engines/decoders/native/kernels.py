"""The operators of a decode step that torch leaves apart, as single calls of ``kernels.c``: float32, CPU, one thread.

At a hundred rows of a small model the matrix products are a fifth of what a step in torch's operators takes; the rest
is attention over padded rows, a dozen small operators per layer and what calling each costs.
"""

import ctypes
import functools

import torch
from torch import Tensor

from services.rollout.engines.decoders.native.building import load_library

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_BLOCK = 64
_SIGNATURES = {
    "embed": (*(_POINTER,) * 3, _SIZE, _SIZE),
    "rms_norm": (_POINTER, _POINTER, _FLOAT, _POINTER, _SIZE, _SIZE),
    "silu_mul": (_POINTER, _POINTER, _SIZE, _SIZE),
    "attend": (_POINTER, _POINTER, _FLOAT, *(_POINTER,) * 6, *(_SIZE,) * 5),
    "split_heads": (_POINTER, _POINTER, _FLOAT, *(_POINTER,) * 4, *(_SIZE,) * 5),
    "write_rows": (*(_POINTER,) * 4, *(_SIZE,) * 4),
    "sample": (*(_POINTER,) * 7, _SIZE, _SIZE),
}


class Kernels:
    """Calls into the library; every tensor is contiguous float32 on the CPU unless said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._embed = library.embed
        self._rms_norm, self._silu_mul = library.rms_norm, library.silu_mul
        self._attend, self._sample = library.attend, library.sample
        self._split_heads, self._write_rows = library.split_heads, library.write_rows

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Look token ids [B] int64 up in ``table`` [V, N]: [B, N]."""
        rows, size = token_ids.shape[0], table.shape[1]
        out = table.new_empty((rows, size))
        self._embed(table.data_ptr(), token_ids.data_ptr(), out.data_ptr(), rows, size)
        return out

    def rms_norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalise rows [B, N] by their root mean square, times ``weight`` [N]."""
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        self._rms_norm(hidden.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), rows, size)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute ``silu(gate) * up`` of [B, 2 I]: [B, I]."""
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
        return out

    def attend(
        self,
        qkv: Tensor,
        norms: Tensor | None,
        epsilon: float,
        rotations: Tensor,
        lengths: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
    ) -> Tensor:
        """Append each row's key and value to the cache, and attend over what is there: no padding is read.

        Args:
            qkv: [B, (H + 2 Hkv) * D], as projected.
            norms: [H + Hkv, D], or None where heads are not normalised.
            epsilon: of the norms.
            rotations: [P, 2, D], from ``rotation_table``.
            lengths: [B] int64, tokens cached before.
            keys, values: [rows, Hkv, capacity, D], written at ``lengths``.
            num_heads: H.

        Returns:
            [B, H * D].
        """
        _, kv_heads, capacity, dims = keys.shape
        out = qkv.new_empty((qkv.shape[0], num_heads * dims))
        scores = qkv.new_empty(capacity)
        self._attend(
            *(qkv.data_ptr(), None if norms is None else norms.data_ptr(), epsilon),
            *(rotations.data_ptr(), lengths.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(scores.data_ptr(), out.data_ptr(), qkv.shape[0], num_heads, kv_heads, dims, capacity),
        )
        return out

    def split_heads(
        self, qkv: Tensor, norms: Tensor | None, epsilon: float, rotations: Tensor, num_kv_heads: int, dims: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split whole sequences' projections [N, T, (H + 2 Hkv) * D] into heads, normalised and rotated.

        Returns:
            Queries [N, H, T, D], keys and values [N, Hkv, T, D].
        """
        num, tokens, width = qkv.shape
        heads = width // dims - 2 * num_kv_heads
        parts = [qkv.new_empty((num, each, tokens, dims)) for each in (heads, num_kv_heads, num_kv_heads)]
        self._split_heads(
            *(qkv.data_ptr(), None if norms is None else norms.data_ptr(), epsilon, rotations.data_ptr()),
            *(part.data_ptr() for part in parts),
            *(num, tokens, heads, num_kv_heads, dims),
        )
        return parts[0], parts[1], parts[2]

    def write_rows(self, new: Tensor, cache: Tensor, rows: Tensor, origins: Tensor) -> None:
        """Write the first tokens of a cache [rows, Hkv, capacity, D]: ``rows[i]`` gets ``new[origins[i]]``."""
        _, kv_heads, tokens, dims = new.shape
        pointers = (new.data_ptr(), cache.data_ptr(), rows.data_ptr(), origins.data_ptr())
        self._write_rows(*pointers, rows.shape[0], kv_heads, tokens * dims, cache.shape[2] * dims)

    def sample(self, logits: Tensor, draws: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sample as ``embedded.sampling.sample`` does where no row is greedy, or has top-k or top-p.

        Args:
            logits: [B, V].
            draws: [B] float64.
            temperatures: [B], or None for 1.
        """
        rows, size = logits.shape
        tokens, log_probs = torch.empty(rows, dtype=torch.int64), logits.new_empty(rows)
        scratch, sums = logits.new_empty(size), draws.new_empty(-(-size // _BLOCK))
        self._sample(
            *(logits.data_ptr(), draws.data_ptr(), None if temperatures is None else temperatures.data_ptr()),
            *(scratch.data_ptr(), sums.data_ptr(), tokens.data_ptr(), log_probs.data_ptr(), rows, size),
        )
        return tokens, log_probs


def rotation_table(rotations: Tensor) -> Tensor:
    """Lay rotations [P, D / 2] complex64 out as ``attend`` reads them: cosines and signed sines, [P, 2, D] float32."""
    sines = torch.stack([-rotations.imag, rotations.imag], dim=-1).flatten(1)
    return torch.stack([rotations.real.repeat_interleave(2, dim=1), sines], dim=1).contiguous()


@functools.cache
def _kernels() -> Kernels | None:
    library = load_library()
    return None if library is None else Kernels(library)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels where they are the faster way: on a CPU, in float32, in a process of one compute thread."""
    if device.type != "cpu" or dtype != torch.float32 or torch.get_num_threads() != 1:
        return None
    return _kernels()
