"""Rows of ROLL's run, batches, lengths, workers and backends."""

from flotilla.importers.engines import EMBEDDED
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
from flotilla.importers.spelling import KEY, ROUTER_DTYPE, experiment_name, layers
from flotilla.importers.values import count, flag, integer, number, pieces, share, text, texts, unchanged

DIRECTORY = "the fleet keeps an experiment's files under its own data directory"
ENVIRONMENT = (
    "a service's environment is that of its machine: set the variables there. They choose kernels, logs and ports, not "
    "what is computed"
)
UNREAD = "no release of ROLL's reads it here: its own configuration has no such field"
SILENT = "at another value than ROLL's own it is not offered: leave it out"
PLACEMENT = "services register themselves, each with devices of its own: this changes speed, not what is computed"
SHARDING = (
    "how the model is sharded is said by parallelism (ranks, replicas, tensor_parallel, expert_parallel, "
    "sequence_parallel), and what a GPU's host keeps by parallelism.offload: this changes speed and memory, not what "
    "is computed"
)
ENGINE = EMBEDDED
CUTTING = "one budget of tokens bounds every pass: log-probabilities do not depend on how they are cut"
KERNELS = "activations are kept and kernels are torch's own: this changes speed and memory, not what is computed"
AT_A_TIME = (
    "how many episodes go on at a time is said by rollout.engine.slots, and what a step takes by rollout_batch_size"
)
TRAIN = "actor_train"
INFER = "actor_infer"
IN_AN_ENVIRONMENT = {
    "train_env_manager.tags": ["Lake"], "train_env_manager.num_env_groups": 16,
    "train_env_manager.num_groups_partition": [16], "train_env_manager.group_size": 8, "sequence_length": 4096,
    "custom_envs.Lake": {"env_type": "frozen_lake", "max_steps": 8, "env_config": {"is_slippery": False}},
}  # fmt: skip
VALIDATION = "validation.generating_args"
WITH_LORA = {f"{TRAIN}.model_args.lora_target": "all-linear"}
INTERLEAVE = f"{TRAIN}.data_args.domain_interleave_probs"
VALIDATED = {"validation.data_args.file_name": "heldout.jsonl"}

