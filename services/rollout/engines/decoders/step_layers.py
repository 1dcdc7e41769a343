"""What a decode step of pages computes beside attention and matrix products, as few kernels as there can be.

A step of a small model is bounded by how many kernels it has, not by what they compute: on an H200 a layer of 0.6
billion parameters took 60 us of 25 kernels, of which its weights need 10 us. With Triton the normalisation and rotation
of queries and keys and the writing of keys and values are one kernel, and so is the gated activation.
"""

import logging
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.fused_weights import LayerWeights
from flotilla.services.rollout.engines.decoders.torch_layers import TorchLayers

log = logging.getLogger(__name__)


class StepLayers(Protocol):
    """The parts of a layer for one token of each row."""

    def project(
        self, hidden: Tensor, layer: LayerWeights, positions: Tensor, slots: Tensor, pools: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Compute queries, and write keys and values to their places.

        Args:
            hidden: [B, E].
            layer: the weights.
            positions: [B] int64, of the tokens in their rows.
            slots: [B] int64, where keys and values go, counted in tokens from the pools' start.
            pools: of keys and of values, [pages, page tokens, Hkv, D] each.

        Returns:
            [B, H, D], rotated.
        """

    def feed(self, hidden: Tensor, mixed: Tensor, layer: LayerWeights) -> None:
        """Add the outputs of attention [B, H * D] and of the feed-forward network to ``hidden`` [B, E], in place."""


class TorchStep:
    """``StepLayers`` by torch's operators.

    Args:
        sizes: of the model.
        rotations: [P, D / 2] complex64.
        dtype: of activations.
    """

    def __init__(self, sizes: Architecture, rotations: Tensor, dtype: torch.dtype) -> None:
        self._sizes, self._rotations = sizes, rotations
        self._layers = TorchLayers(sizes, dtype)
        self.feed = self._layers.feed

    def project(
        self, hidden: Tensor, layer: LayerWeights, positions: Tensor, slots: Tensor, pools: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Compute queries, and write keys and values; see ``StepLayers.project``."""
        rows = hidden.shape[0]
        rotation = self._rotations[positions].view(rows, 1, 1, -1)
        queries_keys, values = self._layers.project(hidden, layer, rotation, (rows, 1))
        queries, keys = queries_keys[:, 0].tensor_split((self._sizes.num_heads,), dim=1)
        for pool, new in zip(pools, (keys, values[:, 0]), strict=True):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, new)
        return queries


class TritonStep:
    """``StepLayers`` by two Triton kernels, for a GPU; the arguments are those of ``TorchStep``.

    Raises:
        ImportError: Triton is not installed.
    """

    def __init__(self, sizes: Architecture, rotations: Tensor, dtype: torch.dtype) -> None:
        from flotilla.services.rollout.engines.decoders import triton_kernels

        self._sizes, self._kernels = sizes, triton_kernels
        self._rotations = torch.view_as_real(rotations)
        self._norm = TorchLayers(sizes, dtype).norm

    def project(
        self, hidden: Tensor, layer: LayerWeights, positions: Tensor, slots: Tensor, pools: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Compute queries, and write keys and values; see ``StepLayers.project``."""
        fused = layer.qkv(self._norm(hidden, layer.input_norm))
        queries = fused.new_empty(hidden.shape[0], self._sizes.num_heads, self._sizes.head_dim)
        places = (self._rotations, positions, slots)
        self._kernels.rotate_and_keep(fused, layer.qk_norm, self._sizes.norm_epsilon, places, queries, pools)
        return queries

    def feed(self, hidden: Tensor, mixed: Tensor, layer: LayerWeights) -> None:
        """Add the outputs of attention and of the feed-forward network; see ``StepLayers.feed``."""
        layer.output.add_to(hidden, mixed)
        layer.down.add_to(hidden, self._kernels.gated(layer.gate_up(self._norm(hidden, layer.post_norm))))


PROBE_ROWS = 3
PROBE_TOLERANCE = 0.02
"""Of the largest value, in 16 bits."""


def step_layers(sizes: Architecture, rotations: Tensor, dtype: torch.dtype, layer: LayerWeights) -> StepLayers:
    """Choose what is fastest and works on the device of ``rotations``: found out by trying ``layer``."""
    plain = TorchStep(sizes, rotations, dtype)
    if rotations.device.type != "cuda" or find_spec("triton") is None:
        return plain
    try:
        fast = TritonStep(sizes, rotations, dtype)
        is_right = agree(fast, plain, sizes, layer)
    except Exception as error:  # No compiler for its launchers, a folder that cannot be written, an unknown GPU.
        log.warning("Triton's kernels do not work on this device", extra={"error": repr(error)})
        return plain
    if not is_right:
        log.warning("Triton's kernels give other values than torch's operators")
    return fast if is_right else plain


@torch.inference_mode()
def agree(one: StepLayers, other: StepLayers, sizes: Architecture, layer: LayerWeights) -> bool:
    """Whether two compute the same queries, keys, values and outputs of a layer, to rounding."""
    like = layer.input_norm
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((PROBE_ROWS, sizes.hidden_size), generator=generator).to(like)
    positions = torch.arange(PROBE_ROWS, device=like.device)
    found: list[tuple[Tensor, ...]] = []
    for each in (one, other):
        keys, values = like.new_zeros((2, 1, PROBE_ROWS, sizes.num_kv_heads, sizes.head_dim))
        queries = each.project(hidden, layer, positions, positions.flip(0), (keys, values))
        fed = hidden.clone()
        each.feed(fed, queries.reshape(PROBE_ROWS, -1), layer)
        found.append((queries, keys, values, fed))
    return all(
        float((first - second).abs().max()) <= PROBE_TOLERANCE * float(second.abs().max())
        for first, second in zip(*found, strict=True)
    )
