"""Low-rank adapters: A and B beside the weight W of a linear layer, which computes with W + scale * B A.

The layers stay where they are and so do their weights' names: an adapted one is of another class, with two parameters
more. The files are those of peft, which reads and writes the same directories.

Source: Hu et al., LoRA, 2021; Kalajdzievski, rsLoRA, 2023.
"""

import logging
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from flotilla.services.trainer.models.quantised import HEADS, QuantisedConv1D, QuantisedLinear, packed_layers, unpack
from flotilla.services.trainer.weights.named_weights import Label
from flotilla.services.trainer.weights.parts import Index, index_of, localized
from flotilla.shared.config.sections.model import LoraConfig, ModelConfig
from flotilla.shared.errors import ModelError, WeightTransferFailed
from flotilla.shared.models.hub import model_directory
from flotilla.shared.models.weight_files import checksum_of, safetensors_files, shapes_in
from flotilla.shared.vision.tower import tower_parts
from flotilla.shared.weights.image.adapters import PREFIX, AdaptersHeader, names_of
from flotilla.shared.weights.image.checkpoint_names import pieces_of

log = logging.getLogger(__name__)

A, B = "lora_a", "lora_b"
PEFT_NAMES = {A: "lora_A", B: "lora_B"}


@dataclass
class _Switches:
    """What all adapters of a model have in common; changed while it computes."""

    scale: float
    dropout: float
    is_enabled: bool = True
    is_dropping: bool = False


class Adapted(nn.Module):
    """Goes before the class of a linear layer that has an adapter."""

    weight: Tensor
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    switches: _Switches

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer."""
        found: Tensor = super().forward(inputs)
        switches = self.switches
        if not switches.is_enabled:
            return found
        seen = nn.functional.dropout(inputs, switches.dropout) if switches.is_dropping else inputs
        low = nn.functional.linear(nn.functional.linear(seen, self.lora_a), self.lora_b)
        return found + switches.scale * low


class AdaptedLinear(Adapted, nn.Linear):
    """A linear layer."""


class AdaptedConv1D(Adapted, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is transposed."""


class AdaptedQuantisedLinear(Adapted, QuantisedLinear):
    """A linear layer whose weight is packed."""


class AdaptedQuantisedConv1D(Adapted, QuantisedConv1D):
    """GPT-2's, whose weight is packed."""


ADAPTED: Mapping[type[nn.Module], type[Adapted]] = {
    nn.Linear: AdaptedLinear,
    Conv1D: AdaptedConv1D,
    QuantisedLinear: AdaptedQuantisedLinear,
    QuantisedConv1D: AdaptedQuantisedConv1D,
}
PLAIN: Mapping[type[nn.Module], type[nn.Module]] = {adapted: plain for plain, adapted in ADAPTED.items()}


