"""The layers of the Llama family by torch's operators, but for attention, which depends on where keys and values are.

Projections are fused, rotary embedding is one complex product, and residuals are accumulated by the matrix product
itself: a step of decoding does little arithmetic, so the number of kernels and of copies decides.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flotilla.services.rollout.engines.decoders.architecture import Architecture
from flotilla.services.rollout.engines.decoders.fused_weights import FusedWeights, LayerWeights


def rotations(sizes: Architecture, num_positions: int) -> Tensor:
    """Tabulate the rotations: [P, D / 2] complex64, ``exp(i p theta^(-2 j / D))``."""
    exponents = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
    frequencies = 1.0 / (sizes.rope_theta**exponents)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.complex(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True)
class TorchLayers:
    """Computes what is between the attentions.

    Attributes:
        sizes: of the model.
        dtype: of activations.
    """

    sizes: Architecture
    dtype: torch.dtype

    def project(
        self, hidden: Tensor, layer: LayerWeights, rotation: Tensor, batch: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Make rotated queries and keys [N, T, H + Hkv, D], and values [N, T, Hkv, D].

        Args:
            hidden: [N * T, E].
            layer: the weights.
            rotation: complex, what broadcasts with [N, T, H + Hkv, D / 2].
            batch: (N, T).
        """
        sizes = self.sizes
        num_rotated = sizes.num_heads + sizes.num_kv_heads
        fused = layer.qkv(self.norm(hidden, layer.input_norm)).view(*batch, -1, sizes.head_dim)
        rotated, values = fused[:, :, :num_rotated], fused[:, :, num_rotated:]
        if layer.qk_norm is not None:
            rotated = functional.rms_norm(rotated, rotated.shape[-1:], None, sizes.norm_epsilon).mul_(layer.qk_norm)
        pairs = rotated.float().view(*batch, num_rotated, -1, 2)
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * rotation).view(*batch, num_rotated, -1)
        return rotated.to(self.dtype), values

    def feed(self, hidden: Tensor, mixed: Tensor, layer: LayerWeights) -> None:
        """Add the outputs of attention [B, H * D] and of the feed-forward network to ``hidden`` [B, E], in place."""
        layer.output.add_to(hidden, mixed)
        gate, up = layer.gate_up(self.norm(hidden, layer.post_norm)).chunk(2, dim=-1)
        layer.down.add_to(hidden, functional.silu(gate).mul_(up))

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Normalise rows."""
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self.sizes.norm_epsilon)

    def logits(self, hidden: Tensor, weights: FusedWeights, out: Tensor | None = None) -> Tensor:
        """Compute [B, V] of rows [B, E]; written to ``out``, if that is given."""
        return weights.head(self.norm(hidden, weights.final_norm), out)