RUN: tuple[Parameter, ...] = (
    translated("exp_name", "name", text, "letters, digits, dot, dash and underscore are kept", example="another one",
               default="roll", translate=experiment_name),
    translated("seed", "seed", integer, "seeds the order of rows and every sample", example=7, default=42,
               translate=lambda value: value),
    translated("max_steps", "optimisation.steps", integer, "steps; -1, no limit, is refused", example=20, default=500),
    translated("save_steps", "checkpoint.every_steps", integer, "steps between checkpoints", example=4, default=50),
    translated("eval_steps", "evaluation.every_versions", integer,
               "steps, in versions (model_update_frequency steps each); where validation names a file", example=5,
               default=10, context=VALIDATED),
    translated("validation.data_args.file_name", ("evaluation.path", "evaluation.sets"), texts,
               "one file of held-out rows is the path, several are sets with series of their own",
               example=["a.jsonl", "b.jsonl"], default=None, context=VALIDATED),
    translated("resume_from_checkpoint", "checkpoint.resume_from", unchanged,
               "a checkpoint of ours: one of ROLL's is refused when it is started; true, the newest of the same run, "
               "is flotilla run --continue", example="/runs/mine@40", default=False),
    *ignored("there is nothing to render: the text of every sample is kept (samples), in the run's own folder",
             "render_save_dir"),
    *unsupported(ENVIRONMENT, "system_envs", is_tree=True, default={}),
    *unsupported("models come from the Hugging Face hub, or are directories: download one from elsewhere, and name its "
                 "directory", "system_envs.USE_MODELSCOPE", "model_download_type",
                 harmless=("0", 0, "HUGGINGFACE_HUB")),
    *unsupported("every sample is kept as samples says, for flotilla samples and replay", "rollout_dump_dir",
                 "save_logging_board_dir", "rollout_mock.enable", "rollout_mock.dump_dir"),
    refused("rollout_mock.mode", "answers that were recorded before would stand in for sampled ones: leave it dump",
            default="dump"),
    *unsupported("there is no profiler of ROLL's", "profiler_timeline",
                 "profiler_memory", "profiler_output_dir", "length_profiler_dir", "report_length_and_rewards",
                 "otlp_output_dir"),
    *unsupported("how long weights travel changes speed, not what is computed", "model_update_buffer_size_mb",
                 "is_offload_states", "is_offload_optimizer_states_in_train_step", "partial_gpu_mode",
                 "balance_length"),
    *unsupported("which engine a request is sent to changes speed, not what is computed", "router_args", is_tree=True),
    *ignored(UNREAD, "enable_response_mask", "action_sep", "use_turn_scores", "enable_think", "mask_type",
             "reward_normalization.global_scale_factor", "reward_normalization.global_shift_value"),
    translated("track_with", "tracking.trackers", texts,
               "wandb, swanlab, tensorboard; stdout is flotilla watch; where it is silent, none is fed",
               example="wandb"),
    translated("tracker_kwargs.log_dir", "tracking.trackers", text,
               "directory of tensorboard, one folder per experiment", example="logs", default=None,
               context={"track_with": "tensorboard"}),
    translated("tracker_kwargs.project", "tracking.trackers", text, "project of wandb and swanlab", example="another",
               default="flotilla", context={"track_with": "wandb"}),
    *ignored(KEY, "tracker_kwargs.api_key", is_secret=True),
    *ignored(KEY, "tracker_kwargs.login_kwargs", is_secret=True, is_tree=True),
    *ignored("labels of a run in a tracker, which has the experiment's whole spec as its configuration",
             "tracker_kwargs.notes", "tracker_kwargs.tags"),
    *ignored("a run of a tracker has the experiment's name, exp_name", "tracker_kwargs.name",
             "tracker_kwargs.experiment_name"),
    refused("tracker_kwargs", "of a tracker's options log_dir and project are offered", default={}, harmless=(None,),
            is_tree=True, is_secret=True),
    *unsupported(DIRECTORY, "output_dir", "logging_dir", "tracker_kwargs.logdir"),
    *unsupported(DIRECTORY, "checkpoint_config", is_tree=True),
    *ignored("every step is recorded", "logging_steps"),
    *unsupported("every call has a deadline of its own kind", "rpc_timeout"),
    *ignored("held-out tasks of environments are the rows of a file: as many as val_env_manager has groups",
             "val_batch_size"),
    *ignored("a launcher's own, of the processes that it starts", "local_rank"),
    *unsupported(PLACEMENT, "num_nodes", harmless=(1,)),
    translated("num_gpus_per_node", ("resources.trainer.devices", "parallelism.nodes"), count,
               "where the trainer's devices are translated: they are on as many machines", example=2, default=8,
               harmless=(1,), unread=Verdict.UNSUPPORTED, context={f"{TRAIN}.device_mapping": "list(range(0,4))"}),
    *ignored("requests are always scheduled one by one", "generate_opt_level", "is_num_return_sequences_expand"),
    *ignored("Hydra's own: it does not reach the pipeline", "hydra", is_tree=True),
    *ignored("the files that it names are read with this one; ROLL's own are known", "defaults"),
    *ignored("names the class that ROLL reads a section into", "_target_"),
)  # fmt: skip

BATCHES: tuple[Parameter, ...] = (
    translated("rollout_batch_size", "asynchrony.require_batches", count,
               "prompts of one step: optimiser batches times require_batches", example=256, default=128),
    applied("num_return_sequences_in_group", "rollout.group_size", count, "answers per prompt", example=4, default=1),
    translated("prompt_length", ("data.max_prompt_tokens", "rollout.engine.context_tokens"), count,
               "longest prompt, others are left out; with response_length the engine's context",
               example=512, default=1024),
    translated("response_length", ("rollout.sampling.max_new_tokens", "rollout.engine.context_tokens"), count,
               "most tokens of an answer", example=512, default=None),
    translated("sequence_length", ("rollout.sampling.max_new_tokens", "rollout.engine.context_tokens"), count,
               "prompt and answer, of environments the whole episode; used where response_length is not given",
               example=4096, default=None,
               context={"response_length": None}),
    translated("max_running_requests", "rollout.engine.slots", count,
               "answers sampled at a time by one engine; where it is silent, our own default: it is a capacity",
               example=64, translate=lambda value: value),
    translated("is_use_additional_prompts", ("asynchrony.redundant_groups", "asynchrony.on_max_lag"), flag,
               "the first groups that are finished are trained, others are ended once a new version makes them too old",
               example=True, default=False),
    translated("max_additional_running_prompts", "asynchrony.redundant_groups", count,
               "groups beyond the budget are issued while fewer than this are being sampled", example=8, default=16,
               context={"is_use_additional_prompts": True}),
    applied("ppo_epochs", "optimisation.epochs_per_step", count, "passes over a step's groups", example=2, default=1),
    applied("max_grad_norm", "optimisation.max_grad_norm", number, "bound of the gradient's norm", example=0.5,
            default=1.0),
    translated("async_generation_ratio", ("asynchrony.staleness_threshold", "asynchrony.max_lag"), number,
               "batches that may run ahead; what is older than that, rounded up, is dropped", example=1.5, default=0),
    translated("model_update_frequency", "asynchrony.trigger_parameter_sync_step", count, "steps between two versions",
               example=2, default=1, aliases=(f"{TRAIN}.model_update_frequency",),
               translate=lambda value: value),
    translated("pretrain", "model.path", text, "a directory, or a name on the hub", example="other-model",
               default=None, aliases=(f"{TRAIN}.model_args.model_name_or_path",)),
)  # fmt: skip

