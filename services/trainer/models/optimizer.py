"""AdamW on float32 masters, a learning-rate schedule, and one clip of the global gradient norm.

Where the model is float32, its parameters are the masters. Where it is bfloat16, a float32 copy of each parameter is
trained and rounded into the model after every update, and gradients of micro-batches add up in float32: bfloat16's
8 bits would swallow updates smaller than 1/256 of a weight. ``masters: model`` trains the bfloat16 weights themselves.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from flotilla.services.trainer.models.offloading import ParkedTensors
from flotilla.services.trainer.weights.parts import local_of, localized
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.errors import ModelError

BUCKET_BYTES = 256 << 20
"""So much of the parameters at a time; their moments take twice that."""


class StreamedStep:
    """Steps to the same bits as the optimiser would by itself: each element's update depends on no other's.

    Args:
        adam: the optimiser; its state is empty.
        masters: all parameters that it updates.
    """

    def __init__(self, adam: torch.optim.Optimizer, masters: Iterable[nn.Parameter]) -> None:
        self._adam = adam
        self._buckets = list(_buckets(masters))
        self._parked: dict[nn.Parameter, ParkedTensors] = {}

    def park(self) -> None:
        """Move the moments that were loaded to the host."""
        self._parked = {}
        for bucket in self._buckets:
            self._park_new(bucket)

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        gradients = {id(master): master.grad for bucket in self._buckets for master in bucket}
        self._show(gradients, None)
        for bucket in self._buckets:
            self._show(gradients, bucket)
            with ExitStack() as stack:
                for parked in filter(None, map(self._parked.get, bucket)):
                    stack.enter_context(parked.on_device())
                self._adam.step()
            self._park_new(bucket)
            self._show(gradients, None)
        for bucket in self._buckets:
            self._show(gradients, bucket)

    def on_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the same tensors with their values in the host's memory."""
        found = dict(tensors)
        for parked in self._parked.values():
            found = {name: parked.on_host(tensor) for name, tensor in found.items()}
        return found

    def _show(self, gradients: Mapping[int, Tensor | None], bucket: Sequence[nn.Parameter] | None) -> None:
        """Let the optimiser see the gradients of a bucket; None: of nothing."""
        for master in bucket if bucket is not None else (each for shown in self._buckets for each in shown):
            master.grad = None if bucket is None else gradients[id(master)]

    def _park_new(self, bucket: Sequence[nn.Parameter]) -> None:
        """Park the moments that a bucket has got: a parameter has none before the first update with a gradient."""
        for master in bucket:
            state = self._adam.state.get(master)
            if state and master not in self._parked:
                self._parked[master] = ParkedTensors(each for each in state.values() if isinstance(each, Tensor))


def _buckets(masters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for master in masters:
        bucket.append(master)
        if sum(each.numel() * each.element_size() for each in bucket) >= BUCKET_BYTES:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


@dataclass(frozen=True)
class UpdateResult:
    """What one optimiser update did.

    Attributes:
        grad_norm: global L2 norm before clipping.
        learning_rate: that was used.
        is_applied: False if the gradient was not finite and the update was left out.
    """

    grad_norm: float
    learning_rate: float
    is_applied: bool


def learning_rate_at(update: int, total_updates: int, config: OptimisationConfig) -> float:
    """Compute the learning rate of an update, numbered from 0.

    Warm-up takes update ``u`` the share ``(u + 1) / warmup_updates`` of the way from ``warmup_start_ratio`` to the
    peak; linear, cosine and wsd reach ``min_learning_rate_ratio`` at the last update, or at that of ``decay_updates``;
    inverse_sqrt is ``sqrt(w / (u + 1))`` with ``w = max(warmup_updates, 1)``.
    """
    warmup, floor = config.warmup_updates, config.min_learning_rate_ratio
    if update < warmup:
        first = config.warmup_start_ratio
        return config.learning_rate * (first + (1 - first) * (update + 1) / warmup)
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * max(floor, math.sqrt(max(warmup, 1) / (update + 1)))
    end = (config.decay_updates or total_updates) - 1
    start = warmup if config.wsd_decay_updates is None else max(warmup, end - config.wsd_decay_updates)
    progress = min(1.0, max(0.0, (update - start) / (end - start))) if end > start else 1.0
    if config.schedule == "cosine":
        progress *= 2 * config.cosine_cycles
    kind = config.wsd_decay if config.schedule == "wsd" else config.schedule
    return config.learning_rate * (floor + (1 - floor) * _SHAPES[kind](progress))


_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}


