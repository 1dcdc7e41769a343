"""The layers of a model, and what is done to each: their activations can be computed twice instead of kept."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shared.errors import ModelError


def layers_of(module: nn.Module) -> list[nn.Module]:
    """List the layers that transformers says to keep in one piece."""
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    return [each for each in module.modules() if type(each).__name__ in kinds and each is not module]


def recompute_activations(module: nn.Module) -> None:
    """Keep of each layer its input alone, and compute the rest again in the backward pass.

    Not by transformers' own switch, which does nothing in evaluation mode, and not by a module around each layer, which
    would change the names of the weights. Call it before weights are sharded.

    Raises:
        ModelError: the model does not say what its layers are.
    """
    layers = layers_of(module)
    if not layers:
        raise ModelError(
            f"optimisation.activation_checkpointing: {type(module).__name__} does not say what its layers are: leave "
            "it out and lower optimisation.micro_batch_tokens"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
