"""The layers of a model, and what is done to each before weights are sharded.

Always to a layer's ``forward``, not by a module around it, which would change the names of the weights: compiled, then
computed twice instead of kept, then what is kept moved to the host's memory.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flotilla.services.trainer.weights.parts import local_of
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError

LEAST_BYTES = 1 << 16
"""Smaller tensors stay: they free nothing worth a copy."""


def prepare_layers(module: nn.Module, spec: ExperimentSpec, device: torch.device) -> None:
    """Apply the spec's settings to each layer of a trained model.

    Raises:
        ModelError: the model does not declare its layers, or there is no compiler.
    """
    if spec.optimisation.compile_layers:
        check_compiler(device)
        compile_layers(module)
    if spec.optimisation.activation_checkpointing:
        recompute_activations(module)
    if spec.parallelism.offload.activations:
        keep_activations_on_host(module, device.type)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """List the layers that transformers marks as not to be split."""
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    return [each for each in module.modules() if type(each).__name__ in kinds and each is not module]


def check_compiler(device: torch.device) -> None:
    """Check that torch.compile has what it needs.

    Raises:
        ModelError: it has not.
    """
    # Imported by those alone who compile: it takes seconds.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    missing = None
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            missing = "a C++ compiler (g++)"
    elif find_spec("triton") is None:
        missing = "Triton"
    if missing is not None:
        raise ModelError(
            f"optimisation.compile_layers: torch.compile needs {missing}, which this trainer's machine does not have: "
            "install it there, or leave compile_layers out"
        )


def compile_layers(module: nn.Module) -> None:
    """Let torch make one program of each layer, for inputs of any shape. Errors as of ``recompute_activations``."""
    for layer in _named_layers(module, "optimisation.compile_layers", "leave it out"):
        layer.forward = torch.compile(layer.forward, dynamic=True)  # type: ignore[method-assign]


def recompute_activations(module: nn.Module) -> None:
    """Keep of each layer its input alone, and compute the rest again in the backward pass.

    Not by transformers' own switch, which does nothing in evaluation mode. Call it before weights are sharded.

    Raises:
        ModelError: the model does not declare its layers.
    """
    way_out = "leave it out and lower optimisation.micro_batch_tokens"
    for layer in _named_layers(module, "optimisation.activation_checkpointing", way_out):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def keep_activations_on_host(module: nn.Module, kind: str) -> None:
    """Move what each layer keeps for the backward pass to the host's memory, and back when that needs it.

    Weights stay where they are, and so does what is small. Errors as of ``recompute_activations``.

    Args:
        module: the model.
        kind: of the device that computes; its tensors are moved.
    """
    for layer in _named_layers(module, "parallelism.offload.activations", "leave it out"):
        layer.forward = partial(_with_host_memory, layer, layer.forward, kind)  # type: ignore[method-assign]


def _named_layers(module: nn.Module, field: str, way_out: str) -> list[nn.Module]:
    layers = layers_of(module)
    if not layers:
        raise ModelError(f"{field}: {type(module).__name__} does not declare its layers: {way_out}")
    return layers


def _with_host_memory(layer: nn.Module, forward: Callable[..., Any], kind: str, *given: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*given, **named)
    # Gathered weights are elsewhere in each pass.
    weights = {local_of(each).untyped_storage().data_ptr() for each in layer.parameters()}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        is_large = tensor.nbytes >= LEAST_BYTES
        if not is_large or tensor.device.type != kind or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=kind == "cuda")
        kept.copy_(tensor, non_blocking=kind == "cuda")
        return tensor.device, kept

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, kept = packed
        return kept.to(device, non_blocking=kind == "cuda")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return forward(*given, **named)
