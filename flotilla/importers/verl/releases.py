"""Files of verl's releases up to 0.3.0, whose silent defaults are others: recognised by the keys that they write."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flotilla.importers.source import Source
from flotilla.importers.values import is_null
from flotilla.importers.verl.actor import ACTOR

IN_REWARD: Final = "algorithm.use_kl_in_reward"
COEFFICIENT: Final = "algorithm.kl_ctrl.kl_coef"
OLDER: Final = frozenset(
    {"data.val_batch_size", f"{ACTOR}.ppo_micro_batch_size", "critic.ppo_micro_batch_size",
     "reward_model.micro_batch_size", "actor_rollout_ref.rollout.log_prob_micro_batch_size",
     "actor_rollout_ref.ref.log_prob_micro_batch_size", f"{ACTOR}.fsdp_config.grad_offload",
     "critic.model.fsdp_config.grad_offload", COEFFICIENT}
)  # fmt: skip
"""Keys that later releases give no meaning by themselves."""
NEWER: Final = (
    IN_REWARD, "algorithm.norm_adv_by_std_in_grpo", "algorithm.rollout_correction", "algorithm.filter_groups",
    "algorithm.rollout_is", f"{ACTOR}.clip_ratio_", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.policy_loss",
    *(f"{ACTOR}.megatron.{name}" for name in ("param_offload", "optimizer_offload", "grad_offload", "expert_", "use_",
                                              "context_", "override_")),
    f"{ACTOR}.calculate_", f"{ACTOR}.entropy_", f"{ACTOR}.checkpoint.save_contents",
    f"{ACTOR}.optim.lr_decay", f"{ACTOR}.fsdp_config.forward_prefetch", f"{ACTOR}.fsdp_config.model_dtype",
    f"{ACTOR}.fsdp_config.strategy", f"{ACTOR}.profiler", f"{ACTOR}.router_replay", f"{ACTOR}.use_prefix_grouper",
    "actor_rollout_ref.model.lora", "actor_rollout_ref.model.use_fused_kernels", "actor_rollout_ref.model.use_shm",
    "actor_rollout_ref.rollout.mode", "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.calculate_log_probs", "actor_rollout_ref.rollout.layered_summon",
    "actor_rollout_ref.rollout.checkpoint_engine", "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.expert_parallel_size", "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "actor_rollout_ref.nccl_timeout", "async_training.", "data.custom_cls", "data.sampler", "data.trust_remote_code",
    "data.apply_chat_template_kwargs", "global_profiler", "ray_kwargs", "reward.", "reward_model.reward_kwargs",
    "reward_model.overlong_buffer", "reward_model.launch_reward_fn_async", "reward_model.sandbox_fusion",
    "trainer.device", "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.use_legacy_worker_impl",
)  # fmt: skip
"""Beginnings of keys that these releases do not have: where one stands the defaults are today's."""
CHANGED: Mapping[str, Any] = MappingProxyType({f"{ACTOR}.entropy_coeff": 0.001, f"{ACTOR}.clip_ratio_c": None})
"""Silent defaults of these releases, where today's are others; and the KL, which is off the reward or in the loss."""


def sign_of_older(written: Mapping[str, Any]) -> str | None:
    """Return a key that only releases up to 0.3.0 give a meaning; None where nothing shows one, or a newer key does."""
    if any(name.startswith(NEWER) for name in written):
        return None
    found = sorted(name for name in OLDER & set(written) if not is_null(written[name]))
    in_loss = str(written.get(f"{ACTOR}.use_kl_loss")).strip().lower() == "true"
    return next((name for name in found if not (in_loss and name == COEFFICIENT)), None)


def of_older(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return what such a release sets by itself, where the file does not; nothing for a later one."""
    if sign_of_older(written) is None:
        return {}
    in_loss = str(written.get(f"{ACTOR}.use_kl_loss")).strip().lower() == "true"
    found = {**CHANGED, IN_REWARD: not in_loss}
    return {name: value for name, value in found.items() if name not in written}


def told(source: Source) -> dict[str, Any]:
    """Begin the report with the release whose defaults are taken, and how to take today's."""
    names = {each.spelling: each.value for each in source.given.values() if each.where != "default"}
    names |= {spelling: value for tree in source.trees.values() for spelling, value in tree.items()}
    if IN_REWARD in source.given and (sign := sign_of_older(names)) is not None:
        source.note(
            f"{sign} is a key of verl's releases up to 0.3.0, whose defaults are taken: the KL is off the reward "
            "unless use_kl_loss is set, entropy_coeff is 0.001, and there is no dual clip; write "
            "algorithm.use_kl_in_reward for those of later releases"
        )
    return {}
