"""Many trained models on one base: each has its adapters, or weights of its own, and its optimiser; one is live.

The base's weights are held once. A model takes its turn by putting its parameters into the layers: nothing is copied.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flotilla.services.trainer.data.packing import ModelInput
from flotilla.services.trainer.models.loading import LoadedModel, check_device, load_model
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.models.lora import Adapted, Adapters
from flotilla.services.trainer.parallel.ranks import ONE_RANK
from flotilla.shared.config.sections.model import LoraConfig
from flotilla.shared.errors import InvalidRequest, ModelError
from flotilla.shared.tinker.capabilities import positions_of
from flotilla.shared.tinker.records import AdamStep, Lora

ALPHA = 32.0
"""The scale of B A is this divided by the rank, as on the hosted service."""
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc", "mlp")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
MICRO_TOKENS = 8192
"""Positions of one forward and backward pass, padding included."""

A, B = "lora_a", "lora_b"


@dataclass(eq=False)
class Slot:
    """One trained model.

    Attributes:
        lora: which adapters; None: all weights are its own.
        parameters: that train, by name; with adapters ``LAYER.lora_a`` and ``LAYER.lora_b``.
        step: updates since it was made.
    """

    lora: Lora | None
    parameters: dict[str, nn.Parameter]
    step: int = 0
    masters: dict[str, nn.Parameter] = field(default_factory=dict)
    adam: torch.optim.AdamW | None = None

    def __post_init__(self) -> None:
        self.masters = {
            name: each if each.dtype == torch.float32 else nn.Parameter(each.detach().float().clone())
            for name, each in self.parameters.items()
        }
        self.adam = torch.optim.AdamW(self.masters.values(), lr=0.0)

    def update(self, how: AdamStep) -> float:
        """Update the weights by what has accumulated, and forget that.

        Returns:
            The norm of the whole gradient, before it is clipped.

        Raises:
            InvalidRequest: the gradient is not finite; nothing is updated, and it is forgotten.
        """
        assert self.adam is not None
        for name, each in self.parameters.items():
            master = self.masters[name]
            if master is not each:
                master.grad = None if each.grad is None else each.grad.float()
        gradients = [each.grad for each in self.masters.values() if each.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
        try:
            if not math.isfinite(norm):
                raise InvalidRequest("the gradient is not finite: nothing was updated")
            if 0 < how.grad_clip_norm < norm:
                nn.utils.clip_grads_with_norm_(self.masters.values(), how.grad_clip_norm, torch.tensor(norm))
            for group in self.adam.param_groups:
                group["lr"], group["betas"] = how.learning_rate, (how.beta1, how.beta2)
                group["eps"], group["weight_decay"] = how.eps, how.weight_decay
            self.adam.step()
        finally:
            self.forget_gradients()
        with torch.no_grad():
            for name, each in self.parameters.items():
                if self.masters[name] is not each:
                    each.copy_(self.masters[name])
        self.step += 1
        return norm

    def forget_gradients(self) -> None:
        """Drop what has accumulated."""
        for each in (*self.parameters.values(), *self.masters.values()):
            each.grad = None

    def num_bytes(self, *, with_optimizer: bool) -> int:
        """Return how many bytes it takes on a disk: float32, and as much for each of two moments."""
        size = sum(each.numel() * each.element_size() for each in self.masters.values())
        return size * (3 if with_optimizer else 1)

    def state_bytes(self) -> int:
        """Return how many bytes its states take on a disk, of which two are kept: with gradients, at most."""
        return 2 * (self.num_bytes(with_optimizer=True) + self.num_bytes(with_optimizer=False))

    def weights(self) -> dict[str, Tensor]:
        """Return what trains: float32 masters where there are some."""
        return {name: each.detach() for name, each in self.masters.items()}

    def moments(self) -> dict[str, Tensor]:
        """Return the optimiser's state, by ``KIND/NAME``."""
        assert self.adam is not None
        return {
            f"{kind}/{name}": torch.as_tensor(self.adam.state[master][kind]).detach()
            for name, master in self.masters.items()
            if self.adam.state.get(master)
            for kind in MOMENTS
        }

    def gradients(self) -> dict[str, Tensor]:
        """Return what has accumulated since the last update."""
        return {name: each.grad for name, each in self.parameters.items() if each.grad is not None}

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Take what ``gradients`` returned."""
        for name, each in gradients.items():
            self.parameters[name].grad = each.to(self.parameters[name])

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Take what ``weights`` and ``moments`` returned; without moments the optimiser begins again.

        Raises:
            ModelError: they are of another model, or another rank.
        """
        assert self.adam is not None
        different = sorted(self.masters.keys() ^ weights.keys())
        if different:
            raise ModelError(f"the saved weights are of another model: {different[0]} is in one of them only")
        for name, master in self.masters.items():
            if weights[name].shape != master.shape:
                raise ModelError(
                    f"the saved {name} has the shape {list(weights[name].shape)}, not {list(master.shape)}"
                )
            master.copy_(weights[name])
            self.parameters[name].copy_(master)
            found = {kind: moments.get(f"{kind}/{name}") for kind in MOMENTS}
            if all(each is not None for each in found.values()):
                self.adam.state[master] = {
                    kind: each.to("cpu" if kind == "step" else master.device, torch.float32).clone()
                    for kind, each in found.items()
                    if each is not None
                }


