"""Names of settings in other systems, for the hint that answers one of them here."""

from types import MappingProxyType

_HERE = {
    "optimisation.learning_rate": "lr learningrate learning_rate",
    "optimisation.steps": "max_steps total_training_steps train_steps num_steps "
    "total_epochs num_train_epochs num_epochs max_epochs",
    "optimisation.groups_per_mini_batch": "batch_size train_batch_size ppo_mini_batch_size mini_batch_size "
    "per_device_train_batch_size rollout_batch_size",
    "optimisation.micro_batch_tokens": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_train_batch_size",
    "optimisation.epochs_per_step": "ppo_epochs num_iterations",
    "optimisation.warmup_updates": "lr_warmup_steps num_warmup_steps",
    "optimisation.schedule": "lr_scheduler lr_scheduler_type",
    "optimisation.max_grad_norm": "grad_clip clip_grad gradient_clipping",
    "optimisation.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "algorithm.kl.coefficient": "kl_coef kl_loss_coef init_kl_coef kl_beta beta",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef ent_coef",
    "algorithm.advantage.kind": "adv_estimator advantage_estimator",
    "algorithm.policy_loss.clip_low": "cliprange clip_range clip_ratio clip_ratio_low eps_clip epsilon",
    "algorithm.policy_loss.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "algorithm.aggregation.mode": "loss_agg_mode loss_type",
    "rollout.group_size": "num_generations n_samples_per_prompt n",
    "rollout.sampling.max_new_tokens": "max_completion_length max_response_length generate_max_len response_length",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len prompt_length",
    "data.path": "train_files train_dataset dataset_name",
    "data.prompt_column": "prompt_key input_key",
    "data.label_column": "label_key",
    "evaluation.path": "val_files eval_dataset",
    "reward.components": "reward_funcs reward_fn custom_reward_function",
    "model.dtype": "torch_dtype bf16",
    "model.path": "model_name model_name_or_path pretrain",
    "evaluation.every_versions": "eval_steps test_freq eval_freq",
    "checkpoint.every_steps": "save_steps save_freq",
}

OTHER_NAMES = MappingProxyType({name: path for path, names in _HERE.items() for name in names.split()})
"""From a name in TRL, verl, OpenRLHF or ROLL to the key that says the same here."""
