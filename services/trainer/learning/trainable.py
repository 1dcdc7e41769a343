"""Which weights of the policy train, and how all of them are laid out for images and kept versions."""

import torch
from torch import nn

from services.trainer.models.lora import Adapters
from services.trainer.parallel.ranks import Ranks
from shared.config.spec import ExperimentSpec
from shared.weights.flat_parameters import FlatParameters
from shared.weights.sharded_parameters import ShardedParameters

Weights = FlatParameters | ShardedParameters


def make_adapters(model: nn.Module, spec: ExperimentSpec) -> Adapters | None:
    """Give a model the adapters that alone train, if the spec has some; before it is sharded.

    Raises:
        ModelError: the spec names layers that cannot be adapted.
    """
    return None if spec.model.lora is None else Adapters(model, spec.model.lora, seed=spec.seed)


def image_weights(model: nn.Module, adapters: Adapters | None, ranks: Ranks, wire_dtype: torch.dtype | None) -> Weights:
    """Lay out what is published: the checkpoint's weights, with adapters added into them."""
    names, increment = None, None
    if adapters is not None:
        own = adapters.names
        names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own]
        increment = adapters.increment
    if ranks.is_several:
        return ShardedParameters(
            model, is_leader=ranks.is_leader, wire_dtype=wire_dtype, names=names, increment=increment
        )
    return FlatParameters(model, wire_dtype=wire_dtype, names=names, increment=increment)


def kept_weights(model: nn.Module, adapters: Adapters | None, ranks: Ranks, published: Weights) -> Weights:
    """Lay out what a kept version holds: what differs between versions, which may be adapters alone."""
    if adapters is None:
        return published
    if ranks.is_several:
        return ShardedParameters(model, is_leader=ranks.is_leader, names=adapters.names)
    return FlatParameters(model, names=adapters.names)