class Base:
    """The base model, whose layers compute with whatever model is live.

    Args:
        path: directory of the model.
        device, dtype: where, and in what, it computes.

    Raises:
        ModelError: it cannot be loaded, or has no layers that could be adapted.
    """

    def __init__(self, path: Path, *, device: str = "auto", dtype: str = "auto") -> None:
        self.positions = positions_of(path)
        self.loaded: LoadedModel = load_model(path, dtype=dtype, device=check_device(device))
        model = self.loaded.model
        self._own = _places(model)
        self._adapters = Adapters(model, LoraConfig(rank=1), seed=0)
        self._layers: Mapping[str, Adapted] = self._adapters.layers
        self._policy = Policy.of(self.loaded, 1.0, ONE_RANK)
        self._off = {name: _no_adapter(layer) for name, layer in self._layers.items()}
        self._put({})

    @property
    def vocabulary(self) -> int:
        """Token ids that it reads."""
        return self.loaded.vocabulary

    def make(self, lora: Lora | None) -> Slot:
        """Make a model that begins as the base.

        Raises:
            InvalidRequest: no layer would be adapted.
        """
        if lora is None:
            own = {name: places[0][0]._parameters[places[0][1]] for name, places in self._own.items()}
            copies = {name: nn.Parameter(each.detach().clone()) for name, each in own.items() if each is not None}
            return Slot(None, copies)
        chosen = [name for name in self._layers if (lora.train_mlp if _is_mlp(name) else lora.train_attn)]
        if not chosen:
            raise InvalidRequest("lora_config leaves no layer to adapt: the output layer is not adapted here")
        made: dict[str, nn.Parameter] = {}
        for name in chosen:
            low, high = _drawn(self._layers[name], lora.rank, name, lora.seed or 0)
            made |= {f"{name}.{A}": nn.Parameter(low), f"{name}.{B}": nn.Parameter(high)}
        return Slot(lora, made)

    @contextmanager
    def live(self, slot: Slot | None) -> Iterator[None]:
        """Compute with a model's weights while the block runs; None: with the base's."""
        if slot is None:
            yield
            return
        if slot.lora is not None:
            next(iter(self._layers.values())).switches.scale = ALPHA / slot.lora.rank
            self._put(slot.parameters)
            try:
                yield
            finally:
                self._put({})
            return
        kept = {name: places[0][0]._parameters[places[0][1]] for name, places in self._own.items()}
        self._replace(slot.parameters)
        try:
            yield
        finally:
            self._replace({name: each for name, each in kept.items() if each is not None})

    def _put(self, adapters: Mapping[str, nn.Parameter]) -> None:
        for name, layer in self._layers.items():
            low, high = self._off[name]
            layer.lora_a = adapters.get(f"{name}.{A}", low)
            layer.lora_b = adapters.get(f"{name}.{B}", high)

    def _replace(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, places in self._own.items():
            for module, attribute in places:
                module._parameters[attribute] = parameters[name]

    def log_probs(self, rows: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]) -> list[Tensor]:
        """Compute the log-probabilities of targets, of one micro-batch.

        Args:
            rows: tokens [T] that are read, and targets [T] or [T, K] of each position.

        Returns:
            Of each row, in its targets' shape: float32 nats, with gradient.
        """
        width = max(tokens.size for tokens, _ in rows)
        read = np.zeros((len(rows), width), np.int64)
        predictors, labels = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.int64]]()
        for number, (tokens, targets) in enumerate(rows):
            read[number, : tokens.size] = tokens
            each = 1 if targets.ndim == 1 else targets.shape[1]
            predictors.append(np.repeat(np.arange(tokens.size) + number * width, each))
            labels.append(targets.reshape(-1))
        inputs = ModelInput(
            torch.from_numpy(read),
            torch.arange(width).expand(len(rows), width),
            None,
            torch.from_numpy(np.concatenate(predictors)),
            torch.from_numpy(np.concatenate(labels)),
        ).to(self._policy.device)
        flat = self._policy.statistics(inputs, with_entropy=False).log_probs.float()
        parts = torch.split(flat, [targets.size for _, targets in rows])
        return [part.reshape(targets.shape) for part, (_, targets) in zip(parts, rows, strict=True)]

    @torch.no_grad()
    def most_likely(self, tokens: npt.NDArray[np.int64], count: int) -> tuple[Tensor, Tensor]:
        """Find the likeliest next tokens after each: ids and log-probabilities, [T, count] each, on the host."""
        model: Any = self.loaded.model
        read = torch.from_numpy(tokens)[None].to(self._policy.device)
        found = model(input_ids=read, use_cache=False).logits[0].float().log_softmax(-1).topk(count)
        return found.indices.cpu(), found.values.cpu()


def micro_batches(lengths: Sequence[int], most: int = MICRO_TOKENS) -> list[list[int]]:
    """Cut sequences into micro-batches of similar length: numbers of the sequences, longest first."""
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= most:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Find the places of each weight; a shared one has several."""
    found: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            found.setdefault(id(parameter), (name, []))[1].append((module, attribute))
    return dict(found.values())


def _is_mlp(name: str) -> bool:
    return any(part in MLP for part in name.split("."))


def _no_adapter(layer: Adapted) -> tuple[nn.Parameter, nn.Parameter]:
    low, high = layer.lora_a, layer.lora_b
    empty = low.new_empty(0, low.shape[1]), high.new_empty(high.shape[0], 0)
    return nn.Parameter(empty[0], requires_grad=False), nn.Parameter(empty[1], requires_grad=False)


def _drawn(layer: Adapted, rank: int, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Draw A as torch begins a linear layer; B is 0. The same bits for the same seed and layer."""
    width, height = layer.lora_a.shape[1], layer.lora_b.shape[0]
    generator = torch.Generator().manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63)
    low = (2 * torch.rand(rank, width, generator=generator) - 1) / math.sqrt(width)
    return low.to(layer.lora_a), layer.lora_b.new_zeros(height, rank)