WORKERS: tuple[Parameter, ...] = (
    translated(f"{TRAIN}.model_args.dtype", "model.dtype", text,
               "bf16 is bfloat16, fp32 is float32, and so is fp16", example="fp32", default="bf16",
               aliases=("model_args.dtype",)),
    translated(f"{TRAIN}.model_args.lora_target", "model.lora.targets", layers, "all, or names of layers: adapters are "
               "trained in place of the weights; a pattern is refused", example="q_proj,v_proj", default=None,
               aliases=("model_args.lora_target",)),
    applied(f"{TRAIN}.model_args.lora_rank", "model.lora.rank", count, "rank of the adapters", example=16, default=8,
            context=WITH_LORA, aliases=("model_args.lora_rank",)),
    translated(f"{TRAIN}.model_args.lora_alpha", "model.lora.alpha", number, "scale of the adapters, times their rank; "
               "twice the rank where it is silent", example=32, default=None, context=WITH_LORA,
               aliases=("model_args.lora_alpha",)),
    applied(f"{TRAIN}.model_args.lora_dropout", "model.lora.dropout", number, "share of an adapter's inputs that it "
            "does not see", example=0.1, default=0.0, context=WITH_LORA, aliases=("model_args.lora_dropout",)),
    translated(f"{TRAIN}.model_args.freeze_module_prefix", "optimisation.freeze", pieces, "beginnings of names of "
               "weights that are not trained; without effect beside lora_target", example="model.embed_tokens",
               default=None, context={}, aliases=("model_args.freeze_module_prefix",)),
    refused(f"{TRAIN}.model_args.adapter_name_or_path", "adapters begin at 0: merge this one (flotilla export), and "
            "name the merged model as pretrain", default=None),
    refused(f"{TRAIN}.model_args.additional_target", "beside the adapters nothing trains", default=None),
    applied(f"{TRAIN}.training_args.learning_rate", "optimisation.learning_rate", number, "peak learning rate",
            example=3e-6, default=5e-5, aliases=("training_args.learning_rate",)),
    applied(f"{TRAIN}.training_args.weight_decay", "optimisation.weight_decay", number, "decoupled weight decay",
            example=0.1, default=0.0, aliases=("training_args.weight_decay",)),
    applied(f"{TRAIN}.training_args.warmup_steps", "optimisation.warmup_updates", integer,
            "updates of warm-up; where FSDP2 or DeepSpeed trains by the schedule constant, ROLL has none",
            example=3, default=0, context={}, aliases=("training_args.warmup_steps",)),
    translated(f"{TRAIN}.training_args.warmup_ratio", "optimisation.warmup_updates", share,
               "share of all updates, rounded up, where warmup_steps is 0", example=0.5, default=0.0),
    translated(f"{TRAIN}.training_args.lr_scheduler_type", "optimisation.schedule", text,
               "constant, linear (by itself) or cosine, which end at 0",
               example="cosine", default="linear", aliases=("training_args.lr_scheduler_type",)),
    refused(f"{TRAIN}.training_args.adam_beta1", "betas are those of ROLL's defaults: set optimisation.betas",
            default=0.9),
    refused(f"{TRAIN}.training_args.adam_beta2", "betas are those of ROLL's defaults: set optimisation.betas",
            default=0.999),
    translated(f"{TRAIN}.training_args.per_device_train_batch_size",
               ("optimisation.groups_per_mini_batch", "asynchrony.require_batches"), count,
               "times gradient_accumulation_steps and the data-parallel devices: samples of one update, in groups",
               example=2, default=8, aliases=("training_args.per_device_train_batch_size",)),
    translated(f"{TRAIN}.training_args.gradient_accumulation_steps",
               ("optimisation.groups_per_mini_batch", "asynchrony.require_batches"), count,
               "see per_device_train_batch_size", example=4, default=1,
               aliases=("training_args.gradient_accumulation_steps",)),
    translated(f"{TRAIN}.device_mapping",
               ("optimisation.groups_per_mini_batch", "asynchrony.require_batches", "resources.trainer.devices",
                "parallelism.ranks"),
               unchanged, "the number of devices multiplies the batch: see per_device_train_batch_size; they are the "
               "trainer's, with a training process on each (not with pipeline stages), on as many "
               "machines as num_gpus_per_node makes", example="list(range(0,4))", default=None,
               aliases=("device_mapping",)),
    *(translated(f"{TRAIN}.strategy_args.strategy_config.{kind}_model_parallel_size",
                 ("optimisation.groups_per_mini_batch", "asynchrony.require_batches"), count,
                 "divides the data-parallel devices: see per_device_train_batch_size", example=2, default=1,
                 aliases=(f"strategy_config.{kind}_model_parallel_size",),
                 context={f"{TRAIN}.device_mapping": "list(range(0,2))"})
      for kind in ("tensor", "pipeline")),
    translated(f"{TRAIN}.strategy_args.strategy_config.context_parallel_size",
               ("optimisation.groups_per_mini_batch", "asynchrony.require_batches"), count,
               "divides the data-parallel devices: see per_device_train_batch_size", example=2, default=1,
               aliases=("strategy_config.context_parallel_size",),
               context={f"{TRAIN}.device_mapping": "list(range(0,2))"}),
    translated(f"{TRAIN}.data_args.file_name", ("data.path", "data.sources"), texts,
               "one file of training rows is the path, several are sources that are joined",
               example=["a.jsonl", "b.jsonl"], default=None, aliases=("data_args.file_name",)),
    applied(f"{TRAIN}.data_args.messages", "data.prompt_column", text, "column with the chat messages",
            example="chat", default=None, context={}, aliases=("data_args.messages",)),
    translated(f"{TRAIN}.data_args.prompt", ("data.prompt_column", "data.input_template"), text,
               "this column's text without a chat template, which is {} here; without effect beside messages",
               example="text", default=None, context={f"{TRAIN}.data_args.messages": None},
               aliases=("data_args.prompt",)),
    translated(f"{TRAIN}.data_args.template", "data.chat_template_options", text,
               "native and qwen2_5 are the tokenizer's own template, qwen3 that with enable_thinking; others are "
               "refused",
               example="qwen3", default="native", aliases=("data_args.template",)),
    translated("global_template", "data.chat_template_options", text, "wins over the template of data_args",
               example="qwen3", default=None),
    refused("tag_to_template", "all rows have one template", default={}, harmless=(None,), is_tree=True),
    translated(f"{TRAIN}.data_args.preprocessing_num_workers", "data.overlong.workers", count,
               "processes that look for prompts that are too long", example=4, default=1),
    *ignored("only max_steps says how long a run is", f"{TRAIN}.training_args.num_train_epochs"),
    *ignored("no grader that is offered has a model of its own", "reward_pretrain"),
    *ignored("what a model is, its config.json says", f"{TRAIN}.model_args.model_type"),
    *ignored("file_name is a path of its own, and domain_interleave_probs says what is mixed",
             f"{TRAIN}.data_args.dataset_dir", f"{TRAIN}.data_args.interleave_probs"),
    *ignored("prompts are rendered once, with the template of the policy's tokenizer", f"{INFER}.data_args",
             is_tree=True),
    Parameter(name=INTERLEAVE, verdict=Verdict.TRANSLATED, targets=("data.sources",), is_tree=True,
              reason="weights of the domains, each a source with the rows of its tag_included"),
    applied(f"{INFER}.generating_args.temperature", "rollout.sampling.temperature", number,
            "softmax temperature, by which the trainer divides its logits, too", example=0.7, default=0.95,
            aliases=("generating_args.temperature",)),
    applied(f"{INFER}.generating_args.top_p", "rollout.sampling.top_p", number,
            "smallest set of tokens of this probability (by itself 0.7 in ROLL)", example=0.9, default=0.7,
            aliases=("generating_args.top_p",)),
    translated(f"{INFER}.generating_args.top_k", "rollout.sampling.top_k", integer,
               "-1, all tokens, is 0 here (by itself 50 in ROLL)", example=20, default=50,
               translate=lambda value: max(value or 0, 0), aliases=("generating_args.top_k",)),
    translated(f"{INFER}.generating_args.max_new_tokens", "rollout.sampling.max_new_tokens", count,
               "of a turn in an environment; the other pipelines put response_length in its place", example=32,
               default=Inherit("response_length"), context=IN_AN_ENVIRONMENT,
               aliases=("generating_args.max_new_tokens",)),
    refused(f"{INFER}.generating_args.num_return_sequences", "give num_return_sequences_in_group",
            default=Inherit("num_return_sequences_in_group")),
    refused(f"{INFER}.generating_args.num_beams", "answers are sampled", default=1),
    translated(f"{INFER}.generating_args.stop_strings", "rollout.sampling.stop", texts, "text that ends an answer, and "
               "stays in it", example=["</answer>"], default=None, translate=lambda value: value or UNSET,
               aliases=("generating_args.stop_strings",)),
    refused(f"{INFER}.generating_args.include_stop_str_in_output", "every sampled token is trained, those of a stop "
            "string, too: leave it at true", default=True, harmless=(None,)),
    applied(f"{INFER}.generating_args.repetition_penalty", "rollout.sampling.repetition_penalty", number,
            "of tokens that prompt or completion have; log-probabilities stay the policy's own", example=1.1,
            default=1.0),
)  # fmt: skip

