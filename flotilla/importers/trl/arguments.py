"""Rows of what all of TRL's trainers take: transformers' ``TrainingArguments``, the model, its adapters, the rows.

Defaults are those of trl/trainer/base_config.py, trl/trainer/model_config.py, peft's LoraConfig
(src/peft/tuners/lora/config.py) and src/transformers/training_args.py.
"""

from typing import Any, Final

from flotilla.importers.parameter import Parameter, Verdict, applied, ignored, refused, translated, unsupported
from flotilla.importers.spelling import experiment_name
from flotilla.importers.trl.launch import TRAINER
from flotilla.importers.trl.releases import VERSION, version
from flotilla.importers.values import count, flag, integer, number, text, texts, unchanged

LORA: Final = {"peft_config.r": 8}
PLACE: Final = "where and how a run is executed is the fleet's: this changes speed and memory, not what is computed"
LOGS: Final = "metrics of every step are recorded (docs/monitoring.md)"


def names(name: str, value: Any) -> list[str] | str | None:
    """Read names of trackers: a list, or one."""
    return texts(name, value)


def flag_or_text(name: str, value: Any) -> Any:
    """Read a switch that may also be a word."""
    return value if isinstance(value, str) and value.lower() not in {"true", "false"} else flag(name, value)


ROWS: tuple[Parameter, ...] = (
    *ignored("the trainer is the job: job.kind", TRAINER),
    translated(VERSION, ("optimisation.activation_checkpointing",), version,
               "the release that the file is for, whose defaults are taken where it is silent; by itself the last one "
               "that has the file's parameters", example="0.21.0", default="1.9.0", context={}),
    translated("num_processes", "optimisation.groups_per_mini_batch", count, "processes that accelerate starts: as "
               "many times the batch of a device", example=4, default=1),
    translated("output_dir", "name", text, "the name of the experiment, where run_name is silent; results are in the "
               "run's own folder", example="other", default=None, context={}),
    translated("run_name", "name", text, "the experiment's name, with letters, digits, dot, dash and underscore",
               example="another run", default=None, context={}),
    applied("seed", "seed", integer, "seeds the order of rows and every sample", example=3, default=42),
    translated("per_device_train_batch_size", "optimisation.groups_per_mini_batch", count,
               "times gradient_accumulation_steps and num_processes: what one update is made of", example=16,
               default=8),
    translated("gradient_accumulation_steps", "optimisation.groups_per_mini_batch", count,
               "times the batch of a device and num_processes: what one update is made of", example=4, default=1),
    translated("num_train_epochs", "optimisation.steps", number, "passes over the rows: with their number (--rows), "
               "the steps", example=2, default=3.0, context={"max_steps": -1}),
    translated("max_steps", "optimisation.steps", integer, "updates; the spec's steps are those of one generation",
               example=64, default=-1),
    applied("learning_rate", "optimisation.learning_rate", number, "peak learning rate", example=3e-5, default=5e-5,
            context={}),
    translated("lr_scheduler_type", "optimisation.schedule", text, "linear, cosine, constant, constant_with_warmup, "
               "cosine_with_min_lr", example="cosine", default="linear"),
    translated("lr_scheduler_kwargs.min_lr_rate", "optimisation.min_learning_rate_ratio", number, "share of the peak "
               "at the end", example=0.2, default=None, context={"lr_scheduler_type": "cosine_with_min_lr"},
               unread=Verdict.UNSUPPORTED),
    translated("lr_scheduler_kwargs.min_lr", "optimisation.min_learning_rate_ratio", number, "learning rate at the "
               "end", example=1e-7, default=None, context={"lr_scheduler_type": "cosine_with_min_lr"},
               unread=Verdict.UNSUPPORTED),
    refused("lr_scheduler_kwargs.num_cycles", "the cosine falls once", default=None, harmless=(0.5, 1)),
    translated("warmup_steps", "optimisation.warmup_updates", number, "updates; below 1 a share of all", example=8,
               default=0),
    translated("warmup_ratio", "optimisation.warmup_updates", number, "share of all updates, rounded up", example=0.5,
               default=None, context={}),
    applied("weight_decay", "optimisation.weight_decay", number, "leaves out biases and norms", example=0.1,
            default=0.0),
    translated("adam_beta1", "optimisation.betas", number, "of the first moment", example=0.8, default=0.9),
    translated("adam_beta2", "optimisation.betas", number, "of the second moment", example=0.9, default=0.999),
    translated("adam_epsilon", "optimisation.epsilon", number, "added to AdamW's denominator", example=1e-6,
               default=1e-8),
    translated("max_grad_norm", "optimisation.max_grad_norm", number, "bound of the gradient's norm; 0: none",
               example=0.5, default=1.0),
    refused("optim", "the optimiser is AdamW with moments of 32 bits", default="adamw_torch_fused",
            harmless=("adamw_torch", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit", "adamw_bnb",
                      "paged_adamw", "adamw_torch_npu_fused")),
    translated("bf16", "model.dtype", flag, "bfloat16 computes over float32 masters; without it, float32",
               example=False, default=True, context={}),
    translated("fp16", "model.dtype", flag, "true: computed in float32, which holds the values of float16 and needs no "
               "scaled losses", example=True, default=False),
    translated("gradient_checkpointing", "optimisation.activation_checkpointing", flag, "activations are computed "
               "again in the backward pass", example=False, default=True),
    translated("save_steps", "checkpoint.every_steps", number, "updates between two checkpoints; below 1 a share of "
               "all", example=4, default=500),
    translated("save_strategy", "checkpoint.every_steps", text, "steps; no: after the last step alone", example="no",
               default="steps", context={"save_steps": 4}),
    translated("save_total_limit", "checkpoint.keep", count, "newest checkpoints that are kept", example=7,
               default=None, context={}),
    translated("save_only_model", "checkpoint.contents", flag, "the weights alone", example=True, default=False),
    translated("report_to", "tracking.trackers", names, "wandb, tensorboard, mlflow, trackio and swanlab; others are "
               "unsupported",
               example="tensorboard", default="none"),
    translated("eval_strategy", "evaluation", text, "steps, or epoch with --rows; no: none", example="no",
               default="no", aliases=("evaluation_strategy",), context={"eval_dataset": "owner/held-out",
                                                                         "eval_strategy": "steps", "eval_steps": 8}),
    translated("eval_steps", "evaluation.every_versions", number, "updates between two evaluations", example=24,
               default=None, context={"eval_dataset": "owner/held-out", "eval_strategy": "steps", "eval_steps": 8}),
    translated("model", "model.path", text, "a directory, or a name on the hub", example="other-model", default=None,
               context={}, aliases=("model_name_or_path",)),
    translated("model_init_kwargs.dtype", "model.dtype", text, "weights that are loaded as bfloat16 are what AdamW "
               "updates: masters: model; auto is float32 with bf16's arithmetic", example="bfloat16", default=None,
               context={"bf16": False}, aliases=("model_init_kwargs.torch_dtype", "dtype", "torch_dtype")),
    translated("model_init_kwargs.attn_implementation", "model.attention", text, "attention by name, where the "
               "trainer has GPUs of its own to say so; else torch's", example="eager", default=None, context={},
               aliases=("attn_implementation",)),
    applied("model_init_kwargs.revision", "model.revision", text, "branch, tag or commit of a hub's model",
            example="v2", default=None, aliases=("model_revision",), context={"model": "owner/name"}),
    refused("model_init_kwargs.quantization_config", "weights that train are not quantised, only those beside "
            "adapters: give nf4 with a peft_config", default=None, is_judged=True, aliases=("quantization_config",)),
    *unsupported("a model is read by transformers' own class of its kind", "trust_remote_code",
                 "model_init_kwargs.trust_remote_code"),
    *ignored("the fleet places models itself", "model_init_kwargs.device_map", "model_init_kwargs.use_cache",
             "use_cache", "model_init_kwargs.low_cpu_mem_usage", "model_init_kwargs.max_seq_length",
             "model_init_kwargs.fast_inference", "model_init_kwargs.gpu_memory_utilization",
             "model_init_kwargs.max_lora_rank"),
    translated("peft_config.r", "model.lora.rank", count, "adapters are trained in place of the weights", example=16,
               default=8, context=LORA, aliases=("lora_r",)),
    translated("peft_config.lora_alpha", "model.lora.alpha", number, "scale of the adapters, times their rank",
               example=64, default=8, context=LORA, aliases=("lora_alpha",)),
    translated("peft_config.lora_dropout", "model.lora.dropout", number, "share of an adapter's inputs that it does "
               "not see", example=0.1, default=0.0, context=LORA, aliases=("lora_dropout",)),
    translated("peft_config.target_modules", "model.lora.targets", unchanged, "all-linear, or names of layers; by "
               "itself q_proj and v_proj", example=["k_proj"], default=None, context=LORA,
               aliases=("lora_target_modules",)),
    translated("peft_config.use_rslora", "model.lora.rank_stabilised", flag, "the scale is by the root of the rank",
               example=True, default=False, context=LORA, aliases=("use_rslora",)),
    *(refused(name, why, default=value, harmless=(None,), aliases=alias) for name, why, value, alias in (
        ("peft_config.use_dora", "adapters have no magnitudes of their own", False, ("use_dora",)),
        ("peft_config.modules_to_save", "layers beside the adapters are not trained", None, ("lora_modules_to_save",)),
        ("peft_config.layers_to_transform", "name the layers: layers.0.self_attn.q_proj", None, ()),
        ("peft_config.rank_pattern", "all adapters have one rank", None, ()),
        ("peft_config.alpha_pattern", "all adapters have one scale", None, ()),
        ("load_in_8bit", "weights beside adapters are kept in 4 bits (load_in_4bit) or whole", False,
         ("model_init_kwargs.load_in_8bit",)),
    )),
    refused("peft_config.bias", "biases are not trained beside adapters", default="none"),
    refused("peft_config.task_type", "the model is a causal language model; reward models take SEQ_CLS",
            default="CAUSAL_LM", harmless=("SEQ_CLS", None), aliases=("lora_task_type",)),
    translated("load_in_4bit", "model.lora.quantisation", flag, "nf4 with packed scales, of the weights beside "
               "adapters", example=True, default=False, context=LORA, aliases=("model_init_kwargs.load_in_4bit",)),
    *ignored("adapters are made by peft", "use_peft", "peft_config.use_gradient_checkpointing",
             "peft_config.random_state", "peft_config.inference_mode", "peft_config.init_lora_weights",
             "peft_config.loftq_config"),
    translated("train_dataset", ("data.path", "data.sources"), unchanged, "load_dataset(...) is a file, a folder or a "
               "hub dataset; rows that the script's own code makes are read by a class that is written beside the "
               "spec", example="other.jsonl", default=None, aliases=("dataset_name",)),
    translated("dataset_config", "data.sources", text, "subset of the dataset", example="main", default=None,
               context={}),
    translated("dataset_train_split", "data.sources", text, "split of the training rows", example="other",
               default="train", context={}),
    translated("dataset_test_split", "evaluation", text, "split of the held-out rows, where eval_strategy asks for "
               "them", example="other", default="test", context={"eval_strategy": "steps", "eval_steps": 8}),
    translated("eval_dataset", "evaluation", unchanged, "held-out rows, where eval_strategy asks for them",
               example="owner/others", default=None, context={"eval_strategy": "steps", "eval_steps": 8}),
    refused("datasets", "a mixture of datasets: write data.sources", default=None),
    *ignored("the model's own tokenizer is used", "processing_class", "tokenizer", "dataset_num_proc",
             "disable_dropout", "dataset_streaming"),
    *(refused(name, why, default=None) for name, why in (
        ("data_collator", "rows become batches here: leave it out"),
        ("optimizers", "the optimiser is AdamW with optimisation.schedule"),
        ("optimizer_cls_and_kwargs", "the optimiser is AdamW with optimisation.schedule"),
        ("preprocess_logits_for_metrics", "metrics are computed here"), ("compute_loss_func", "losses are those here"),
        ("neftune_noise_alpha", "embeddings get no noise"), ("resume_from_checkpoint", "set checkpoint.resume_from, "
         "of a checkpoint of ours"),
        ("chat_template_path", "write the template into the tokenizer's directory"),
    )),
    refused("label_smoothing_factor", "token losses have no smoothed labels", default=0.0, harmless=(0,)),
    refused("cast_lm_head_to_fp32", "the head has the type of the model", default=False),
    translated("router_aux_loss_coef", "optimisation.router.balance", number, "coefficient of the balance of experts, "
               "where it is written", example=0.01, default=0.001, context={}),
    *unsupported(PLACE, "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config",
                 "dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last",
                 "dataloader_persistent_workers", "dataloader_prefetch_factor", "torch_compile", "torch_compile_mode",
                 "torch_compile_backend", "use_liger_kernel", "use_liger_loss", "use_liger", "use_cpu", "tf32",
                 "gradient_checkpointing_kwargs", "torch_empty_cache_steps", "activation_offloading",
                 "ds3_gather_for_generation", "ddp_find_unused_parameters", "ddp_timeout", "auto_find_batch_size",
                 "pad_to_multiple_of", "padding_free", "average_tokens_across_devices", "full_determinism",
                 "eval_accumulation_steps", "group_by_length", "no_cuda", "use_mps_device", "use_logits_to_keep",
                 "dataset_batch_size", "bf16_full_eval", "eval_on_start", "callbacks", "compute_metrics",
                 "train_sampling_strategy"),
    *unsupported("a trained model is exported by flotilla export, and uploaded from there", "push_to_hub",
                 "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "load_best_model_at_end",
                 "metric_for_best_model", "greater_is_better"),
    *ignored(LOGS, "logging_steps", "logging_dir", "logging_first_step", "logging_strategy", "log_level",
             "log_completions", "num_completions_to_print", "log_unique_prompts", "wandb_log_unique_prompts",
             "disable_tqdm", "include_num_input_tokens_seen", "log_completions_hub_repo", "log_multimodal", "project",
             "trackio_space_id", "include_tokens_per_second"),
    *ignored("it is told by the job", "do_train", "do_eval", "overwrite_output_dir", "remove_unused_columns",
             "label_names", "ignore_data_skip", "data_seed", "per_device_eval_batch_size", "eval_delay", "eos_token",
             "pad_token", "dataset_kwargs", "model_init_kwargs.full_finetuning", "prediction_loss_only"),
    *ignored("the account's key is not part of a spec", "hub_token", "model_init_kwargs.token", is_secret=True),
)  # fmt: skip


def spec_name(*written: Any) -> str:
    """Return the first name that is written, as an experiment may be called."""
    found = next((str(each).rstrip("/").rpartition("/")[2] for each in written if each), "trl")
    return experiment_name(found)
