"""FSDP2: each rank keeps a part of every weight, and gathers a layer while it computes it.

What tensor and expert parallelism divided before is divided further here, and gathered as far as that.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from flotilla.services.trainer.parallel.layers import layers_of
from flotilla.services.trainer.parallel.ranks import EXPERT_SHARD, REPLICATE, SHARD, Ranks
from flotilla.services.trainer.parallel.tensor import is_divided_by_expert
from flotilla.shared.config.sections.parallelism import MixedPrecisionConfig
from flotilla.shared.weights.image.checkpoint_names import keep_names


def precision_of(config: MixedPrecisionConfig | None) -> MixedPrecisionPolicy | None:
    """Make FSDP's policy of a spec's section."""
    if config is None:
        return None
    return MixedPrecisionPolicy(param_dtype=getattr(torch, config.compute), reduce_dtype=getattr(torch, config.reduce))


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Shard a module's layers one by one, and the rest of it as one unit; optimisers are made afterwards.

    Args:
        module: the same weights on every rank, or none yet: parameters on ``meta``.
        ranks: more than one.
    """
    assert ranks.mesh is not None
    if ranks.mesh[REPLICATE].size() * ranks.mesh[SHARD].size() > 1:
        shard_layers(module, ranks)


def shard_layers(module: nn.Module, ranks: Ranks) -> None:
    """Do so whatever the number of ranks: of a single one each layer is one part."""
    assert ranks.mesh is not None
    keep_names(module)
    num_copies, num_parts = ranks.mesh[REPLICATE].size(), ranks.mesh[SHARD].size()
    # Not kept after the forward pass, the root's neither: without a backward pass they would outlive the next update.
    arguments: dict[str, Any] = {
        "mesh": ranks.mesh[REPLICATE, SHARD] if num_copies > 1 else ranks.mesh[SHARD],
        "reshard_after_forward": True,
    }
    offload: dict[str, Any] = {}
    if ranks.offloads_parameters:
        offload["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    policies = offload if ranks.precision is None else offload | {"mp_policy": ranks.precision}
    arguments |= policies
    if ranks.expert_mesh is not None:
        _shard_experts(module, ranks.expert_mesh, num_batches=num_copies * num_parts, policies=policies)
    for layer in layers_of(module):
        fully_shard(layer, **arguments)
    fully_shard(module, **arguments)


def _shard_experts(module: nn.Module, mesh: DeviceMesh, *, num_batches: int, policies: dict[str, Any]) -> None:
    """Shard the experts of every layer among the ranks that have the same ones.

    Args:
        module: a model whose experts are divided.
        mesh: of the experts.
        num_batches: ranks that compute other sequences than one another. All of them send tokens to each expert, so
            its gradient is the sum over them, of which FSDP is to make the mean.
        policies: how FSDP keeps them in the host's memory and what it gathers them in, where that is said.
    """
    num_copies, num_parts = mesh[REPLICATE].size(), mesh[EXPERT_SHARD].size()
    for experts in module.modules():
        if not is_divided_by_expert(experts):
            continue
        axes = mesh[REPLICATE, EXPERT_SHARD] if num_copies > 1 else mesh[EXPERT_SHARD]
        fully_shard(experts, mesh=axes, **policies)
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(float(num_batches))
        if num_parts > 1:
            # gloo has no collective that divides by another number than its ranks.
            experts.set_force_sum_reduction_for_comms(True)
