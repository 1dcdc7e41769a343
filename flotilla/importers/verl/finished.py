"""verl's trainer of supervised fine-tuning as a system to import from."""

import math
from collections.abc import Callable
from typing import Any

from flotilla.importers.datasets import FILES, training
from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Source, System, make_system
from flotilla.importers.spelling import LowRank, experiment_name, layers, low_rank
from flotilla.importers.values import count, flag, integer, number, numbers, pieces, share, text, texts, unchanged
from flotilla.importers.verl.actor import REMOTE_CODE
from flotilla.importers.verl.rules import contents, masters
from flotilla.shared.config.sections.data import is_data_file

Fields = dict[str, Any]

SCHEDULES = ("cosine", "constant", "wsd")
STABLE = 0.9
"""Share of the updates after warm-up that verl's wsd leaves at the peak; the rest follows a cosine to 0."""
SHARDING = (
    "how the model is sharded is said by parallelism (ranks, replicas, tensor_parallel, expert_parallel, "
    "sequence_parallel), and what a GPU's host keeps by parallelism.offload: this changes speed and memory, not what "
    "is computed"
)


ROWS: tuple[Parameter, ...] = (
    *ignored("the program is the job: job.kind", "python -m"),
    *ignored("names the class that verl reads a section into", "_target_"),
    applied("model.partial_pretrain", "model.path", text, "a directory, or a name on the hub", example="other",
            default=None, context={}, aliases=("sft.model.partial_pretrain",)),
    translated("model.fsdp_config.model_dtype", "optimisation.masters", text, "of the weights that are trained: "
               "fp32 is float32, bf16 model; every pass computes in bfloat16", example="bf16", default="fp32",
               aliases=("sft.model.fsdp_config.model_dtype",)),
    *(Parameter(name=f"model.{name}", verdict=row.verdict, reason=row.reason, harmless=row.harmless,
                aliases=(f"sft.model.{name}",))
      for name in ("fsdp_config.wrap_policy.min_num_params", "fsdp_config.cpu_offload", "fsdp_config.offload_params",
                   "enable_gradient_checkpointing", "use_liger")
      for row in unsupported(SHARDING, name, harmless=(0,))),
    *(Parameter(name=row.name, verdict=row.verdict, reason=row.reason, aliases=("sft.model.trust_remote_code",))
      for row in unsupported(REMOTE_CODE, "model.trust_remote_code")),
    refused("model.external_lib", "no code is imported into the model's process", default=None,
            aliases=("sft.model.external_lib",)),
    translated("model.lora_rank", "model.lora.rank", integer, "adapters are trained in place of the weights; 0 trains "
               "the weights", example=8, default=0, aliases=("sft.model.lora_rank",)),
    translated("model.lora_alpha", "model.lora.alpha", number, "scale of the adapters, times their rank", example=32,
               default=16, context={"model.lora_rank": 8}, aliases=("sft.model.lora_alpha",)),
    translated("model.target_modules", "model.lora.targets", layers, "all-linear, or names of layers; a pattern is "
               "refused", example=["q_proj"], default="all-linear", context={"model.lora_rank": 8},
               aliases=("sft.model.target_modules",)),
    refused("optim.optimizer", "the optimiser is AdamW", default="AdamW", aliases=("sft.optim.optimizer",)),
    *(Parameter(name=f"optim.{name}", verdict=row.verdict, reason=row.reason, harmless=("torch.optim", None),
                aliases=(f"sft.optim.{name}",))
      for name in ("optimizer_impl", "override_optimizer_config")
      for row in unsupported("AdamW is torch's own, with the betas that are given", name)),
    applied("optim.lr", "optimisation.learning_rate", number, "peak learning rate", example=2e-5, default=1e-5,
            aliases=("sft.optim.lr",)),
    applied("optim.betas", "optimisation.betas", numbers, "decay of AdamW's two moments", example=[0.9, 0.99],
            default=[0.9, 0.95]),
    applied("optim.weight_decay", "optimisation.weight_decay", number, "decoupled weight decay", example=0.1,
            default=0.01, aliases=("sft.optim.weight_decay",)),
    translated("optim.lr_warmup_steps_ratio", "optimisation.warmup_updates", share, "share of all updates, rounded up",
               example=0.5, default=0.1, aliases=("sft.optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")),
    applied("optim.clip_grad", "optimisation.max_grad_norm", number, "bound of the gradient's norm", example=0.5,
            default=1.0, aliases=("sft.optim.clip_grad",)),
    translated("optim.lr_scheduler", "optimisation.schedule", text, "cosine, or wsd: nine tenths stay at the peak",
               example="constant", default="cosine", aliases=("sft.optim.lr_scheduler",)),
    translated("data.train_files", ("data.path", "data.sources"), pieces, "one file is the path, several are sources",
               example="other.parquet", default=None),
    translated("data.val_files", "job.held_out", pieces, "rows whose loss is measured: one file",
               example="held_out.parquet", default=None),
    translated("data.prompt_key", "data.prompt_column", text, "column with the prompt", example="problem",
               default="question", context={}),
    translated("data.prompt_dict_keys", "data.prompt_column", unchanged, "a place inside of it", example=["text"],
               default=None, context={}),
    translated("data.response_key", "job.response_column", text, "column with the answer", example="solution",
               default="answer", context={}),
    translated("data.response_dict_keys", "job.response_column", unchanged, "a place inside of it", example=["text"],
               default=None, context={}),
    translated("data.multiturn.enable", "job.response_column", flag, "whole conversations, in messages_key",
               example=True, default=False),
    translated("data.multiturn.messages_key", "data.prompt_column", text, "column with the conversation",
               example="chat", default="messages", context={"data.multiturn.enable": True}),
    refused("data.multiturn.tools_key", "tools are no part of a row's rendering here", default="tools"),
    refused("data.multiturn.enable_thinking_key", "one template for all rows: set data.chat_template_options",
            default="enable_thinking"),
    translated("data.max_length", "job.max_tokens", count, "tokens of a row, prompt included", example=512,
               default=1024),
    translated("data.truncation", "job.overlong", text, "error leaves longer rows out, right cuts; left is refused",
               example="right", default="error"),
    translated("data.train_batch_size", "optimisation.groups_per_mini_batch", count, "rows of one update", example=64,
               default=256),
    translated("data.micro_batch_size_per_gpu", "optimisation.micro_batch_tokens", count,
               "this many rows of full length make the token budget of a forward pass", example=2, default=4,
               aliases=("data.micro_batch_size",)),
    refused("data.chat_template", "the model's own chat template is used: write it into the tokenizer's directory",
            default=None),
    refused("data.balance_dp_token", "rows are always balanced over ranks", default=False, harmless=(True,)),
    refused("data.custom_cls.path", "a class of rows: set data.sources to {custom: FILE.py:CLASS}", default=None),
    *ignored("read with the class only", "data.custom_cls.name"),
    translated("trainer.total_epochs", "optimisation.steps", integer, "passes over the rows: with their number "
               "(--rows), the steps", example=2, default=4, context={"trainer.total_training_steps": None}),
    translated("trainer.total_training_steps", "optimisation.steps", integer, "steps; wins over total_epochs",
               example=20, default=None),
    translated("trainer.save_freq", "checkpoint.every_steps", integer, "steps; -1 is after the last step only",
               example=4, default=-1),
    translated("trainer.test_freq", "job.held_out.every_steps", integer, "steps; -1 is at the start and the end only",
               example=4, default=-1, context={"data.val_files": "held_out.parquet"}),
    translated("trainer.experiment_name", "name", text, "letters, digits, dot, dash and underscore are kept",
               example="another one", default="test", translate=lambda value: experiment_name(value or "sft")),
    applied("trainer.seed", "seed", integer, "seeds the order of rows", example=7, default=1),
    translated("trainer.max_ckpt_to_keep", "checkpoint.keep", integer, "newest checkpoints", example=5, default=None,
               aliases=("trainer.max_actor_ckpt_to_keep",)),
    *ignored("every step is recorded; trackers are named in tracking.trackers", "trainer.logger",
             "trainer.project_name"),
    *unsupported("the fleet keeps an experiment's files under its own data directory", "trainer.default_local_dir",
                 "trainer.default_hdfs_dir"),
    *unsupported(SHARDING, "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device",
                 "ulysses_sequence_parallel_size", "use_remove_padding", "model.strategy", harmless=(1, "cuda")),
    refused("trainer.resume_mode", "flotilla run --continue goes on where a run ended", default="auto",
            harmless=("disable",)),
    translated("trainer.checkpoint.save_contents", "checkpoint.contents", texts,
               "hf_model is model; without optimizer a crash loses the moments", example=["hf_model"], default=None),
    *unsupported("what a run goes on from is loaded whole", "trainer.checkpoint", is_tree=True),
)  # fmt: skip


