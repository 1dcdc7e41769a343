"""What layers compute beside their matrix products, in one pass over the data instead of one for each of its operators.

On a CPU such passes cost as much as memory takes to be read and written: torch's operators for a norm go through the
hidden states seven times forward and about as often backward, and keep three copies of them.

Nothing is replaced by name alone: a module that computes something else, on a probe, stays as it is. One whose
tensors are not whole tensors of the CPU, in float32 or bfloat16, when it is called computes as it did. In bfloat16 a
result is rounded once, where transformers' layers round what is between their operators, too.
"""

import copy
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from flotilla.services.trainer.models.native.kernels import Kernels, kernels_for

PROBE_ROWS = 4
ROTATION = "apply_rotary_pos_emb"
PROBE_TOLERANCE = 1e-5


class _RmsNorm(torch.autograd.Function):
    """``x / rms(x) * weight`` over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
        x = x.contiguous()
        out, factors = kernels.rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, factors)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factors = ctx.saved_tensors
        of_x, of_weight = ctx.kernels.rms_norm_backward(gradients[0].contiguous(), x, weight, factors)
        return of_x, of_weight if ctx.needs_input_grad[1] else None, None, None


class _SiluMul(torch.autograd.Function):
    """``silu(gate) * up``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *ctx.kernels.silu_mul_backward(gradients[0].contiguous(), gate, up), None


class _Rotate(torch.autograd.Function):
    """Turn heads [B, H, T, D] by cosines and sines [B, T, D]."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosines: Tensor, sines: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.kernels = kernels
        # As projections have them: the heads of a position beside each other.
        return kernels.rotate_halves(heads.transpose(1, 2).contiguous(), cosines, sines, is_gradient=False).transpose(
            1, 2
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_out = gradients[0].transpose(1, 2).contiguous()
        found: Tensor = ctx.kernels.rotate_halves(of_out, *ctx.saved_tensors, is_gradient=True)
        return found.transpose(1, 2), None, None, None


class _FusedNorm(nn.Module):
    """Goes before a norm's own class."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        kernels = kernels_for(hidden_states, self.weight)
        found: Tensor
        if kernels is None:
            found = super().forward(hidden_states)
        else:
            found = _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon, kernels)  # type: ignore[no-untyped-call]
        return found


class _FusedGate(nn.Module):
    """Goes before the class of a gated layer."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        kernels = kernels_for(gate, up)
        hidden = self.act_fn(gate) * up if kernels is None else _SiluMul.apply(gate, up, kernels)  # type: ignore[no-untyped-call]
        found: Tensor = self.down_proj(hidden)
        return found


@torch.no_grad()
def fuse_layers(model: nn.Module) -> int:
    """Let a model's norms and gated layers compute in single passes where they can; return how many do.

    Their classes change, not their functions: a copy of the model computes with its own weights.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        _fuse_rotation(sys.modules[name])
    return sum(_fuse(module) for module in list(model.modules()))


def _fuse(module: nn.Module) -> bool:
    mixin, weight = _FusedNorm, getattr(module, "weight", None)
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        mixin, weight = _FusedGate, module.gate_proj.weight  # type: ignore[assignment,union-attr]
    elif not (type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")):
        return False
    own = type(module)
    if issubclass(own, mixin) or not isinstance(weight, Tensor):
        return False
    probed = module
    if weight.is_meta:
        probed = _with_values(module)
    elif weight.dtype == torch.bfloat16:
        probed = copy.deepcopy(module).float()
    if kernels_for(*probed.parameters()) is None:
        return False
    rows = torch.randn(PROBE_ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(weight.shape[-1]))
    expected = probed(rows)
    probed.__class__ = _with(mixin, own)
    if torch.allclose(probed(rows), expected, PROBE_TOLERANCE, PROBE_TOLERANCE):
        module.__class__ = probed.__class__
        return True
    probed.__class__ = own
    return False


def _with_values(module: nn.Module) -> nn.Module:
    """Copy a module whose weights are read later, with others in their place."""
    made = copy.deepcopy(module).to_empty(device="cpu").float()
    for parameter in made.parameters():
        # Irregular, and quick to make for the largest layers.
        values = torch.arange(parameter.numel(), dtype=torch.float32).mul_(0.7).sin_().view(parameter.shape)
        parameter.copy_(values / parameter.shape[-1] ** 0.5)
    return made


_MADE: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _with(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    if (mixin, own) not in _MADE:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        _MADE[mixin, own] = type(own.__name__, (mixin, own), names)
    return _MADE[mixin, own]


def _fuse_rotation(namespace: ModuleType) -> None:
    """Turn heads in single passes in all models of a transformers module: it is a function there, no layer."""
    plain = getattr(namespace, ROTATION, None)
    if plain is None or getattr(plain, "is_fused", False) or kernels_for() is None:
        return

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        kernels = kernels_for(q, k, cos, sin)
        is_usual = not (more or named) and q.dim() == 4 and q.shape[-1] == cos.shape[-1] and cos.dim() == 3
        if kernels is None or not is_usual:
            both: tuple[Tensor, Tensor] = plain(q, k, cos, sin, *more, **named)
            return both
        angles = [each.expand(q.shape[0], -1, -1).contiguous() for each in (cos, sin)]
        turned: list[Tensor] = [_Rotate.apply(each, *angles, kernels) for each in (q, k)]  # type: ignore[no-untyped-call]
        return turned[0], turned[1]

    q, k, cos, sin = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for shape in ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 4), (2, 3, 4))
    )
    given = q, k, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    try:
        expected = plain(*given)
    except (RuntimeError, TypeError, ValueError):
        return  # it takes something else
    if all(
        torch.allclose(*pair, PROBE_TOLERANCE, PROBE_TOLERANCE) for pair in zip(rotate(*given), expected, strict=True)
    ):
        rotate.__wrapped__ = plain  # type: ignore[attr-defined]
        rotate.is_fused = True  # type: ignore[attr-defined]
        setattr(namespace, ROTATION, rotate)