GENERATED = {**VALIDATED, f"{VALIDATION}.top_p": 0.8}

EVALUATION: tuple[Parameter, ...] = (
    translated(f"{VALIDATION}.temperature", ("evaluation.temperature", "evaluation.greedy"), number,
               "softmax temperature; 0 is greedy", example=0.6, default=0.95, context=VALIDATED),
    applied(f"{VALIDATION}.top_p", "evaluation.top_p", number,
            "smallest set of tokens of this probability (by itself 0.7 in ROLL)", example=0.6, default=0.7,
            context=VALIDATED),
    translated(f"{VALIDATION}.top_k", "evaluation.top_k", integer,
               "-1, all tokens, is 0 here (by itself 50 in ROLL)", example=20, default=50, context=GENERATED),
    applied(f"{VALIDATION}.num_return_sequences", "evaluation.group_size", count, "answers per held-out prompt",
            example=4, default=1, context=GENERATED),
    refused(f"{VALIDATION}.num_beams", "answers are sampled", default=1),
    refused(f"{VALIDATION}.repetition_penalty", "held-out answers have the penalty of training", default=1.0),
    *ignored("ROLL replaces it by its own lengths; a held-out answer is as long as a trained one: for another bound "
             "set evaluation.max_new_tokens", f"{VALIDATION}.max_new_tokens"),
)  # fmt: skip

