"""Linear layers whose weight is kept in 4 bits per element, as bitsandbytes packs it.

While such a layer computes, forward or backward, its weight is unpacked into the element type that it was loaded in,
and dropped again: so what a pass computes with is what is published. bitsandbytes' own layers are not used: in
evaluation mode, in which models compute here, they take other kernels, which round to bfloat16 on some CPUs.

Weights are packed on the CPU, wherever they compute later: to the same bits on every machine with the same files, but
for the mean of their scales, whose last bit depends on the number of threads.

Source: Dettmers et al., QLoRA, 2023.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from flotilla.services.trainer.models.stored_weights import StoredWeights
from flotilla.shared.config.sections.model import QuantisationConfig
from flotilla.shared.errors import ModelError

PACKAGE = "bitsandbytes"
BLOCK = 64
"""Weights that have one scale."""
NESTED_BLOCK = 256
"""Scales that have one scale, where they are packed, too; bitsandbytes has no other."""
DTYPE, DOUBLE = "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"
HEADS = ("lm_head", "score")
"""Output layers, by the last part of their names."""


@dataclass(frozen=True)
class Packing:
    """How a weight is packed.

    Attributes:
        config: its section.
        shape, dtype: of the weight.
    """

    config: QuantisationConfig
    shape: torch.Size
    dtype: torch.dtype

    @property
    def rows(self) -> tuple[int, int]:
        """The shape under which bitsandbytes knows the weight: a block in each row.

        Blocks continue from row to row of a matrix, but its kernel for AVX-512 takes each row to begin one.
        """
        count = self.shape.numel()
        return (1, count) if count % BLOCK else (count // BLOCK, BLOCK)


class PackedLayer(nn.Module):
    """Goes before the class of a linear layer whose weight is packed.

    Attributes:
        packing: how.
        packed: [N / 2, 1] uint8, two weights in each.
        scales: [N / 64], of the blocks; float32, or uint8 where they are packed, too.
        scale_offset, scale_scales, scale_values: what packed scales are unpacked by.
    """

    packing: Packing
    packed: Tensor
    scales: Tensor
    scale_offset: Tensor
    scale_scales: Tensor
    scale_values: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight, unpacked again each time."""
        functional = _functional()
        config, offset, nested = self.packing.config, None, None
        if config.double:
            offset = self.scale_offset
            nested = functional.QuantState(
                absmax=self.scale_scales, code=self.scale_values, blocksize=NESTED_BLOCK, dtype=torch.float32
            )
        state = functional.QuantState(
            absmax=self.scales,
            shape=torch.Size(self.packing.rows),
            dtype=self.packing.dtype,
            blocksize=BLOCK,
            quant_type=config.dtype,
            offset=offset,
            state2=nested,
        )
        unpacked: Tensor = functional.dequantize_4bit(self.packed, state)
        return unpacked.view(self.packing.shape)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as [outputs, inputs]."""
        weight = self.weight.to(dtype)
        return weight.T if isinstance(self, Conv1D) else weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer."""
        found: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        bias: Any = self.bias
        return found if bias is None else found + bias


class QuantisedLinear(PackedLayer, nn.Linear):  # type: ignore[misc, override]
    """A linear layer."""


