"""What of the trainer's memory and kernels goes together, and what has no effect."""

from collections.abc import Iterator

from flotilla.shared.config.sections.algorithm import AlgorithmConfig
from flotilla.shared.config.sections.asynchrony import AsynchronyConfig, OnWeightUpdate
from flotilla.shared.config.sections.data import DataConfig
from flotilla.shared.config.sections.engine import EngineConfig, SglangEngineConfig, TorchEngineConfig
from flotilla.shared.config.sections.model import ModelConfig
from flotilla.shared.config.sections.optimisation import OptimisationConfig
from flotilla.shared.config.sections.parallelism import OffloadConfig, ParallelismConfig
from flotilla.shared.config.sections.rollout import RolloutConfig

RECORDING_ENGINES = ("torch", "sglang")
"""Kinds of engines that record which experts they choose."""


def check_compute(model: ModelConfig, parallelism: ParallelismConfig) -> None:
    """Check element types, attention and kernels.

    Raises:
        ValueError: they exclude one another, or the device.
    """
    precision = parallelism.mixed_precision
    if precision is not None and precision.reduce == model.dtype == "bfloat16":
        raise ValueError(
            "parallelism.mixed_precision with reduce bfloat16 has no effect while model.dtype is bfloat16, which "
            "layers compute and gradients travel in: set model.dtype to float32 or auto, or reduce to float32, or "
            "leave it out"
        )
    if model.attention not in {"auto", "sdpa"} and parallelism.sequence_parallel > 1:
        raise ValueError(
            f"model.attention {model.attention} and parallelism.sequence_parallel, which exchanges heads around sdpa, "
            "exclude each other: leave one of them out"
        )
    is_narrow = model.dtype != "float32" or precision is not None
    if model.attention.startswith("flash") and (parallelism.device == "cpu" or not is_narrow):
        raise ValueError(
            f"model.attention {model.attention} computes in bfloat16 on GPUs, and parallelism.device is "
            f"{parallelism.device} and model.dtype {model.dtype}: use cuda and bfloat16 (or "
            "parallelism.mixed_precision), or leave it at auto"
        )
    if model.kernels == "liger" and parallelism.device == "cpu":
        raise ValueError(
            "model.kernels liger are Triton's and compute on GPUs, and parallelism.device is cpu: leave it at auto"
        )


def check_quantisation(model: ModelConfig, offload: OffloadConfig, *, compiles_layers: bool) -> None:
    """Check that nothing is asked for that packed weights do not have.

    Raises:
        ValueError: something is.
    """
    if model.quantisation is None:
        return
    if compiles_layers:
        raise ValueError(
            "optimisation.compile_layers makes programs of torch's operators, and model.lora.quantisation unpacks "
            "weights by others: leave one of both out"
        )
    if offload.parameters:
        raise ValueError(
            "parallelism.offload.parameters moves weights that ranks divide, and those of model.lora.quantisation are "
            "whole on each: leave one of both out"
        )


def check_offload(offload: OffloadConfig, *, turns: str | None, has_adapters: bool, needs_reference: bool) -> None:
    """Check that what is offloaded is there, and not moved by something else as well.

    Args:
        turns: the key by which the trainer leaves its device at times; as of ``ResourcesConfig.turns``.

    Raises:
        ValueError: it is not, or is.
    """
    moved = [name for name in offload.chosen if name != "activations"]
    if moved and turns is not None:
        raise ValueError(
            f"parallelism.offload.{moved[0]} and {turns} both move what the trainer has off its device: leave one of "
            "both out"
        )
    if offload.reference and (has_adapters or not needs_reference):
        why = "the reference is the model without model.lora" if has_adapters else "no reference model is used"
        raise ValueError(f"parallelism.offload.reference has no effect, since {why}: leave it out")


def check_images(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, asynchrony: AsynchronyConfig, *, finished: bool
) -> None:
    """Check what does not go with images in prompts.

    Raises:
        ValueError: something of it is asked for.
    """
    teacher = algorithm.distillation
    for is_asked, name, way in (
        (finished, "job.kind sft, preference, kto or reward_model", "train with reinforcement"),
        *_images_at_servers(rollout.engine, asynchrony),
        (
            teacher is not None and bool(teacher.servers),
            "algorithm.distillation.servers, which are sent token ids alone",
            "let the trainer load the teacher (path or teachers)",
        ),
    ):
        if is_asked:
            raise ValueError(f"data.images does not go with {name}: {way}, or leave images out")


def _images_at_servers(engine: EngineConfig, asynchrony: AsynchronyConfig) -> Iterator[tuple[bool, str, str]]:
    """List what does not go with images where a server samples: whether it is asked for, what, and what to do."""
    if isinstance(engine, TorchEngineConfig):
        return
    yield (
        asynchrony.on_weight_update is OnWeightUpdate.CONTINUE,
        f"asynchrony.on_weight_update continue and rollout.engine.kind {engine.kind}, whose features of images are of "
        "the weights before",
        "use interrupt or drain",
    )
    yield (
        asynchrony.publication.lora == "adapters",
        f"asynchrony.publication.lora adapters and rollout.engine.kind {engine.kind}, which adds none to the tower",
        "publish merged",
    )
    if isinstance(engine, SglangEngineConfig):
        yield (
            engine.url is not None,
            "rollout.engine.url of kind sglang, a server that may keep what a tower made of images before its weights "
            "were replaced",
            "let the rollout start it",
        )
        way = engine.update_weights_from
        yield way != "disk", f"rollout.engine.update_weights_from {way}", "use disk"


def check_router_replay(
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    data: DataConfig,
    optimisation: OptimisationConfig,
    parallelism: ParallelismConfig,
    *,
    learns_from_rewards: bool,
) -> None:
    """Check what does not go with ``algorithm.router_replay``.

    Raises:
        ValueError: something of it is asked for.
    """
    mode = algorithm.router_replay
    if mode is None:
        return
    sequence, engine = parallelism.sequence_parallel, rollout.engine
    is_served_on_cpu = engine.kind == "sglang" and engine.url is None and engine.device == "cpu"
    for is_asked, name, way in (
        (not learns_from_rewards, "a job that trains no sampled answers", "leave it out"),
        (
            mode == "R2" and algorithm.old_log_probs != "recompute",
            f"algorithm.old_log_probs {algorithm.old_log_probs}, where no pass of the trainer comes before the updates",
            "set old_log_probs to recompute, or router_replay to R3",
        ),
        (
            mode == "R3" and engine.kind not in RECORDING_ENGINES,
            f"rollout.engine.kind {engine.kind}, whose routers are not recorded",
            f"use {' or '.join(RECORDING_ENGINES)}, or R2",
        ),
        (
            mode == "R3" and is_served_on_cpu,
            "rollout.engine.kind sglang on a CPU, where it keeps no record (its memory is CUDA's)",
            "use torch, or R2",
        ),
        (sequence > 1, f"parallelism.sequence_parallel {sequence}, which divides each sequence", "leave one out"),
        (
            optimisation.compile_layers,
            "optimisation.compile_layers, which makes one program of each layer",
            "leave one out",
        ),
        (data.images is not None, "data.images", "leave one out"),
    ):
        if is_asked:
            raise ValueError(f"algorithm.router_replay {mode} does not go with {name}: {way}")
