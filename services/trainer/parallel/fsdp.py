"""FSDP2: each rank keeps a part of every weight, and gathers a layer while it computes it."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from services.trainer.parallel.layers import layers_of
from services.trainer.parallel.ranks import REPLICATE, SHARD, Ranks


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Shard a module's layers one by one, and the rest of it as one unit; optimisers are made afterwards.

    Args:
        module: the same weights on every rank.
        ranks: more than one.
    """
    assert ranks.mesh is not None
    mesh = ranks.mesh if ranks.mesh[REPLICATE].size() > 1 else ranks.mesh[SHARD]
    # Not kept after the forward pass, the root's neither: without a backward pass they would outlive the next update.
    arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    for layer in layers_of(module):
        fully_shard(layer, **arguments)
    fully_shard(module, **arguments)