def rows(source: Source) -> Fields:
    """Make the training rows, their columns, and the held-out ones."""
    fields = files(source)
    if source.value("data.multiturn.enable"):
        fields["data.prompt_column"] = source.required("data.multiturn.messages_key")
    else:
        fields["data.prompt_column"] = _column(source, "prompt")
        fields["job.response_column"] = _column(source, "response")
    return fields


def files(source: Source) -> Fields:
    """Make the training rows and the held-out ones, whatever their columns are."""
    written = source.value("data.train_files") or []
    if not written or not all(is_data_file(file) for file in written):
        source.refuse("data.train_files", f"must be {FILES}")
    fields: Fields = {
        "job.kind": "sft",
        "data.label_column": None,
        "job.max_tokens": source.required("data.max_length"),
        "optimisation.groups_per_mini_batch": source.required("data.train_batch_size"),
        **training([{"path": file} for file in written] or [{"path": ""}]),
    }
    held_out = source.value("data.val_files") or []
    if len(held_out) > 1:
        source.refuse("data.val_files", "one file: job.held_out has one place")
    every = source.value("trainer.test_freq")
    if held_out:
        fields["job.held_out"] = {"path": held_out[0], "every_steps": every if every and every > 0 else None}
    overlong = source.choose("data.truncation", {"error": "filter", "right": "truncate"})
    return fields | ({"job.overlong": overlong} if overlong else {})


