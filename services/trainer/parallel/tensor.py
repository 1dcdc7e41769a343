"""Tensor and expert parallelism by the plans that transformers has for its models.

Tensor parallel: several ranks compute each layer of the same sequences together, each some of its heads and columns.
Expert parallel: each rank has some of a layer's experts, whole; tokens travel to them and back.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import (
    TensorParallelLayer,
    apply_tensor_parallelism,
    get_kv_heads_per_rank,
)

from flotilla.services.trainer.parallel.ranks import EXPERT, SHARD, TENSOR, Ranks
from flotilla.shared.errors import ModelError

ADDED_UP = "replicated_with_grad_allreduce"
OWN_ADDED_UP = "flotilla_replicated"
EXPERTS = "ep_dispatch_experts"
COLUMNS, ROWS = "colwise", "rowwise"
OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "qwen3_vl_text": {
        **{f"layers.*.self_attn.{name}_proj": COLUMNS for name in "qkv"},
        **{f"layers.*.mlp.{name}_proj": COLUMNS for name in ("gate", "up")},
        "layers.*.self_attn.o_proj": ROWS,
        "layers.*.mlp.down_proj": ROWS,
    },
}
"""How ranks divide the layers of kinds that transformers has no plan for but that of their head."""
_MARK = "is_divided_by_expert"


def is_divided_by_expert(module: nn.Module) -> bool:
    """Whether each rank has some of this module's experts."""
    return getattr(module, _MARK, False)


def divide_layers(module: nn.Module, ranks: Ranks) -> None:
    """Divide layers and experts as the job says; before FSDP, and before optimisers are made.

    Args:
        module: a model of transformers, or its body, the same weights on every rank.
        ranks: the job.

    Raises:
        ModelError: transformers has no plan for it, or its sizes cannot be divided.
    """
    tensor = ranks.tensor_size
    expert = 1 if ranks.expert_mesh is None else ranks.expert_mesh[EXPERT].size()
    if ranks.mesh is None or tensor * expert == 1:
        return
    model: Any = module
    if tensor > 1:
        _plan_layers(model)
    for size, key, plan in (
        (tensor, "parallelism.tensor_parallel", getattr(module, "tp_plan", None)),
        (expert, "parallelism.expert_parallel", getattr(module, "ep_plan", None)),
    ):
        if size > 1 and not plan:
            raise ModelError(f"{key} does not work with {type(module).__name__}: transformers has no plan for it")
    ALL_PARALLEL_STYLES.register(OWN_ADDED_UP, _Replicated())
    wanted = DistributedConfig(tp_size=tensor, ep_size=expert, fsdp_size=ranks.mesh[SHARD].size())
    by_layer, by_expert, _ = model._resolve_parallel_plans(wanted)
    _check_heads(model, by_layer, tensor)
    try:
        if tensor > 1:
            apply_tensor_parallelism(model, ranks.mesh[TENSOR], _kept(module, by_layer))
        if ranks.expert_mesh is not None:
            apply_expert_parallelism(
                model, ranks.expert_mesh[EXPERT], ranks.mesh[TENSOR], by_expert, ep_implementation="all_to_all"
            )
            for name, style in by_expert.items():
                if style == EXPERTS:
                    setattr(module.get_submodule(name), _MARK, True)
    except ValueError as error:
        raise ModelError(f"{type(module).__name__} cannot be divided among the ranks: {error}") from error
    _check_sizes(module)


def _plan_layers(model: Any) -> None:
    """Apply our own plan to a model for whose layers transformers has none."""
    for name, body in model.named_modules():
        own = OWN_PLANS.get(getattr(getattr(body, "config", None), "model_type", ""))
        if own is not None and hasattr(body, "layers"):
            prefix = f"{name}." if name else ""
            model.tp_plan = {f"{prefix}{layer}": style for layer, style in own.items()} | model.tp_plan


def _kept(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """Leave embedding and head whole: both are used otherwise than as layers here, and may be one tensor.

    What norms the heads of each rank alone is added where the plan does not have it.
    """
    whole = {id(each) for each in (module.get_input_embeddings(), module.get_output_embeddings()) if each is not None}
    modules = dict(module.named_modules())
    names = {name for name, each in modules.items() if id(each) in whole}
    divided = [name for name, style in plan.items() if style == COLUMNS and name.endswith(("q_proj", "k_proj"))]
    norms = {f"{name.removesuffix('_proj')}_norm": ADDED_UP for name in divided}
    return {
        name: OWN_ADDED_UP if style == ADDED_UP else style
        for name, style in ({name: norms[name] for name in norms if name in modules} | plan).items()
        if name not in names and name.rpartition(".")[0] not in names
    }


def _check_heads(model: Any, plan: dict[str, str], tensor: int) -> None:
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if get_kv_heads_per_rank(plan, heads, tensor) is None:
        raise ModelError(
            f"parallelism.tensor_parallel {tensor} does not divide the model's {heads} heads of keys: choose a divisor"
        )


def _check_sizes(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for axis, placement in enumerate(parameter.placements):
            size = parameter.device_mesh.size(axis)
            if not isinstance(placement, Replicate) and parameter.shape[placement.dim] % size:  # type: ignore[attr-defined]
                raise ModelError(
                    f"{size} ranks cannot divide {name} of shape {tuple(parameter.shape)}: choose a smaller "
                    "parallelism.tensor_parallel"
                )


class _Replicated(TensorParallelLayer):
    """Replicated parameters that each rank uses for its own heads: their gradients are added up.

    transformers' own style adds up what has accumulated over several backward passes, each time again.
    """

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        original, group = module.forward, mesh.get_group()

        def forward(*arguments: Any, **options: Any) -> Any:
            own = dict(module._parameters)
            try:
                for name, parameter in own.items():
                    if parameter is not None and torch.is_grad_enabled():
                        module._parameters[name] = _AddedUp.apply(parameter, group)  # type: ignore[no-untyped-call]
                return original(*arguments, **options)
            finally:
                module._parameters.update(own)

        module.forward = forward  # type: ignore[method-assign]
        return module


class _AddedUp(torch.autograd.Function):
    """Nothing forward; gradients are added up over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        added = gradient.contiguous().clone()
        dist.all_reduce(added, group=ctx.group)
        return added, None
