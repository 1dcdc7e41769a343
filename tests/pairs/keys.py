"""Which keys of a spec the table has, and which of them touch no state that others touch."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

from flotilla.shared.config.spec import ExperimentSpec
from tests.pairs.table import FLEET, TRAINER

SECTIONS: Final = (
    "seed", "job", "model", "rollout", "algorithm", "optimisation", "asynchrony", "parallelism", "evaluation",
    "checkpoint", "samples", "resources",
)  # fmt: skip
"""Sections whose keys decide what trainer, rollouts and gateway keep."""

APART: Mapping[str, tuple[str, ...]] = {
    "what an update is computed from, and nothing is kept of": (
         "job.max_tokens", "job.overlong", "job.train_on", "job.aggregation.*",
        "job.label_column", "job.beta", "job.desirable_weight", "job.undesirable_weight", "job.reference_point",
        "job.distillation.*", "job.chosen_column", "job.rejected_column", "job.loss.*", "job.supervised_coefficient",
        "job.held_out.*",
        "algorithm.advantage.*", "algorithm.policy_loss.*", "algorithm.aggregation.*", "algorithm.correction.*",
        "algorithm.kl.coefficient", "algorithm.kl.value_clamp", "algorithm.kl.log_ratio_bounds",
        "algorithm.kl.estimator", "algorithm.kl.gradient", "algorithm.kl.order", "algorithm.entropy_coefficient",
        "algorithm.policy_coefficient",
        "algorithm.supervised.coefficient", "algorithm.sequence_weights.*", "algorithm.resampling.power",
        "algorithm.distillation.coefficient", "algorithm.distillation.value_clamp",
        "algorithm.distillation.pure", "algorithm.value_loss.clip",
        "algorithm.value_loss.aggregation.*", "algorithm.value_loss.learning_rate",
        "algorithm.value_loss.warmup_updates",
        "optimisation.learning_rate", "optimisation.min_learning_rate_ratio", "optimisation.betas",
        "optimisation.epsilon", "optimisation.weight_decay", "optimisation.max_grad_norm", "optimisation.decay_all",
        "optimisation.warmup_start_ratio", "optimisation.decay_updates", "optimisation.wsd_decay_updates",
        "optimisation.wsd_decay", "optimisation.cosine_cycles", "optimisation.router.*", "optimisation.masters",
    ),
    "how much, where the table has whether": (
        "model.lora.alpha", "model.lora.rank_stabilised", "model.lora.targets", "model.lora.exclude",
        "optimisation.steps", "optimisation.groups_per_mini_batch", "asynchrony.max_lag",
        "asynchrony.publication.slice_megabytes", "checkpoint.every_steps", "checkpoint.keep",
        "evaluation.max_rows", "evaluation.temperature", "evaluation.top_k", "evaluation.top_p",
        "evaluation.pass_reward", "evaluation.max_new_tokens", "evaluation.deadline_seconds",
        "resources.rollouts.max", "resources.rollouts.on_demand", "resources.rewards.*", "resources.sandboxes.*",
        "resources.weight", "resources.priority", "resources.lending.over_steps",
    ),
    "which model, and where": (
        "model.path", "model.revision", "model.overrides", "algorithm.distillation.revision",
        "algorithm.distillation.dtype", "algorithm.distillation.servers",
        "algorithm.distillation.teachers", "algorithm.value_loss.revision",
    ),
    "needs several processes, GPUs, or a package that is no dependency: test_ranks.py, tests/integration/trainer": (
        "parallelism.device", "parallelism.threads", "parallelism.ranks", "parallelism.nodes", "parallelism.replicas",
        "parallelism.tensor_parallel", "parallelism.expert_parallel", "parallelism.sequence_parallel",
        "parallelism.critic.*", "parallelism.collective_timeout_seconds", "parallelism.offload.parameters",
        "parallelism.mixed_precision.*", "model.attention", "model.kernels", "model.lora.quantisation.*",
        "optimisation.compile_layers", "resources.trainer.devices", "resources.rollouts.devices", "model.vision_tower",
    ),
    "the sampled tokens and the engine's cache: test_engine.py and test_agents.py here, tests/contract/engine": (
        "rollout.group_size", "rollout.sampling.*", "rollout.engine.*", "rollout.episodes.*", "rollout.requires",
        "rollout.agents.*", "rollout.task_seconds",
    ),
    "needs a mixture of experts: tests/unit/trainer/test_router_replay.py, tests/integration/trainer/test_ranks.py": (
        "algorithm.router_replay",
    ),
    "a copy that nothing goes on from: tests/unit/trainer/test_storage.py, tests/unit/gateway/test_uploads.py": (
        "checkpoint.best.*", "checkpoint.upload_to", "asynchrony.publication.write_to_directory",
    ),
}  # fmt: skip
"""Keys that are in no row, by the reason; ``name.*`` are all keys of a section."""


def leaves(model: type[BaseModel] = ExperimentSpec, prefix: str = "") -> Iterator[str]:
    """Go through the dotted keys of a section that have no keys of their own."""
    for name, field in model.model_fields.items():
        sections = _sections(field.annotation)
        for section in sections:
            yield from leaves(section, f"{prefix}{name}.")
        if not sections:
            yield f"{prefix}{name}"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {tuple, list, dict}:
        return []
    return [each for part in get_args(annotation) for each in _sections(part)]


def is_named(key: str, names: frozenset[str]) -> bool:
    """Whether a key, or a section that it is in, is among names."""
    parts = key.split(".")
    return key in names or any(".".join([*parts[:end], "*"]) in names for end in range(1, len(parts)))


def keys_of_table() -> frozenset[str]:
    """Name the keys that some value of the table sets; a list of sections stands for their keys."""
    found = {
        key for options in (TRAINER, FLEET) for values in options.values() for each in values.values() for key in each
    }
    return frozenset(found | {f"{key}.*" for key in found})
