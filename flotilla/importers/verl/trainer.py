"""Rows of verl's ``trainer`` section, its fully asynchronous trainer, Ray, and what is no reinforcement learning."""

from flotilla.importers.parameter import (
    UNSET,
    Inherit,
    Parameter,
    Verdict,
    applied,
    ignored,
    refused,
    translated,
    unsupported,
)
from flotilla.importers.spelling import experiment_name
from flotilla.importers.values import count, flag, frequency, integer, number, text, texts
from flotilla.importers.verl.actor import ACTOR, FOLDER, PROFILING
from flotilla.importers.verl.launch import MODULE

ASYNC = "async_training"
ROLLOUT_ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
FULLY_ASYNC = {"data.train_batch_size": 0, "rollout.total_rollout_steps": 10_000}

TRAINER_ROWS: tuple[Parameter, ...] = (
    translated(MODULE, ("asynchrony.staleness_threshold", "asynchrony.max_lag"), text,
               "one-step-off samples one batch while it trains on the one before: it may run one version ahead, and "
               "what is in flight finishes before new weights; dapo is synchronous, its file of defaults is known",
               example="verl.experimental.one_step_off_policy.main_ppo"),
    translated("trainer.total_epochs", "optimisation.steps", integer,
               "passes over the data: with the number of its rows (--rows) and of a step's prompts, the steps",
               example=3, default=30, context={"trainer.total_training_steps": None}),
    translated("trainer.total_training_steps", "optimisation.steps", integer, "steps; wins over total_epochs",
               example=20, default=None),
    translated("trainer.experiment_name", "name", text, "letters, digits, dot, dash and underscore are kept",
               example="another one", default="gsm8k", translate=experiment_name),
    translated("trainer.save_freq", "checkpoint.every_steps", frequency,
               "steps (in fully asynchronous training versions); -1 is after the last step only", example=4,
               default=-1),
    translated("trainer.test_freq", "evaluation.every_versions", frequency,
               "steps, of one version each; -1 is at the start and the end only", example=4, default=-1),
    translated("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", integer, "newest checkpoints; null keeps all",
               example=3, default=None, context={"trainer.save_freq": 2}),
    applied("trainer.critic_warmup", "algorithm.value_loss.warmup_steps", integer, "steps of the critic alone",
            example=5, default=0, context={"algorithm.adv_estimator": "gae"}),
    translated("trainer.device", ("parallelism.device", "rollout.engine.device"), text,
               "cuda is cuda:0; where it is silent, and at npu, our own default: GPUs where there are some",
               example="cuda"),
    translated("trainer.logger", "tracking.trackers", texts,
               "wandb, mlflow, tensorboard, trackio, swanlab; file is jsonl, console is flotilla watch; where it is "
               "silent, none is fed",
               example=["console", "tensorboard"]),
    translated("trainer.project_name", "tracking.trackers", text,
               "project of wandb, trackio and swanlab, experiment of mlflow",
               example="another", default="verl_examples", context={"trainer.logger": ["wandb"]}),
    translated("trainer.val_only", "job.kind", flag, "true is an evaluation: the held-out problems are answered and "
               "graded once", example=True, default=False),
    translated("trainer.resume_from_path", "checkpoint.resume_from", text,
               "read with resume_mode resume_path; a checkpoint of ours: one of verl's is refused when it is started, "
               "to begin from its weights alone set model.path to their directory", example="/runs/mine@40",
               default=None, context={"trainer.resume_mode": "resume_path"}),
    translated("trainer.resume_mode", "checkpoint.resume_from", text,
               "resume_path begins from resume_from_path; auto is flotilla run --continue, disable --fresh",
               example="resume_path", default="auto", context={"trainer.resume_from_path": "/runs/mine@40"}),
    *ignored("all answers of every evaluation are kept (samples), and a right and a wrong one are shown with it",
             "trainer.log_val_generations"),
    *ignored("all groups of every step and evaluation are kept (samples), in parquet files in the run's own folder: "
             "see flotilla show", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    translated("trainer.default_hdfs_dir", "checkpoint.upload_to", text, "URL of a folder to which checkpoints are "
               "copied; the operator says which are allowed", example="hdfs://name/checkpoints", default=None,
               translate=lambda value: UNSET if value is None else value),
    *unsupported("a checkpoint is never deleted for having been read", "trainer.del_local_ckpt_after_load",
                 default=False),
    *unsupported("an evaluation at the start is always made; training does not wait for it", "trainer.val_before_train",
                 default=True, nothing=(None,)),
    translated("trainer.remove_previous_ckpt_in_save", "checkpoint.keep", flag,
               "true keeps the newest alone, whatever max_actor_ckpt_to_keep says", example=True, default=False,
               context={"trainer.save_freq": 2}),
    *unsupported("the critic's part is kept with its checkpoint, as checkpoint.keep says",
                 "trainer.max_critic_ckpt_to_keep", default=Inherit("trainer.max_actor_ckpt_to_keep")),
    *unsupported(FOLDER, "trainer.default_local_dir"),
    *ignored("ranks get shares of equal work by themselves", "trainer.balance_batch"),
    *ignored("there is no Ray here", "trainer.ray_wait_register_center_timeout", "ray_init.num_cpus",
             "ray_init.timeline_json_file"),
    *ignored("there is no Ray here", "ray_init", "ray_kwargs", is_tree=True),
    *unsupported(PROFILING, "trainer.controller_nsight_options.trace",
             "trainer.controller_nsight_options.cuda-memory-usage",
             "trainer.controller_nsight_options.cuda-graph-trace", "trainer.worker_nsight_options.trace",
             "trainer.worker_nsight_options.cuda-memory-usage", "trainer.worker_nsight_options.cuda-graph-trace",
             "trainer.worker_nsight_options.capture-range", "trainer.worker_nsight_options.capture-range-end",
             "trainer.worker_nsight_options.kill"),
    *unsupported(PROFILING, "global_profiler", "reward_model.profiler", "actor_rollout_ref.profiler", is_tree=True),
    *ignored("both of verl's sets of workers compute the same", "trainer.use_legacy_worker_impl"),
    *ignored("Hydra's own: it does not reach the trainer", "hydra", is_tree=True),
    *ignored("the files that it names are read with this one; verl's own are known", "defaults"),
)  # fmt: skip

ENGINES = {**FULLY_ASYNC, "rollout.n_gpus_per_node": 8, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2}

ASYNC_ROWS: tuple[Parameter, ...] = (
    applied(f"{ASYNC}.require_batches", "asynchrony.require_batches", count, "mini-batches of one step", example=2,
            default=1, context=FULLY_ASYNC),
    applied(f"{ASYNC}.trigger_parameter_sync_step", "asynchrony.trigger_parameter_sync_step", count,
            "steps between two versions", example=2, default=4, context=FULLY_ASYNC),
    applied(f"{ASYNC}.staleness_threshold", "asynchrony.staleness_threshold", number,
            "how far sampling may run ahead, as a share of one version's groups", example=0.5, default=0.1,
            context=FULLY_ASYNC),
    translated(f"{ASYNC}.partial_rollout", "asynchrony.on_weight_update", flag,
               "true interrupts and goes on under the new weights, false drains; nothing is in flight at threshold 0",
               example=False, default=True, context=FULLY_ASYNC),
    translated(f"{ASYNC}.use_rollout_log_probs", "algorithm.old_log_probs", flag,
               "the ratio is taken against the sampler; false: against the trainer's own before the step",
               example=False, default=True, context=FULLY_ASYNC),
    translated(f"{ASYNC}.compute_prox_log_prob", "algorithm.old_log_probs", flag,
               "the ratio is taken against the trainer's own log-probabilities at the version's start", example=True,
               default=False, context={**FULLY_ASYNC, f"{ASYNC}.trigger_parameter_sync_step": 1}),
    translated("rollout.total_rollout_steps", "optimisation.steps", integer,
               "prompts of the whole run, over those of a step (ppo_mini_batch_size times require_batches)",
               example=20_000, default=100, context=FULLY_ASYNC),
    translated("rollout.test_freq", "evaluation.every_versions", integer, "versions between two evaluations",
               example=5, default=1, context=FULLY_ASYNC),
    translated("rollout.nnodes", "resources.rollouts.min", count, "with the two below: engines that must be there",
               example=2, default=1, context=ENGINES),
    translated("rollout.n_gpus_per_node", "resources.rollouts.min", count, "GPUs over those of an engine",
               example=4, default=8, context=FULLY_ASYNC),
    translated("actor_rollout_ref.rollout.tensor_model_parallel_size", "resources.rollouts.min", count,
               "in fully asynchronous training GPUs of an engine, of which the services are made; no engine is split",
               example=4, default=2, harmless=(1,), context=ENGINES, unread=Verdict.UNSUPPORTED),
    *ignored("no trainer of verl reads it, though its file has it: they read trainer.total_epochs",
             "rollout.total_epochs"),
    *ignored("no trainer of verl reads it, though its file has it: they read actor_rollout_ref.rollout.n",
             "rollout.n"),
    translated("trainer.nnodes", "parallelism.nodes", count,
               "machines that the trainer's processes are on, 8 on each where n_gpus_per_node is silent; where "
               "trainer.device is cpu, where to run is not what to run",
               example=2, default=1, harmless=(1,),
               context={"trainer.n_gpus_per_node": 4}, unread=Verdict.UNSUPPORTED),
    translated("trainer.n_gpus_per_node", ("resources.trainer.devices", "parallelism.ranks"), count,
               "GPUs of the trainer on each node, with a training process on each, that share the weights; "
               "where trainer.device is cpu, where to run is not what to run", example=4,
               default=1, harmless=(1,), unread=Verdict.UNSUPPORTED),
    translated(f"{ASYNC}.checkpoint_engine.device_buffer_size_M", "asynchrony.publication.slice_megabytes", integer,
               "size of one broadcast, at most 64: larger ones gain nothing", example=16, context=FULLY_ASYNC),
    translated(f"{ROLLOUT_ENGINE}.update_weights_bucket_megabytes", "asynchrony.publication.slice_megabytes", integer,
               "size of one broadcast, at most 64: larger ones gain nothing", example=16, context={},
               aliases=("actor_rollout_ref.rollout.update_weights_bucket_megabytes",)),
    translated(f"{ROLLOUT_ENGINE}.backend", "asynchrony.publication.transport", text,
               "nccl is auto (nccl between GPUs), gloo is gloo; naive and delta_sharded, with the same weights, auto",
               example="gloo", context={}),
    *unsupported("how weights are packed on their way does not change them", f"{ROLLOUT_ENGINE}.engine_kwargs",
                 is_tree=True),
    applied(f"{ASYNC}.checkpoint_engine.overlap_broadcast_and_consume", "asynchrony.publication.overlap_load", flag,
            "the engine reads new weights while it samples; where it is silent, ours, true", example=False,
            context=FULLY_ASYNC),
    *ignored("weights always travel in buckets", f"{ASYNC}.checkpoint_engine.enable"),
    *unsupported("evaluations are the rollouts' work, and never stop training", f"{ASYNC}.use_trainer_do_validate"),
    *unsupported("how the fleet's engines are used is the fleet's own matter",
             f"{ASYNC}.concurrent_samples_per_replica", f"{ASYNC}.use_dynamic_resource_scheduling"),
)  # fmt: skip

OFFLINE = "of verl's main_eval, which scores answers made before and whose files are imported by themselves"
SFT = "of verl's trainer of supervised fine-tuning, whose files are imported by themselves (they name partial_pretrain)"

OTHER_ROWS: tuple[Parameter, ...] = (
    *unsupported("a step's samples come over the fleet's streams, and are held by the trainer",
                 "trainer.num_global_batch", "trainer.num_data_storage_units", "trainer.num_data_controllers",
                 "transfer_queue.enable"),
    *(refused(f"evaluation.{name}", OFFLINE, default=default,
              aliases=(name,) if name in {"data.path", "data.data_source_key", "data.reward_model_key"} else ())
      for name, default in (
        ("data.path", None), ("data.prompt_key", "prompt"), ("data.response_key", "responses"),
        ("data.data_source_key", "data_source"), ("data.reward_model_key", "reward_model"),
        ("custom_reward_function.path", None), ("custom_reward_function.name", "compute_score"),
    )),
    *(refused(f"sft.{name}", SFT, default=default, aliases=(name,)) for name, default in (
        ("optim.optimizer", "AdamW"), ("optim.optimizer_impl", "torch.optim"), ("optim.lr", 1e-5),
        ("optim.weight_decay", 0.01), ("optim.lr_warmup_steps_ratio", 0.1), ("optim.clip_grad", 1.0),
        ("optim.lr_scheduler", "cosine"), ("optim.override_optimizer_config", None),
        ("model.partial_pretrain", None), ("model.fsdp_config.model_dtype", "fp32"),
        ("model.fsdp_config.wrap_policy.min_num_params", 0), ("model.fsdp_config.cpu_offload", False),
        ("model.fsdp_config.offload_params", False), ("model.external_lib", None),
        ("model.enable_gradient_checkpointing", False), ("model.trust_remote_code", False), ("model.lora_rank", 0),
        ("model.lora_alpha", 16), ("model.target_modules", "all-linear"), ("model.use_liger", False),
    )),
    refused("data.response_key", "reinforcement learning samples its answers: leave it out; answers that were written "
            "before are read from a script of verl.trainer.main_eval or sft_trainer", default=None),
    refused("data.max_length", f"of prompt and written answer together: {SFT}", default=None),
)  # fmt: skip

LAUNCH_VARIABLES: dict[str, tuple[str, ...]] = {
    "project_name": ("trainer.project_name",),
    "exp_name": ("trainer.experiment_name",),
    "MODEL_PATH": ("actor_rollout_ref.model.path",),
    "CKPTS_DIR": ("trainer.default_local_dir",),
    "TRAIN_FILE": ("data.train_files",),
    "TEST_FILE": ("data.val_files",),
    "rollout_mode": ("actor_rollout_ref.rollout.mode",),
    "rollout_name": ("actor_rollout_ref.rollout.name",),
    "enable_overlong_buffer": ("reward_model.reward_kwargs.overlong_buffer_cfg.enable",),
    "overlong_buffer_len": ("reward_model.reward_kwargs.overlong_buffer_cfg.len",),
    "overlong_penalty_facto": ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",),
    "overlong_penalty_factor": ("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",),
    "use_dynamic_bsz": (f"{ACTOR}.use_dynamic_bsz",),
    "actor_ppo_max_token_len": (f"{ACTOR}.ppo_max_token_len_per_gpu",),
    "infer_ppo_max_token_len": ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",),
    "offload": (f"{ACTOR}.fsdp_config.param_offload",),
    "train_ppo_micro_batch_size_per_gpu": (f"{ACTOR}.ppo_micro_batch_size_per_gpu",),
    "infer_ppo_micro_batch_size_per_gpu": ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",),
}
"""Variables of verl's launch scripts, with the parameter that each is written into."""

LAUNCH_ROWS: tuple[Parameter, ...] = (
    *ignored("a folder that other variables of the script are made of", "RAY_DATA_HOME"),
    *unsupported("Megatron's own way of reading a checkpoint; ours are Hugging Face directories", "USE_MBRIDGE",
             "USE_DIST_CKPT"),
)  # fmt: skip
