"""What verl's own files say and nothing here reads: at these values it asks for nothing.

Whole configurations, such as Hydra writes beside a run, hold all of it. Values are those of verl's own files of
defaults, 0.7 and 0.9 (verl/trainer/config/_generated_*.yaml).
"""

from collections.abc import Mapping
from typing import Any

from flotilla.importers.parameter import Inherit, Parameter, ignored, refused, unsupported

WHY = "at another value than verl's own it is not offered: leave it out"
SPEED = "how another engine shards, offloads, measures or stores is its own matter: what is computed is the same"

VALUES: Mapping[tuple[str, ...], Mapping[str, tuple[Any, ...]]] = {
    ("actor_rollout_ref.actor",): {
        "load_weight": (True,),
    },
    ("actor_rollout_ref.actor.checkpoint",): {
        "mbridge_config": ({},),
    },
    ("actor_rollout_ref.actor.optim",): {
        "decay_type": ("linear",), "eps": (1e-08,), "exp_avg_dtype": ("fp32",), "exp_avg_sq_dtype": ("fp32",),
        "lr_decay_ratio": (1.0,), "lr_min": (0.0,), "lr_start": (0.0,), "main_grads_dtype": ("fp32",),
        "min_lr_factor": (0.0,), "muon_coefficient_type": ("quintic",), "muon_extra_scale_factor": (1.0,),
        "muon_fp32_matmul_prec": ("medium",), "muon_match_adamw_update_rms": (False,), "muon_momentum": (0.95,),
        "muon_nesterov": (False,), "muon_num_ns_steps": (5,), "muon_scalar_optimizer": ("adam",),
        "muon_scale_mode": ("spectral",), "muon_split_qkv": (True,), "muon_tp_mode": ("blockwise",),
        "name": ("AdamW",), "use_checkpoint_opt_param_scheduler": (False,),
        "use_layer_wise_distributed_optimizer": (False,), "use_precision_aware_optimizer": (False,),
        "zero_indexed_step": (True,),
    },
    ("actor_rollout_ref.actor.qat",): {
        "activation_observer": ("static_minmax",), "enable": (False,), "group_size": (16,),
        "ignore_patterns": (["lm_head", "embed_tokens", "re:.*mlp.gate$"],), "mode": ("w4a16",),
        "quantization_config_path": (None,),
    },
    ("actor_rollout_ref.actor.router_replay",): {
        "record_file": (None,), "replay_file": (None,),
    },
    ("actor_rollout_ref.ref.router_replay",): {
        "mode": ("disabled",), "record_file": (None,), "replay_file": (None,),
    },
    ("actor_rollout_ref.model",): {
        "hf_config_path": (None,), "tokenizer_path": (None,),
    },
    ("actor_rollout_ref.model.lora", "critic.model.lora",): {
        "a2a_experimental": (False,), "adapter_path": (None,), "alpha": (32,), "dropout": (0.0,),
        "dropout_position": ("pre",), "dtype": (None,), "exclude_modules": ([],), "freeze_language_model": (True,),
        "freeze_vision_model": (True,), "freeze_vision_projection": (True,), "lora_A_init_method": ("xavier",),
        "lora_B_init_method": ("zero",), "merge": (False,), "rank": (0,),
        "target_modules": (["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],), "type": ("lora",),
    },
    ("actor_rollout_ref.model.tiled_mlp", "critic.model.tiled_mlp",): {
        "enabled": (False,), "num_shards": (4,),
    },
    ("actor_rollout_ref.ref",): {
        "load_weight": (True,),
    },
    ("actor_rollout_ref.ref.optim",): {
        "betas": ([0.9, 0.999],), "clip_grad": (1.0,), "decay_type": ("linear",), "eps": (1e-08,), "lr": (0.001,),
        "lr_warmup_steps": (-1,), "lr_warmup_steps_ratio": (0.0,), "min_lr_factor": (0.0,), "name": ("AdamW",),
        "total_training_steps": (-1,), "weight_decay": (0.01,),
    },
    ("actor_rollout_ref.rollout",): {
        "full_determinism": (False,),
        "logprobs_mode": ("processed_logprobs",), "moe_load_balance_metrics_interval": (0,),
        "n_gpus_per_node": (8,), "nnodes": (0,), "quantization": (None,), "quantization_config_file": (None,),
        "scheduling_policy": ("fcfs",), "seed": (42,), "skip_dump_dir": ("/tmp/rollout_dump",),  # noqa: S108
        "skip_rollout": (False,), "skip_tokenizer_init": (True,),
    },
    ("actor_rollout_ref.rollout.checkpoint_engine",): {
        "custom_backend_module": (None,),
    },
    ("actor_rollout_ref.rollout.disaggregation",): {
        "bootstrap_port": (None,), "decode_replicas": (1,), "decode_tensor_model_parallel_size": (None,),
        "enabled": (False,), "ib_device": (None,), "prefill_replicas": (1,), "transfer_backend": ("nixl",),
    },
    ("actor_rollout_ref.rollout.layer_name_map",): {
        "gate_proj_layer_name": ("gate_up",), "qkv_layer_name": ("qkv",),
    },
    ("critic",): {
        "enable": (None,), "grad_clip": (1.0,), "load_weight": (True,),
        "loss_scale_factor": (None,), "shuffle": (False,),
    },
    ("critic.checkpoint",): {
        "async_save": (False,), "load_contents": (["model", "optimizer", "extra"],), "mbridge_config": ({},),
        "save_contents": (["model", "optimizer", "extra"],), "contents": (["model", "optimizer", "extra"],),
    },
    ("critic.model",): {
        "custom_chat_template": (None,), "enable_activation_offload": (False,), "exclude_modules": (None,),
        "external_lib": (None,), "hf_config_path": (None,), "lora_adapter_path": (None,), "override_config": ({},),
        "use_fused_kernels": (False,), "use_liger": (False,), "use_shm": (False,),
    },
    ("critic.model.fused_kernel_options",): {
        "impl_backend": ("torch",),
    },
    ("critic.model.override_config",): {
        "model_config": ({},),
    },
    ("critic.model.override_config.moe_config",): {
        "freeze_moe_router": (False,),
    },
    ("critic.optim",): {
        "betas": ([0.9, 0.999],), "clip_grad": (1.0,), "decay_type": ("linear",), "eps": (1e-08,),
        "exp_avg_dtype": ("fp32",), "exp_avg_sq_dtype": ("fp32",), "lr_decay_ratio": (1.0,),
        "lr_decay_steps": (None,), "lr_decay_style": ("constant",), "lr_min": (0.0,),
        "lr_scheduler_type": ("constant", "cosine",), "lr_start": (0.0,), "lr_warmup_init": (0.0,),
        "lr_wsd_decay_steps": (None,),
        "lr_wsd_decay_style": ("exponential",), "main_grads_dtype": ("fp32",), "min_lr": (0.0,),
        "min_lr_factor": (0.0,), "min_lr_ratio": (0.0,), "muon_coefficient_type": ("quintic",),
        "muon_extra_scale_factor": (1.0,), "muon_fp32_matmul_prec": ("medium",),
        "muon_match_adamw_update_rms": (False,), "muon_momentum": (0.95,), "muon_nesterov": (False,),
        "muon_num_ns_steps": (5,), "muon_scalar_optimizer": ("adam",), "muon_scale_mode": ("spectral",),
        "muon_split_qkv": (True,), "muon_tp_mode": ("blockwise",), "name": ("AdamW",), "num_cycles": (0.5,),
        "optimizer": ("adam", "AdamW", "adamw",), "optimizer_impl": ("torch.optim",),
        "override_optimizer_config": ({}, None,), "total_training_steps": (-1,),
        "use_checkpoint_opt_param_scheduler": (False,), "use_layer_wise_distributed_optimizer": (False,),
        "use_precision_aware_optimizer": (False,), "warmup_style": (None,), "weight_decay": (0.01,),
        "weight_decay_incr_style": ("constant",), "zero_indexed_step": (True,),
    },
    ("data",): {
        "function_tool_path": (None,), "mm_processor_kwargs": ({},), "tool_config_path": (None,),
    },
    ("data.datagen", "trainer.v1.sampler.custom_sampler",): {
        "name": (None,), "path": (None,),
    },
    ("distillation",): {
        "teacher_key": ("data_source",),
    },
    ("distillation.teacher_models.teacher_model",): {
        "key": (None,),
    },
    ("reward.reward_manager",): {
        "source": ("register",),
    },
    ("reward.sandbox_fusion",): {
        "max_concurrent": (64,), "memory_limit_mb": (1024,), "url": (None,),
    },
    ("reward_manager",): {
        "name": ("naive",), "source": ("register",),
    },
    ("reward_manager.module", "reward.reward_manager.module",): {
        "name": ("custom_reward_manager",), "path": (None,),
    },
    ("reward_model",): {
        "load_weight": (True,), "reward_loop_class_name": (None,), "reward_loop_module_path": (None,),
        "reward_loop_source": ("register", None,),
        "use_reward_loop": (True,),
    },
    ("reward_model.model",): {
        "override_config": ({},),
    },
    ("sandbox_fusion",): {
        "max_concurrent": (None,), "memory_limit_mb": (None,), "url": (None,),
    },
    ("skip.rollout", "skip.rollout_tq", "skip.async_rollout",): {
        "action": ("cache",), "dump_dir": ("~/.verl/rollout_dump",), "enable": (False,), "steps": ([],),
    },
    ("trainer",): {
        "esi_redundant_time": (0,), "use_v1": (True,),
    },
    ("trainer.v1",): {
        "sync": ({},), "trainer_mode": ("sync",),
    },
    ("trainer.v1.colocate_async",): {
        "num_warmup_batches": (1,),
    },
    ("trainer.v1.sampler",): {
        "max_off_policy_strategy": ("drop",), "max_off_policy_threshold": (8,), "sampler_kwargs": ({},),
        "sync_refill_failed_groups": (False,),
    },
    ("trainer.v1.separate_async",): {
        "num_warmup_batches": (1,), "parameter_sync_step": (4,),
    },
    ("trainer.v1.separate_async.hybrid_rollout",): {
        "adaptive_switch_threshold": (True,), "enable_switch": (False,), "switch_cost_window_size": (3,),
        "switch_threshold_ratio": (0.4,), "switch_threshold_release_steps": (2,),
        "switch_threshold_step_down": (0.03,), "switch_threshold_step_up": (0.05,),
    },
}  # fmt: skip
"""Values by section and name, the first of the newer release."""

COPIES = (
    *(f"actor_rollout_ref.actor.{name}" for name in ("rollout_n", "use_fused_kernels", "use_remove_padding",
                                                     "pad_to_length", "entropy_from_logits_chunk_size",
                                                     "calculate_entropy")),
    *(f"actor_rollout_ref.ref.{name}" for name in ("rollout_n", "pad_to_length", "entropy_from_logits_chunk_size")),
    *(f"critic.{name}" for name in ("rollout_n", "data_loader_seed", "nccl_timeout")), "reward_model.nccl_timeout",
)  # fmt: skip
"""Copies of other parameters, and what bounds a pass or a wait."""

ROWS: tuple[Parameter, ...] = (
    *ignored("a copy of another parameter, or a bound of a pass or a wait: read where it is written", *COPIES),
    refused(
        "critic.model.tokenizer_path",
        "the critic reads the policy's tokens: leave it out",
        default=Inherit("actor_rollout_ref.model.path"),
        harmless=(None,),
    ),
    *(
        refused(f"{section}.{name}" if section else name, WHY, default=values[0], harmless=values)
        for sections, names in VALUES.items()
        for section in sections
        for name, values in names.items()
    ),
    *unsupported(
        SPEED,
        "actor_rollout_ref.actor.torchtitan",
        "actor_rollout_ref.ref.torchtitan",
        "critic.torchtitan",
        "critic.veomni",
        "critic.model.mtp",
        "reward_model.megatron",
        "actor_rollout_ref.rollout.prometheus",
        "actor_rollout_ref.rollout.mtp",
        "actor_rollout_ref.rollout.qat",
        "transfer_queue",
        is_tree=True,
    ),
)