class QuantisedConv1D(PackedLayer, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is transposed."""


PACKED: dict[type[nn.Module], type[PackedLayer]] = {nn.Linear: QuantisedLinear, Conv1D: QuantisedConv1D}
PLAIN: dict[type[nn.Module], type[nn.Module]] = {packed: plain for plain, packed in PACKED.items()}


class _Product(torch.autograd.Function):
    """``x W^T`` by a layer that is asked for W again for the backward pass: kept, all would be whole at once."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: PackedLayer) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.matrix(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [gradient] = gradients
        return gradient @ ctx.layer.matrix(gradient.dtype), None


def described(config: QuantisationConfig, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Describe how weights are packed as a model's ``config.json`` does, in transformers' words."""
    chosen = {DTYPE: config.dtype, DOUBLE: config.double}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **chosen)


def read_description(model: Mapping[str, Any]) -> QuantisationConfig | None:
    """Read what ``described`` wrote into a model's ``config.json``; None where there is nothing.

    Raises:
        ValueError: weights are packed otherwise.
    """
    found = model.get("quantization_config")
    if found is None:
        return None
    if not found.get("load_in_4bit"):
        raise ValueError("its base is quantised, and not by bitsandbytes in 4 bits: merge it with peft")
    return QuantisationConfig(dtype=found[DTYPE], double=found[DOUBLE])


def check_installed() -> None:
    """Check that weights can be packed here.

    Raises:
        ModelError: bitsandbytes is missing.
    """
    if find_spec(PACKAGE) is None:
        raise ModelError(
            "model.lora.quantisation needs the package bitsandbytes, which is not installed where this model is "
            "loaded: pip install 'flotilla[bitsandbytes]' there, or leave quantisation out"
        )


def quantise(model: nn.Module, config: QuantisationConfig, stored: StoredWeights | None = None) -> None:
    """Pack the weights of a model's linear layers.

    Args:
        model: on the CPU.
        config: how.
        stored: where its weights are, if it has none yet: they are read, and never more than one of those that are
            packed is whole.
    """
    host = torch.device("cpu")
    layers = [(name, layer) for name, layer in model.named_modules() if _is_packable(name, layer)]
    for name, layer in layers:
        if stored is not None:
            stored.fill(layer, host, host, f"{name}.")
        _pack(layer, config)
    if stored is not None:
        stored.fill(model, host, host)


@dataclass(frozen=True)
class PackedWeight:
    """The weight of a layer, for images."""

    layer: PackedLayer

    @property
    def shape(self) -> torch.Size:
        """Of the weight as it is published."""
        return self.layer.packing.shape

    @property
    def dtype(self) -> torch.dtype:
        """Likewise."""
        return self.layer.packing.dtype

    def unpacked(self) -> Tensor:
        """Make the weight, again each time."""
        return self.layer.weight


def packed_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """Find the layers of a model whose weights are packed, by their paths."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLayer)}


@torch.no_grad()
def unpack(layer: nn.Module) -> None:
    """Make a layer plain again, with its weight as a parameter; one that is plain stays as it is."""
    if type(layer) not in PLAIN:
        return
    assert isinstance(layer, PackedLayer)
    weight = layer.weight
    for name, _ in list(layer.named_buffers(recurse=False)):
        delattr(layer, name)
    layer.__class__ = PLAIN[type(layer)]  # type: ignore[assignment]
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


@cache
def _functional() -> Any:
    """Import what packs and unpacks.

    Without the package ``kernels``: on some CPUs the import would let that fetch a kernel from the hub, for layers that
    are not used here, and complain where it cannot.
    """
    log, name = logging.getLogger(f"{PACKAGE}.backends.cpu.ops"), "kernels"
    level, before = log.level, sys.modules.get(name)
    log.setLevel(logging.ERROR)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        return import_module(f"{PACKAGE}.functional")
    finally:
        log.setLevel(level)
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def _is_packable(name: str, layer: nn.Module) -> bool:
    return type(layer) in PACKED and name.rpartition(".")[2] not in HEADS


@torch.no_grad()
def _pack(layer: nn.Module, config: QuantisationConfig) -> None:
    functional = _functional()
    weight = layer.weight
    assert isinstance(weight, Tensor)
    packing = Packing(config, weight.shape, weight.dtype)
    packed, state = functional.quantize_4bit(
        weight.detach().reshape(packing.rows),
        blocksize=BLOCK,
        compress_statistics=config.double,
        quant_type=config.dtype,
    )
    del layer.weight
    layer.__class__ = PACKED[type(layer)]  # type: ignore[assignment]
    assert isinstance(layer, PackedLayer)
    layer.packing = packing
    layer.register_buffer("packed", packed, persistent=False)
    layer.register_buffer("scales", state.absmax, persistent=False)
    if config.double:
        layer.register_buffer("scale_offset", state.offset, persistent=False)
        layer.register_buffer("scale_scales", state.state2.absmax, persistent=False)
        layer.register_buffer("scale_values", state.state2.code, persistent=False)