CONFIG = "strategy_args.strategy_config"
ROLES = (TRAIN, INFER, "reference", "critic")
PACKED = (
    "use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train", "use_dynamic_batching_in_infer",
    "max_tokens_per_microbatch_in_infer", "sequence_length_round_in_infer", "use_sequence_packing",
)  # fmt: skip
"""How a worker cuts its batch into forward passes."""
READ_OF_TRAINER = {(TRAIN, name) for name in (*PACKED[:2], "use_sequence_packing")}
BACKEND = (
    "expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel", "recompute_granularity",
    "moe_layer_recompute", "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_overlap",
    "overlap_grad_reduce",
)  # fmt: skip
SERVING = ("gpu_memory_utilization", "block_size", "max_model_len", "load_format", "mem_fraction_static")

BACKENDS: tuple[Parameter, ...] = (
    *unsupported(SHARDING, *(f"{TRAIN}.{CONFIG}.{name}" for name in BACKEND), f"{TRAIN}.strategy_args.strategy_name",
             f"{TRAIN}.offload_nccl", f"{INFER}.offload_nccl", "reference.offload_nccl"),
    translated(f"{TRAIN}.model_args.disable_gradient_checkpointing", "optimisation.activation_checkpointing", flag,
               "false computes activations again in the backward pass; where it is silent, ours, which keeps them",
               example=False, translate=lambda value: not value),
    translated(f"{TRAIN}.model_args.attn_implementation", "model.attention", text,
               "fa2 is flash_attention_2, where the trainer's device_mapping has several GPUs and it computes in "
               "bfloat16; beside context parallelism sdpa alone", example="fa2",
               context={f"{TRAIN}.device_mapping": "list(range(0,4))"}, unread=Verdict.UNSUPPORTED),
    *unsupported(KERNELS, f"{TRAIN}.model_args.flash_attn"),
    *unsupported(ROUTER_DTYPE, f"{TRAIN}.{CONFIG}.moe_router_dtype"),
    *ignored("how rows are loaded does not change them", f"{TRAIN}.training_args.dataloader_num_workers"),
    *unsupported(SHARDING, f"{TRAIN}.strategy_args", f"{TRAIN}.{CONFIG}", "offload_nccl", is_tree=True, harmless=(1,)),
    *unsupported(ENGINE, *(f"{INFER}.{CONFIG}.{name}" for name in SERVING), f"{INFER}.strategy_args.strategy_name"),
    *unsupported(ENGINE, f"{INFER}.strategy_args", f"{INFER}.{CONFIG}", is_tree=True, harmless=(1,)),
    *ignored("the engine's model is the trainer's: its weights arrive from there", f"{INFER}.model_args",
             is_tree=True),
    refused("reference.model_args.model_name_or_path", "the reference is the policy before its first step: leave it "
            "out", default=Inherit("pretrain")),
    refused("reference.model_args.dtype", "the reference computes in the policy's element type: give it the same",
            default=Inherit(f"{TRAIN}.model_args.dtype")),
    *unsupported(KERNELS, "reference.model_args.attn_implementation", "reference.model_args.flash_attn"),
    *unsupported(SHARDING, "reference.model_args.ulysses_size", f"{TRAIN}.model_args.ulysses_size", harmless=(1,)),
    *ignored("the reference is the policy before its first step, in the same element type", "reference.model_args",
             is_tree=True),
    *unsupported(CUTTING, f"{TRAIN}.infer_batch_size", f"{INFER}.infer_batch_size", "reference.infer_batch_size",
             "critic.infer_batch_size"),
    translated(f"{INFER}.device_mapping", ("resources.rollouts.min", "resources.sharing"), unchanged,
               "where the trainer's are translated, and each engine has one: an engine for each; where both have some, "
               "they take turns on them. Else this changes speed, not what is computed",
               example="list(range(0,4))", context={f"{TRAIN}.device_mapping": "list(range(0,4))"},
               unread=Verdict.UNSUPPORTED),
    *unsupported(PLACEMENT, f"{INFER}.num_gpus_per_worker", f"{INFER}.world_size",
             f"{TRAIN}.world_size", f"{TRAIN}.num_gpus_per_worker", "reference.device_mapping",
             "reference.strategy_args.strategy_name", "reference.world_size", "critic.device_mapping", harmless=(1,)),
    *unsupported(SHARDING, "reference.strategy_args", f"reference.{CONFIG}", "critic.strategy_args", is_tree=True,
                 harmless=(1,)),
    *unsupported(SHARDING, f"reference.{CONFIG}.tensor_model_parallel_size", harmless=(1,)),
    *(translated(f"critic.{CONFIG}.{kind}_parallel_size", f"parallelism.critic.{field}", count,
                 f"ranks that compute {what} of the critic together, where the trainer's devices are translated and it "
                 "divides them", example=2, default=1, harmless=(1,), unread=Verdict.UNSUPPORTED,
                 context={f"{TRAIN}.device_mapping": "list(range(0,4))", "adv_estimator": "gae"})
      for kind, field, what in (("tensor_model", "tensor_parallel", "a layer"),
                                ("context", "sequence_parallel", "sequences"))),
    *ignored("the order of messages in the template is the tokenizer's own", "reference.data_args", is_tree=True),
    *ignored("the validation worker is the reward service", "validation.data_args.template"),
    *ignored(UNREAD, "validation.eval_steps", "validation.data_args.dataset_dir",
             *(f"{role}.use_remove_padding" for role in ROLES)),
    *unsupported("held-out rows are read by one process", "validation.data_args.preprocessing_num_workers",
                 harmless=(1,)),
    translated(f"{TRAIN}.use_dynamic_batching_in_train", "optimisation.micro_batch_tokens", flag,
               "max_tokens_per_microbatch_in_train is the token budget of a forward pass", example=True, default=False,
               context={f"{TRAIN}.max_tokens_per_microbatch_in_train": 4096}),
    applied(f"{TRAIN}.max_tokens_per_microbatch_in_train", "optimisation.micro_batch_tokens", integer,
            "tokens of a forward pass", example=8192, default=0,
            context={f"{TRAIN}.use_dynamic_batching_in_train": True}),
    translated(f"{TRAIN}.use_sequence_packing", "optimisation.packing", flag, "packed; where it is silent, whichever "
               "is cheaper", example=True, default=False, translate=lambda value: "packed" if value else "auto"),
    *unsupported(CUTTING, f"{TRAIN}.sequence_length_round_in_train",
                 *(f"{role}.{name}" for role in ROLES for name in PACKED if (role, name) not in READ_OF_TRAINER)),
    *unsupported(CUTTING, *(f"{role}.sequence_packing_args" for role in ROLES), is_tree=True),
    *unsupported(ENVIRONMENT, *(f"{role}.system_envs" for role in ROLES), is_tree=True, default={}),
    *unsupported("every call has a deadline of its own kind", *(f"{role}.backend_timeout" for role in ROLES),
                 *(f"{role}.max_concurrency" for role in ROLES)),
    *ignored("a name in ROLL's logs", *(f"{role}.name" for role in ROLES)),
    *ignored("the reference computes what ROLL's own worker does", "reference.worker_cls"),
)  # fmt: skip