def _column(source: Source, what: str) -> str:
    inside = source.value(f"data.{what}_dict_keys") or []
    names = [inside] if isinstance(inside, str) else list(inside)
    if len(names) > 1:
        source.refuse(f"data.{what}_dict_keys", "one key: a prompt and an answer have one column each")
    return ".".join([source.required(f"data.{what}_key"), *map(str, names[:1])])


def sizes(source: Source) -> Fields:
    """Make the model, lengths, batches, steps and schedule."""
    path = source.value("model.partial_pretrain")
    if path is None:
        source.lack("model.path: give model.partial_pretrain")
    longest = source.required("data.max_length")
    fields: Fields = {
        **({} if path is None else {"model.path": path}),
        "model.dtype": "bfloat16",  # of every pass, whatever the weights are
        **({"optimisation.masters": "model"} if masters(source, "model.fsdp_config.model_dtype") else {}),
        "optimisation.micro_batch_tokens": source.required("data.micro_batch_size_per_gpu") * longest,
        "optimisation.schedule": source.choose("optim.lr_scheduler", {name: name for name in SCHEDULES}) or "constant",
    }
    fields |= duration(source, "trainer.checkpoint.save_contents", _warmup)
    if fields["optimisation.schedule"] == "wsd" and "optimisation.steps" in fields:
        remaining = max(fields["optimisation.steps"] - fields["optimisation.warmup_updates"], 0)
        fields |= {
            "optimisation.wsd_decay_updates": max(remaining - int(remaining * STABLE), 1),
            "optimisation.wsd_decay": "cosine",
        }
    return fields


def _warmup(source: Source, total: int) -> int:
    return math.ceil(float(source.required("optim.lr_warmup_steps_ratio")) * total)


def duration(source: Source, saved: str, warmup: Callable[[Source, int], int]) -> Fields:
    """Make decay, steps, warm-up and checkpoints.

    Args:
        saved: the parameter with the contents of a checkpoint.
        warmup: gives its updates of so many.
    """
    fields: Fields = {"optimisation.decay_all": True} if source.value("optim.weight_decay") else {}
    held = contents(source, saved)
    if held is not None:
        fields["checkpoint.contents"] = held
    keep = source.value("trainer.max_ckpt_to_keep")
    if keep is not None:
        fields["checkpoint.keep"] = keep
    total = source.value("trainer.total_training_steps")
    if total is None and source.rows is not None:
        total = source.rows // source.required("data.train_batch_size") * source.required("trainer.total_epochs")
    if not total:
        source.lack("optimisation.steps: trainer.total_epochs counts passes over the data: give --rows N, or "
                    "trainer.total_training_steps")  # fmt: skip
        return fields
    every = source.required("trainer.save_freq")
    return fields | {
        "optimisation.steps": total,
        "optimisation.warmup_updates": warmup(source, total),
        "checkpoint.every_steps": total if every <= 0 else min(every, total),
    }


def adapters(source: Source) -> Fields:
    """Make the adapters."""
    return low_rank(source, LowRank("model.lora_rank", "model.lora_alpha", "model.target_modules"))


VERL_SFT: System = make_system("verl sft", (ROWS,), rules=(rows, sizes, adapters))
