"""The memory of the trainer's process at its peak, from a spec and a model's sizes. Pure.

    base + weights (+ masters, reference, critic, kept versions) + moments + gradients + the largest pass + images

A pass is at its largest at one of three times: when the output layer's gradient is computed and everything is kept,
when the last layer's is, and at the end, where a tied embedding has two gradients to add.

Beside the policy a trainer loads teachers, and what a critic begins as.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from flotilla.shared.config.rules.publication import publishes_adapters
from flotilla.shared.config.sections.job import RewardModelJobConfig
from flotilla.shared.config.spec import ExperimentSpec, other_models
from flotilla.shared.errors import ModelError
from flotilla.shared.models.hub import model_directory
from flotilla.shared.sizes.batches import StepArithmetic, arithmetic_of
from flotilla.shared.sizes.model import ModelSizes, read_sizes
from flotilla.shared.sizes.parts import Footprint, Part, counted
from flotilla.shared.sizes.passes import (
    How,
    PassSizes,
    head_bytes,
    hole_bytes,
    kept_bytes,
    layer_bytes,
    pending_bytes,
    working_bytes,
)

BASE_BYTES: Final = 310 << 20
"""What the process has before it loads anything: the interpreter, torch and transformers, measured."""
MOST_TOKENS: Final = {"cpu": 8192, "cuda": 131_072}
LEAST_TOKENS: Final = 256
"""Bounds of ``optimisation.micro_batch_tokens: auto``; as in ``services/trainer/learning/pass_sizes.py``."""
USED_SHARE: Final = {"cpu": 0.5, "cuda": 0.8}
CRITIC: Final = "algorithm.value_loss.path"
IMAGES: Final = 2
"""Images of a publication: one is served while the next is written."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What the largest pass takes, and which it is.

    Attributes:
        largest: the pass.
        num_bytes: gradients of all weights included.
        gradients: of them, bytes of gradients.
        least: what any pass takes, however short its samples are: what there is of gradients at its end.
        kept: of what layers keep, what ``parallelism.offload.activations`` moves.
    """

    largest: PassSizes
    num_bytes: int
    gradients: int
    least: int
    kept: int


def trainer_footprint(
    spec: ExperimentSpec,
    sizes: ModelSizes,
    *,
    free: int | None = None,
    others: Mapping[str, ModelSizes] | None = None,
    publishes: bool = True,
) -> Footprint:
    """Predict the memory of one process of the trainer.

    Args:
        spec: of the experiment; where the device is ``auto``, a CPU is meant.
        sizes: of its model.
        free: bytes that ``micro_batch_tokens: auto`` divides; None: as many as its largest bound needs.
        others: sizes of ``other_models``, as far as they are known; the rest is not counted.
        publishes: whether the images are counted with it: of all ranks there is one, in the leader's shared memory.
    """
    if isinstance(spec.job, RewardModelJobConfig):
        sizes = sizes.as_scorer()
    device = "cuda" if spec.parallelism.device.startswith("cuda") else "cpu"
    size = weight_size(spec)
    shards = max(1, spec.parallelism.ranks // spec.parallelism.replicas)
    trained = trained_parameters(spec, sizes)
    standing = [*_standing(spec, sizes, size, trained, shards), *_others(spec, sizes, size, shards, others or {})]
    pass_, bound = _pass(spec, sizes, size, trained, standing, device, free)
    parts = [Part("process", BASE_BYTES, "interpreter and torch", is_on_host=True), *standing]
    largest = pass_.largest
    offload = spec.parallelism.offload
    gradients = counted(trained, pass_.gradients / max(1, trained))
    parts.append(Part("gradients", pass_.gradients // shards, gradients, offload.parameters))
    of_pass_ = pass_.num_bytes - pass_.gradients
    moved = min(of_pass_, pass_.kept) if offload.activations and device == "cuda" else 0
    # What comes to a device of offloaded gradients, layer by layer, is not predicted, and counted as nothing.
    least = 0 if offload.parameters else max(0, pass_.least - pass_.gradients)
    told = f"{largest.positions} tokens, {largest.sequences} samples of {largest.slots // largest.sequences}"
    parts.append(Part("largest pass", of_pass_ - moved, told, least=min(least, of_pass_ - moved)))
    if device == "cpu":
        holes = hole_bytes(sizes, largest, _how(spec, size, device), spec.model.lora)
        parts.append(Part("holes in the heap", holes, f"{sizes.layers} layers, freed and not used again", least=0))
    parts.append(Part("offloaded activations", moved, told, is_on_host=True, least=0))
    if shards > 1:
        layer = max((math.prod(shape) for shape in sizes.shapes.values()), default=0)
        parts.append(Part("gathered weights", 2 * layer * size, "the largest weight, twice"))
    parts += _images(spec, sizes, size, trained) if publishes else []
    found = [each for each in parts if each.num_bytes]
    return Footprint("trainer", device, found, _remedies(spec, sizes, pass_, bound, trained, size))


def pass_of(spec: ExperimentSpec, step: StepArithmetic) -> PassSizes:
    """Fill the largest pass that a spec allows; with ``micro_batch_tokens: auto`` that of a device with room enough."""
    setting = spec.optimisation.micro_batch_tokens
    device = "cuda" if spec.parallelism.device.startswith("cuda") else "cpu"
    bound = MOST_TOKENS[device] if setting == "auto" else setting
    return step.largest_pass(bound, shares_prompts=spec.optimisation.packing != "padded")


def weight_size(spec: ExperimentSpec) -> int:
    """Bytes of a weight as the spec has it: ``auto`` is bfloat16 where all is on GPUs."""
    if spec.model.dtype == "auto":
        return 2 if spec.is_on_gpus else 4
    return 2 if spec.model.dtype == "bfloat16" else 4


def trained_parameters(spec: ExperimentSpec, sizes: ModelSizes) -> int:
    """Count the parameters that have a gradient."""
    if spec.model.lora is not None:
        return sizes.adapters(spec.model.lora)
    return sizes.parameters - sizes.frozen(spec.optimisation.freeze)


def _standing(spec: ExperimentSpec, sizes: ModelSizes, size: int, trained: int, shards: int) -> list[Part]:
    """List what is there between two steps, once an update was made."""
    has_masters = size == 2 and spec.optimisation.masters == "float32"
    of_master = 4 if has_masters else size
    on_host = spec.parallelism.offload.parameters
    weights = _weight_bytes(spec, sizes, size, shards)
    parts = [Part("weights", weights, counted(sizes.parameters, size), on_host)]
    if spec.model.lora is not None:
        parts.append(Part("adapters", trained * size // shards, counted(trained, size), on_host))
    if has_masters:
        parts.append(Part("float32 masters", 4 * trained // shards, counted(trained, 4), on_host))
    offloaded = on_host or spec.parallelism.offload.optimiser
    parts.append(Part("moments", 2 * of_master * trained // shards, counted(trained, 2 * of_master), offloaded))
    if spec.needs_reference and spec.model.lora is None:
        whole = sizes.parameters * size
        is_parked = on_host or spec.parallelism.offload.reference
        parts.append(Part("reference", whole // shards, counted(sizes.parameters, size), is_parked))
    if spec.optimisation.average_decay is not None:
        parts.append(Part("moving average", of_master * trained // shards, counted(trained, of_master), on_host))
    if spec.algorithm.old_log_probs == "recompute_at_version":
        # One beside those in use: the present weights, while another version's are in the model.
        versions = spec.asynchrony.resolved_max_lag + 2
        kept = trained if spec.model.lora is not None else sizes.parameters
        told = f"{versions} of {counted(kept, size)}"
        parts.append(Part("kept versions", versions * kept * size // shards, told, on_host))
    return parts


def _others(
    spec: ExperimentSpec, sizes: ModelSizes, size: int, shards: int, known: Mapping[str, ModelSizes]
) -> list[Part]:
    """List the critic, which trains whole, and teachers. A model of its own that is not known is not counted."""
    on_host, parts = spec.parallelism.offload.parameters, []
    models = other_models(spec)
    if spec.algorithm.needs_critic and (CRITIC not in models or CRITIC in known):
        critic = known.get(CRITIC, sizes).as_scorer()
        split = spec.parallelism.critic or spec.parallelism
        has_masters = size == 2 and spec.optimisation.masters == "float32"
        of_weight = size + 3 * (4 if has_masters else size) + (4 if has_masters else 0)
        num_bytes = critic.parameters * of_weight // max(1, spec.parallelism.ranks // split.replicas)
        parts.append(Part("critic", num_bytes, counted(critic.parameters, of_weight), on_host))
    for field, model in models.items():
        if field != CRITIC and field in known:
            of_weight = 2 if model.dtype == "bfloat16" else 4
            teacher = known[field].parameters
            parts.append(Part("teacher", teacher * of_weight // shards, counted(teacher, of_weight), on_host))
    return parts


def _weight_bytes(spec: ExperimentSpec, sizes: ModelSizes, size: int, shards: int) -> int:
    packing = spec.model.quantisation
    if packing is None:
        return sizes.parameters * size // shards
    linear = sum(map(math.prod, sizes.linear().values()))
    # Each rank has all that is packed.
    return round(linear * (4.13 if packing.double else 4.5) / 8) + (sizes.parameters - linear) * size // shards


def _how(spec: ExperimentSpec, size: int, device: str) -> How:
    return How(
        size=size,
        is_native=device == "cpu",
        recomputes=spec.optimisation.activation_checkpointing,
        trains_head=spec.model.lora is None and "lm_head.weight" not in spec.optimisation.freeze,
    )


def _pass(
    spec: ExperimentSpec,
    sizes: ModelSizes,
    size: int,
    trained: int,
    standing: list[Part],
    device: str,
    free: int | None,
) -> tuple[Taken, int]:
    how, step = _how(spec, size, device), arithmetic_of(spec)
    setting = spec.optimisation.micro_batch_tokens
    bound = MOST_TOKENS[device] if setting == "auto" else setting
    taken = of_pass(spec, sizes, how, step, bound, trained)
    if setting != "auto" or free is None:
        return taken, bound
    room = free * USED_SHARE[device] - sum(
        each.num_bytes for each in standing if device == "cpu" or not each.is_on_host
    )
    is_moved = device == "cuda" and spec.parallelism.offload.parameters
    while taken.num_bytes - taken.gradients * is_moved > room and bound > LEAST_TOKENS:
        bound = max(LEAST_TOKENS, bound // 2)
        taken = of_pass(spec, sizes, how, step, bound, trained)
    return taken, bound


def of_pass(spec: ExperimentSpec, sizes: ModelSizes, how: How, step: StepArithmetic, bound: int, trained: int) -> Taken:
    """Predict the memory of the largest pass, with the gradients present at that time."""
    largest = step.largest_pass(bound, shares_prompts=spec.optimisation.packing != "padded")
    has_masters = how.size == 2 and spec.optimisation.masters == "float32"
    gradients = trained * (4 if has_masters else how.size)
    kept, head = kept_bytes(sizes, largest, how), head_bytes(sizes, largest, how)
    pending = pending_bytes(sizes, how)
    # The gradients of an update's first pass come into being while what is kept is freed.
    before = gradients if step.passes(largest) > 1 else 0
    at_head = before + kept + head
    at_layer = before + kept + pending + working_bytes(sizes, largest, how)
    if how.recomputes:
        at_layer += layer_bytes(sizes, largest, how)
    at_end = gradients + 2 * pending + (trained * how.size if has_masters else 0)
    found = max(at_head, at_layer, at_end)
    moved = kept - (0 if how.recomputes else layer_bytes(sizes, largest, how))
    return Taken(largest, found, gradients if found == at_end else before, at_end, 0 if found == at_end else moved)


def _images(spec: ExperimentSpec, sizes: ModelSizes, size: int, trained: int) -> list[Part]:
    if not spec.needs_rollouts:
        return []
    publication = spec.asynchrony.publication
    on_wire = 2 if publication.wire_dtype == "bfloat16" else size
    parameters = trained if publishes_adapters(spec) else sizes.parameters
    num = IMAGES + (publication.delta is not None)
    if publication.quantisation is not None:
        return [
            Part("images to publish", num * parameters, f"{num} of {counted(parameters, 1)}", is_on_host=True),
            Part("whole image", parameters * on_wire, counted(parameters, on_wire), is_on_host=True),
        ]
    return [
        Part(
            "images to publish",
            num * parameters * on_wire,
            f"{num} of {counted(parameters, on_wire)}, in shared memory",
            is_on_host=True,
        )
    ]


def _remedies(
    spec: ExperimentSpec, sizes: ModelSizes, taken: Taken, bound: int, trained: int, size: int
) -> list[tuple[str, int]]:
    """List keys that make it smaller, with about what each would save."""
    device = "cuda" if spec.parallelism.device.startswith("cuda") else "cpu"
    how, step = _how(spec, size, device), arithmetic_of(spec)
    found: list[tuple[str, int]] = []

    def smaller(how: How, bound: int) -> int:
        return taken.num_bytes - of_pass(spec, sizes, how, step, bound, trained).num_bytes

    if not how.recomputes:
        found.append(("optimisation.activation_checkpointing: true", smaller(replace(how, recomputes=True), bound)))
    if bound > LEAST_TOKENS:
        fewer = max(LEAST_TOKENS, bound // 4)
        found.append((f"optimisation.micro_batch_tokens: {fewer}", smaller(how, fewer)))
    if spec.model.lora is None:
        adapted = 16 * sum(sum(shape) for shape in sizes.linear().values())
        of_trained = 3 * size + (4 if size == 2 and spec.optimisation.masters == "float32" else 0)
        found.append(("model.lora: {rank: 16}", of_trained * max(0, trained - adapted)))
    if size == 4:
        found.append(("model.dtype: bfloat16, optimisation.masters: model", 2 * sizes.parameters + 6 * trained))
    if spec.asynchrony.publication.wire_dtype is None and size == 4 and spec.needs_rollouts:
        found.append(("asynchrony.publication.wire_dtype: bfloat16", IMAGES * 2 * sizes.parameters))
    return sorted(((key, saved) for key, saved in found if saved > 0), key=lambda each: -each[1])


def read_others(spec: ExperimentSpec) -> tuple[dict[str, ModelSizes], list[str]]:
    """Read them, by the dotted field of their path, and list the fields of those that cannot be. Blocks for headers."""
    found: dict[str, ModelSizes] = {}
    unknown: list[str] = []
    for field, model in other_models(spec).items():
        try:
            found[field] = read_sizes(model_directory(model))
        except ModelError:
            unknown.append(field)
    return found, unknown