class PolicyOptimizer:
    """Updates a model's parameters from the gradients that micro-batches left on them.

    Args:
        parameters: by name; those without ``requires_grad`` are not touched.
        config: the optimisation section.
        total_updates: of the whole experiment, for the schedule.
        is_offloaded: whether the moments are in the host's memory between updates.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimisationConfig,
        total_updates: int,
        *,
        is_offloaded: bool = False,
    ) -> None:
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self._config = config
        self._total_updates = total_updates
        self._masters = {name: _master_of(parameter, config.masters) for name, parameter in self._parameters.items()}
        self._alike = _alike(self._masters.values())
        least = 0 if config.decay_all else 2
        decayed = [[master for master in alike if master.dim() >= least] for alike in self._alike]
        plain = [[master for master in alike if master.dim() < least] for alike in self._alike]
        groups = [{"params": each, "weight_decay": config.weight_decay} for each in decayed]
        groups += [{"params": each, "weight_decay": 0.0} for each in plain]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )
        self._streamed = StreamedStep(self._adam, self._masters.values()) if is_offloaded else None
        self.updates = 0

    def follow(self, config: OptimisationConfig) -> None:
        """Take learning rate, schedule and clip from another section from now on."""
        self._config = config

    @property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """What is trained, by name: in float32, unless the spec has the model's own weights trained."""
        return self._masters

    @property
    def gradient_bytes(self) -> int:
        """What the gradients of all masters take between a backward pass and the update."""
        return sum(local_of(each).numel() * each.element_size() for each in self._masters.values())

    @property
    def missing_moment_bytes(self) -> int:
        """What the first update will take for its moments."""
        return 0 if self._adam.state or self._streamed is not None else 2 * self.gradient_bytes

    def clear(self) -> None:
        """Forget the gradients of a mini-batch that was not computed to its end."""
        for each in (*self._masters.values(), *self._parameters.values()):
            each.grad = None

    def collect(self) -> None:
        """Add the gradients of a micro-batch to the masters'; nothing to do where they are the same tensors."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def add_zero(self) -> None:
        """Give a gradient of 0 to what has none: an update whose loss needed no pass still moves by its momentum."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def update(self) -> UpdateResult:
        """Clip, step, and clear the gradients. A gradient that is not finite is thrown away; the schedule continues."""
        rate = learning_rate_at(self.updates, self._total_updates, self._config)
        limit = self._config.max_grad_norm
        grad_norm = _clip(self._alike, math.inf if limit is None else limit)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            for group in self._adam.param_groups:
                group["lr"] = rate
            (self._adam if self._streamed is None else self._streamed).step()
            self._round_into_model()
        for master in self._masters.values():
            master.grad = None
        self.updates += 1
        return UpdateResult(grad_norm, rate, is_finite)

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def state(self) -> dict[str, Tensor]:
        """Return all state as named tensors: both moments and the step count of each parameter, and masters."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value.detach()
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors if self._streamed is None else self._streamed.on_host(tensors)

    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Load what ``state`` returned.

        Raises:
            ModelError: the tensors are of another model.
        """
        self.updates = updates
        for name, master in self._masters.items():
            found = {key: tensors[f"{key}/{name}"] for key in _ADAM_STATE if f"{key}/{name}" in tensors}
            if found.get("exp_avg", master).shape != master.shape:
                raise ModelError(f"the checkpoint's optimiser state of {name} has another shape than the model")
            if found:
                # Moments are of the masters' element type, which may be another than in the run that wrote them.
                # The count of steps is a scalar beside the shard: the fused kernel takes both from one device.
                device = local_of(master).device
                self._adam.state[master] = {
                    key: value.to(device).clone() if key == "step" else localized(value.to(master.dtype), master)
                    for key, value in found.items()
                }
            if (parameter := self._parameters[name]) is not master:
                with torch.no_grad():
                    # Without one it begins as the weight is now, which may have been loaded since it was made.
                    kept = tensors.get(f"master/{name}")
                    master.copy_(parameter if kept is None else localized(kept, master))
        if self._streamed is not None:
            self._streamed.park()
        expected = {f"{key}/{name}" for name in self._masters for key in (*_ADAM_STATE, "master")}
        unknown = sorted(set(tensors) - expected)
        if unknown:
            raise ModelError(f"the checkpoint's optimiser state has {unknown[0]}, which the model does not have")


_ADAM_STATE = ("exp_avg", "exp_avg_sq", "step")


def _alike(masters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by how ranks divide them: operations on several tensors at once take those of one kind only."""
    found: dict[object, list[nn.Parameter]] = defaultdict(list)
    for master in masters:
        found[(master.device_mesh, master.placements) if isinstance(master, DTensor) else None].append(master)
    return list(found.values())


def _clip(groups: Sequence[list[nn.Parameter]], limit: float) -> float:
    """Scale all gradients so that their common norm is at most ``limit``; returns the norm before."""
    norms = [_norm_of([each.grad for each in alike if each.grad is not None]) for alike in groups]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for alike in groups:
        nn.utils.clip_grads_with_norm_(alike, limit, total)
    return float(total)


def _norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Compute the norm of gradients that are all divided alike, over all ranks; every rank gets the same bits."""
    norm = nn.utils.get_total_norm([local_of(each) for each in gradients])
    if not gradients or not isinstance(gradients[0], DTensor):
        return norm
    squared = norm.square()
    for axis, placement in enumerate(gradients[0].placements):
        if not isinstance(placement, Replicate):
            dist.all_reduce(squared, group=gradients[0].device_mesh.get_group(axis))
    return squared.sqrt()


def _master_of(parameter: nn.Parameter, kind: str) -> nn.Parameter:
    if parameter.dtype == torch.float32 or kind == "model":
        return parameter
    return nn.Parameter(parameter.detach().float().clone())