AGENTIC: tuple[Parameter, ...] = (
    *ignored(UNREAD.replace("its own configuration has no such field", "its configuration has the field, and no code"),
             "val_greedy", "val_n_sample", "use_policy_loss_type", "dirty_data_mask", "use_token_reward",
             "open_feedback_turn"),
    *ignored("of searches over beams, or replaced by max_new_tokens", f"{INFER}.generating_args.length_penalty",
             f"{INFER}.generating_args.max_length"),
    *ignored("the sampler's log-probabilities are always recorded", f"{INFER}.generating_args.logprobs"),
    *ignored("lengths are those of the rows", "val_prompt_length", "val_sequence_length"),
    *ignored("old log-probabilities are always those of the trainer before the step",
             "force_disable_old_logprobs_recompute"),
    *ignored("there is a reference where a KL reads it", "enable_reference"),
    *unsupported("steps and calls of environments have deadlines, and the fleet's own watch", "env_monitor",
                 is_tree=True),
    *unsupported("how weights and batches travel is the fleet's own matter: what is computed is the same",
                 "transfer_backend", is_tree=True),
    *(refused(name, SILENT, default=default) for name, default in (
        ("ratio_type", "token"), ("exp_mode", "train"), ("minibatch_data_iter_num", 1), ("postive_loss_coef", 0),
        ("use_topr_neg_loss_coef", 0), ("parse_tool_call_parameter_to_dict", False), ("skip_mock_system_prompt", False),
        (f"{INFER}.generating_args.do_sample", True), (f"{TRAIN}.apply_loss_scale", True),
        (f"{TRAIN}.topr_positive_weight", 1), (f"{TRAIN}.topr_negative_weight", 1),
        (f"{TRAIN}.mtp_training_mode", "disabled"),
        ("user_defined_rollout_loop_cls",
         "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"))),
    *ignored("a step takes whole groups: nothing is copied, deleted or drawn to suit the devices",
             "batch_adjust_mode"),
)  # fmt: skip

GENERIC = {
    **{f"{CONFIG.rpartition('.')[2]}.{name}": f"{TRAIN}.{CONFIG}.{name}" for name in BACKEND},
    **{f"{CONFIG.rpartition('.')[2]}.{name}": f"{INFER}.{CONFIG}.{name}" for name in SERVING},
    CONFIG: f"{TRAIN}.{CONFIG}",
    "strategy_args.strategy_name": f"{TRAIN}.strategy_args.strategy_name",
    "infer_batch_size": f"{TRAIN}.infer_batch_size",
    "world_size": f"{TRAIN}.world_size",
    "num_gpus_per_worker": f"{INFER}.num_gpus_per_worker",
    "model_args.disable_gradient_checkpointing": f"{TRAIN}.model_args.disable_gradient_checkpointing",
}
"""Names as ROLL's guide writes them, without the worker; each stands for the worker that it is written for."""
