"""verl's newer trainer of supervised fine-tuning (``sft_trainer``), which trains conversations by an engine."""

from collections.abc import Collection
from typing import Any

from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.spelling import dtype_of
from flotilla.importers.values import count, flag, integer, number, numbers, share, text, texts
from flotilla.importers.verl.finished import ROWS, SHARDING, VERL_SFT, adapters, duration, files
from flotilla.importers.verl.launch import last_name
from flotilla.importers.verl.rules import masters

Fields = dict[str, Any]

SHAPES = {"constant": "constant", "cosine": "cosine"}
SHARED = ("python -m", "_target_", "data.train_files", "data.val_files", "data.max_length", "data.truncation",
          "data.train_batch_size", "data.balance_dp_token", "data.custom_cls.path", "data.custom_cls.name",
          "optim.weight_decay", "optim.clip_grad", "optim.optimizer", "optim.optimizer_impl",
          "optim.override_optimizer_config", "model.lora_rank", "model.lora_alpha", "model.target_modules",
          "model.external_lib", "model.enable_gradient_checkpointing", "model.use_liger", "model.trust_remote_code",
          "trainer.total_epochs", "trainer.total_training_steps", "trainer.save_freq", "trainer.test_freq",
          "trainer.experiment_name", "trainer.seed", "trainer.max_ckpt_to_keep", "trainer.logger",
          "trainer.project_name", "trainer.default_local_dir", "trainer.default_hdfs_dir", "trainer.nnodes",
          "trainer.n_gpus_per_node", "trainer.device", "trainer.resume_mode")  # fmt: skip
"""What says the same to both of verl's trainers."""

OWN: tuple[Parameter, ...] = (
    applied("model.path", "model.path", text, "a directory, or a name on the hub", example="other", default=None,
            context={}),
    refused("engine", "Megatron's and others' optimisers have defaults of their own: take fsdp", default="fsdp"),
    refused("optim", "Megatron's and others' optimisers have defaults of their own: take fsdp", default="fsdp"),
    translated("engine.dtype", "model.dtype", text, "element type of a pass, over float32 masters", example="float32",
               default="bfloat16"),
    translated("engine.model_dtype", "optimisation.masters", text, "fp32: float32 masters; bf16: the bfloat16 weights "
               "themselves are trained", example="bf16", default="fp32"),
    *unsupported(SHARDING, *(f"engine.{name}" for name in (
        "strategy", "fsdp_size", "ulysses_sequence_parallel_size", "param_offload", "optimizer_offload",
        "offload_policy", "reshard_after_forward", "forward_prefetch", "use_orig_params", "use_torch_compile",
        "entropy_from_logits_with_chunking", "entropy_checkpointing", "forward_only", "wrap_policy.min_num_params",
    )), "model.use_remove_padding", "model.enable_activation_offload", "data.use_shm", harmless=(1, -1)),
    applied("optim.lr", "optimisation.learning_rate", number, "peak learning rate", example=2e-5, default=1e-3),
    applied("optim.betas", "optimisation.betas", numbers, "decay of AdamW's two moments", example=[0.9, 0.99],
            default=[0.9, 0.999]),
    translated("optim.lr_warmup_steps_ratio", "optimisation.warmup_updates", share, "share of all updates",
               example=0.5, default=0.0),
    translated("optim.lr_warmup_steps", "optimisation.warmup_updates", integer, "updates; below 0 the share is taken",
               example=7, default=-1),
    translated("optim.lr_scheduler_type", "optimisation.schedule", text, "constant or cosine", example="cosine",
               default="constant", aliases=("optim.warmup_style",)),
    translated("optim.min_lr_ratio", "optimisation.min_learning_rate_ratio", number, "where cosine ends", example=0.1,
               default=0.0, context={"optim.lr_scheduler_type": "cosine"}),
    translated("optim.num_cycles", "optimisation.cosine_cycles", number, "waves of cosine: 0.5 falls once",
               example=1.5, default=0.5, context={"optim.lr_scheduler_type": "cosine"}),
    translated("data.messages_key", "data.prompt_column", text, "column with the conversation", example="chat",
               default="messages"),
    refused("data.tools_key", "tools are no part of a row's rendering here", default="tools"),
    refused("data.enable_thinking_key", "one template for all rows: set data.chat_template_options",
            default="enable_thinking"),
    translated("data.use_dynamic_bsz", "optimisation.micro_batch_tokens", flag, "false: rows of full length, "
               "micro_batch_size_per_gpu of them", example=False, default=True),
    translated("data.max_token_len_per_gpu", "optimisation.micro_batch_tokens", count, "tokens of a forward pass",
               example=4000, default=8192),
    translated("data.micro_batch_size_per_gpu", "optimisation.micro_batch_tokens", count, "rows of full length",
               example=2, default=4, context={"data.use_dynamic_bsz": False}),
    *ignored("rows are packed or padded, whichever costs least", "data.pad_mode"),
    *(refused(f"data.{part}_max_samples", "all rows are taken: cut the file", default=-1) for part in ("train", "val")),
    translated("checkpoint.save_contents", "checkpoint.contents", texts,
               "hf_model is model; without optimizer a crash loses the moments", example=["hf_model"], default=None),
    *unsupported("what a run goes on from is loaded whole", "checkpoint", is_tree=True),
)  # fmt: skip


def sizes(source: Source) -> Fields:
    """Make the model, the batches and the schedule."""
    path = source.value("model.path")
    if path is None:
        source.lack("model.path: give model.path")
    longest = source.required("data.max_length")
    rows = source.required("data.micro_batch_size_per_gpu") * longest
    schedule = source.choose("optim.lr_scheduler_type", SHAPES) or "constant"
    least = source.value("optim.min_lr_ratio") if schedule != "constant" else None
    cycles = source.value("optim.num_cycles") if schedule != "constant" else 0.5
    dtype = dtype_of(source, "engine.dtype")
    is_narrow = masters(source, "engine.model_dtype") and dtype == "bfloat16"
    return {
        **({} if path is None else {"model.path": path}),
        "data.prompt_column": source.required("data.messages_key"),
        "model.dtype": dtype,
        **({"optimisation.masters": "model"} if is_narrow else {}),
        "optimisation.micro_batch_tokens": source.required("data.max_token_len_per_gpu")
        if source.value("data.use_dynamic_bsz")
        else rows,
        "optimisation.schedule": schedule,
        **({"optimisation.min_learning_rate_ratio": least} if least else {}),
        **({} if cycles in {None, 0.5} else {"optimisation.cosine_cycles": cycles}),
        **duration(source, "checkpoint.save_contents", _warmup),
    }


def _warmup(source: Source, total: int) -> int:
    written = source.value("optim.lr_warmup_steps")
    if written is not None and written >= 0:
        return int(written)
    return int((source.value("optim.lr_warmup_steps_ratio") or 0.0) * total)


VERL_ENGINE_SFT: System = make_system(
    "verl sft_trainer", ([row for row in ROWS if row.name in SHARED], OWN), rules=(files, sizes, adapters)
)


def fine_tuning(program: str, names: Collection[str]) -> System:
    """Return the tables of a trainer of fine-tuning; the older one names its model ``partial_pretrain``."""
    is_newer = last_name(program) == "sft_trainer" and "model.partial_pretrain" not in names
    return VERL_ENGINE_SFT if is_newer else VERL_SFT