class Adapters:
    """The adapters of a model, whose other weights do not train from here on; but a classifier's head does.

    Args:
        model: on one device, not sharded yet; the layers that the section names are changed in place.
        config: the section.
        seed: of the experiment; A begins with draws by it and the layer's name, B with 0.

    Raises:
        ModelError: the section names layers that are not there, or cannot be adapted.
    """

    def __init__(self, model: nn.Module, config: LoraConfig, *, seed: int) -> None:
        self.config = config
        self._switches = _Switches(config.scale, config.dropout)
        self.layers: dict[str, Adapted] = {}
        chosen = _chosen(model, config)
        model.requires_grad_(False)
        for name, layer in chosen.items():
            self.layers[name] = _adapt(layer, config.rank, self._switches)
        self._seed = seed
        if not next(model.parameters()).is_meta:
            self.begin()
        self.heads = {name: parameter for name, parameter in model.named_parameters() if name.split(".")[0] == "score"}
        for parameter in self.heads.values():
            parameter.requires_grad_(True)
        self._model = model

    @torch.no_grad()
    def begin(self) -> None:
        """Draw A, and set B to 0: the same bits on any number of ranks. For a model that has its memory."""
        for name, layer in self.layers.items():
            rank, width = layer.lora_a.shape
            # As torch begins a linear layer, and peft its A: U(-1/sqrt(width), 1/sqrt(width)).
            low = (2 * torch.rand(rank, width, generator=_generator(self._seed, name)) - 1) / math.sqrt(width)
            layer.lora_a.copy_(localized(low.to(layer.lora_a.dtype), layer.lora_a))
            layer.lora_b.zero_()

    @property
    def names(self) -> frozenset[str]:
        """Parameters of the model that its checkpoint does not have."""
        return frozenset(f"{name}.{part}" for name in self.layers for part in (A, B))

    def label(self, base: ModelConfig) -> Label | None:
        """Return what an image of the adapters alone is to say; None where the model's files know no weight of theirs.

        Args:
            base: the model without them; all of its weights are read once.

        Raises:
            ModelError: its files cannot be read.
        """
        directory = model_directory(base)
        files = safetensors_files(directory)
        try:
            known = shapes_in(files)
        except WeightTransferFailed as error:
            raise ModelError(error.detail) from error
        model, layers = self._model, self.layers
        weights = {f"{name}.weight": tuple(layer.weight.shape) for name, layer in layers.items()}
        # A weight that is several in the checkpoint is not known under one name, and is missing here.
        called = {each.source: each.name for each in pieces_of(model, weights) if each.shape == weights[each.source]}
        parts = {f"{name}.{part}": tuple(getattr(layers[name], part).shape) for name in layers for part in (A, B)}
        own = {part.source: part.name for part in pieces_of(model, parts)}
        missing = sorted(name for name in weights if called.get(name) not in known)
        if missing:
            log.warning(
                "adapters are published merged: the model's files call a weight otherwise",
                extra={"weight": missing[0], "model": str(directory)},
            )
            return None
        is_transposed = any(isinstance(layer, Conv1D) for layer in layers.values())
        header = AdaptersHeader(checksum_of(files), self.config.scale, is_transposed)
        pairs = ((name, names_of(called[f"{name}.weight"])) for name in layers)
        names = {own[f"{name}.{part}"]: one for name, pair in pairs for part, one in zip((A, B), pair, strict=True)}
        return Label(names, header.metadata)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute with the weights alone: with the model that training began with."""
        self._switches.is_enabled = False
        try:
            yield
        finally:
            self._switches.is_enabled = True

    @contextmanager
    def dropping(self, seed: int) -> Iterator[None]:
        """Drop inputs, drawn by a seed; elsewhere nothing is dropped."""
        if not self.config.dropout:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._switches.is_dropping = True
            try:
                yield
            finally:
                self._switches.is_dropping = False

    @torch.no_grad()
    def increment(self, weight: str, index: Index) -> Tensor | None:
        """Compute what is added to a part of a weight: float32; None for a weight that has no adapter.

        Gathers A and B: every rank that has a part of the model asks for the same weights in the same order.
        """
        layer = self.layers.get(weight.removesuffix(".weight"))
        if layer is None:
            return None
        low, high = (_whole(each).float() for each in (layer.lora_a, layer.lora_b))
        rows, columns = index
        if isinstance(layer, Conv1D):
            return self._switches.scale * (low[:, rows].T @ high[columns].T)
        return self._switches.scale * (high[rows] @ low[:, columns])

    @torch.no_grad()
    def merge(self) -> None:
        """Add every adapter into its weight, and remove it; weights that are packed are unpacked.

        Not where the model is sharded.
        """
        for name, layer in self.layers.items():
            added = self.increment(f"{name}.weight", index_of(layer.weight))
            assert added is not None
            del layer.lora_a, layer.lora_b, layer.switches
            layer.__class__ = PLAIN[type(layer)]  # type: ignore[assignment]
            unpack(layer)
            layer.weight.copy_(layer.weight.float() + added)
        self.layers.clear()
        for packed in packed_layers(self._model).values():
            unpack(packed)

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of all layers, and a head that trains, under peft's names."""
        own = dict(self._model.named_parameters())
        return {_peft_name(name): own[name].detach() for name in (*sorted(self.names), *self.heads)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what ``tensors`` returned.

        Raises:
            ModelError: it is of other layers or of another rank.
        """
        own = self.tensors()
        different = sorted(own.keys() ^ tensors.keys())
        if different:
            raise ModelError(f"the adapter has not the layers of model.lora: {different[0]} is in one of them only")
        for name, parameter in own.items():
            if tensors[name].shape != parameter.shape:
                raise ModelError(f"the adapter's {name} has another shape than model.lora says")
            parameter.copy_(localized(tensors[name], parameter))

    def peft_config(self, base: str, revision: str | None) -> dict[str, Any]:
        """Describe them as peft's ``adapter_config.json`` does.

        Args:
            base: directory or hub name of the model without them.
            revision: of a hub's model.
        """
        config = self.config
        return {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.heads else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "revision": revision,
            "inference_mode": True,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "use_rslora": config.rank_stabilised,
            "bias": "none",
            "fan_in_fan_out": any(isinstance(layer, Conv1D) for layer in self.layers.values()),
            "target_modules": sorted(self.layers),
            "modules_to_save": ["score"] if self.heads else None,
        }


def _peft_name(name: str) -> str:
    stem, _, last = name.rpartition(".")
    return f"{PREFIX}{stem}.{PEFT_NAMES[last]}.weight" if last in PEFT_NAMES else f"{PREFIX}{name}"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _chosen(model: nn.Module, config: LoraConfig) -> dict[str, nn.Module]:
    """Find the layers to adapt.

    Raises:
        ModelError: a name means no linear layer, or there is none left.
    """
    modules = dict(model.named_modules())
    # The tower of a vision-language model has layers of the same names, which are left alone where it is frozen.
    parts = tower_parts(getattr(model, "base_model", None))
    is_trained = any(each.requires_grad for part in parts for each in part.parameters())
    frozen = () if is_trained else tuple(each for part in parts for each in part.modules())
    linear = {name: each for name, each in modules.items() if type(each) in ADAPTED and each not in frozen}
    if config.targets == "all-linear":
        wanted = [name for name in linear if not _is_any(name, HEADS)]
    else:
        for target in config.targets:
            _check(target, modules, linear, dict(model.named_parameters()))
        wanted = [name for name in linear if _is_any(name, config.targets)]
    for name in config.exclude:
        if not any(_is_any(each, (name,)) for each in linear):
            raise ModelError(f"model.lora.exclude: no linear layer of the model is called {name!r}")
    found = {name: linear[name] for name in wanted if not _is_any(name, config.exclude)}
    if not found:
        raise ModelError("model.lora: no layer is left to adapt: name others in targets, or fewer in exclude")
    return found


def _check(
    target: str, modules: Mapping[str, nn.Module], linear: Mapping[str, nn.Module], weights: Mapping[str, Tensor]
) -> None:
    named = [name for name in modules if _is_any(name, (target,))]
    fused = [name for name in weights if _is_any(name, (target,)) and weights[name].dim() > 2]
    where = f"model.lora.targets: {target!r}"
    if _is_any(target, HEADS):
        raise ModelError(f"{where} is the output layer, which is not adapted: name other layers")
    if fused:
        raise ModelError(
            f"{where} is {fused[0]}, the weights of all experts in one, and no linear layer: name the layers of the "
            "attention, such as q_proj"
        )
    if not named:
        raise ModelError(f"{where} is no layer of the model; its linear layers are {', '.join(_last_parts(linear))}")
    strange = [name for name in named if name not in linear]
    if strange:
        raise ModelError(
            f"{where} is {strange[0]}, a {type(modules[strange[0]]).__name__} and no linear layer; linear layers are "
            f"{', '.join(_last_parts(linear))}"
        )


def _last_parts(names: Mapping[str, Any]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _is_any(name: str, ends: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))


@torch.no_grad()
def _adapt(layer: nn.Module, rank: int, switches: _Switches) -> Adapted:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    wide, high = weight.shape if isinstance(layer, Conv1D) else reversed(weight.shape)
    layer.__class__ = ADAPTED[type(layer)]
    layer.register_parameter(A, nn.Parameter(weight.new_empty(rank, wide)))
    layer.register_parameter(B, nn.Parameter(weight.new_zeros(high, rank)))
    assert isinstance(layer, Adapted)
    layer.switches = switches
    return layer
