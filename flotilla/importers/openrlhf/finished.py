"""OpenRLHF's trainers on finished answers as systems to import from: train_sft, _dpo, _rm, _kto and _kd.

Meanings and defaults: openrlhf/cli/train_*.py, openrlhf/trainer/{kto,kd}_trainer.py, openrlhf/models/loss.py and
openrlhf/datasets/unpaired_preference_dataset.py of v0.8.0, and of newer releases where a program is still there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flotilla.importers.datasets import file_or_hub, takes_split, training
from flotilla.importers.openrlhf.flags import router, router_row
from flotilla.importers.openrlhf.system import OPENRLHF, decay, model, over_steps, tracking
from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Rule, Source, System, make_system
from flotilla.importers.spelling import dtype_of
from flotilla.importers.values import count, flag, integer, number, numbers, pieces, text
from flotilla.shared.config.sections.data import PLACE

Fields = dict[str, Any]

SHARED: Final = (
    "--pretrain", "--param_dtype", "--apply_chat_template", "--disable_fast_tokenizer", "--data.disable_fast_tokenizer",
    "--data.dataloader_num_workers", "--perf", "--use_ms", "--max_ckpt_mem", "--ckpt.max_mem", "--ckpt.load_enable",
    "--ckpt.output_dir", "--ckpt.path", "--ckpt.save_hf", "--logger.logging_steps",
    "--packing_samples", "--lr_scheduler", "--lr_warmup_ratio", "--max_norm", "--l2", "--adam_betas", "--seed",
    "--wandb_run_name", "--save_steps", "--max_ckpt_num", "--load_checkpoint", "--save_path", "--ckpt_path",
    "--save_hf_ckpt", "--disable_ds_ckpt", "--logging_steps", "--use_wandb", "--wandb_project", "--wandb_org",
    "--wandb_group", "--use_tensorboard", "--gradient_checkpointing",
    "--gradient_checkpointing_use_reentrant",
)  # fmt: skip
"""Flags that mean what they mean to the trainer by reinforcement."""


def _dotted(row: Parameter) -> Parameter:
    """Name a flag as these programs do where the trainer by reinforcement has it below the policy's name."""
    others = [each.removeprefix("--actor.") for each in row.aliases if each.startswith("--actor.")]
    of_model = {"model_name_or_path", "gradient_checkpointing_enable"}
    named = tuple(f"--model.{each}" if each in of_model else f"--{each}" for each in others)
    return replace(row, aliases=(*row.aliases, *(each for each in named if each != row.name)))


LORA = {
    name: replace(OPENRLHF.parameters[name], context={} if name == "--lora_rank" else {"--lora_rank": 8})
    for name in ("--lora_rank", "--lora_alpha", "--target_modules", "--load_in_4bit", "--lora_dropout")
}
"""There is no critic here that would have adapters, too."""

COMMON: tuple[Parameter, ...] = (
    *(_dotted(OPENRLHF.parameters[name]) for name in SHARED),
    replace(OPENRLHF.parameters["--max_samples"], default=1_000_000),
    *(LORA[name] for name in ("--lora_rank", "--lora_alpha", "--target_modules", "--load_in_4bit")),
    *ignored("the program is the job: job.kind", "python -m"),
    refused("--critic_pretrain", "this trainer has no critic", default=None, aliases=("--critic.model_name_or_path",)),
    *unsupported("how the model is sharded is said by parallelism.ranks, and what a GPU's host keeps by "
                 "parallelism.offload: this changes speed and memory, not what is computed",
                 "--zero_stage", "--ds.zero_stage", "--ds_tensor_parallel_size", "--ds.tensor_parallel_size",
                 "--adam_offload", "--ds.adam_offload", "--overlap_comm", "--ds.overlap_comm", "--zpg", "--ds.zpg",
                 "--bf16", "--use_liger_kernel", "--ds.use_liger_kernel", "--deepcompile", "--ds.deepcompile",
                 "--grad_accum_dtype", "--ds.grad_accum_dtype", "--ring_attn_size", "--ds.ring_attn_size",
                 "--ring_head_stride", "--ds.ring_attn_head_stride", "--local_rank", "--ds.use_universal_ckpt",
                 "--use_ds_universal_ckpt", "--ds.experts_implementation", harmless=(1, -1)),
    *unsupported("where the trainer's GPUs are not said, attention is torch's own: set model.attention; this changes "
                 "speed and memory, not what is computed", "--flash_attn", "--attn_implementation",
                 "--ds.attn_implementation"),
    translated("--dataset", ("data.path", "data.sources"), pieces,
               "one file or folder is the path; several, a hub name and name@folder are sources", example="other.jsonl",
               default=None, aliases=("--data.dataset",)),
    translated("--dataset_probs", "data.sources", text, "weights: sources take turns by them", example="0.3,0.7",
               default=None, context={"--dataset": "a.jsonl,b.jsonl"}, aliases=("--data.dataset_probs",)),
    translated("--dataset_split", "data.sources", text, "split of hub datasets and folders; a file has none",
               example="other", default="train", context={"--dataset": "owner/name"},
               aliases=("--data.dataset_split",)),
    translated("--eval_dataset", "job.held_out", text, "rows whose loss is measured", example="held_out.jsonl",
               default=None, aliases=("--eval.dataset",)),
    translated("--eval_steps", "job.held_out.every_steps", integer, "steps; -1 is at the start and the end only",
               example=5, default=-1, context={"--eval_dataset": "held_out.jsonl"}, aliases=("--eval.steps",)),
    refused("--eval_split", "a split of the held-out rows: set job.held_out.split", default="test", is_judged=True,
            aliases=("--eval.split",)),
    translated("--train_batch_size", "optimisation.groups_per_mini_batch", count, "rows of one update", example=64,
               default=128, aliases=("--train.batch_size",)),
    router_row("--model.aux_loss_coef"),
    refused("--tokenizer_chat_template", "the model's own chat template is used: write it into the tokenizer's "
            "directory", default=None, aliases=("--data.tokenizer_chat_template",)),
    refused("--optim", "the optimiser is AdamW", default="adam", harmless=("Adam", "adamw")),
)  # fmt: skip


def _own(*, longest: int, micro: int, epochs: int, rate: float) -> tuple[Parameter, ...]:
    """Make the rows whose defaults each program has for itself."""
    return (
        translated("--max_len", "job.max_tokens", count, "tokens of a row, prompt included; longer ones are left out",
                   example=640, default=longest, aliases=("--data.max_len",)),
        translated("--micro_train_batch_size", "optimisation.micro_batch_tokens", count,
                   "this many rows of full length make the token budget of a forward pass", example=2, default=micro,
                   aliases=("--train.micro_batch_size",)),
        translated("--max_epochs", "optimisation.steps", count,
                   "passes over the rows: with their number (--rows), the steps", example=3, default=epochs,
                   aliases=("--train.max_epochs",)),
        applied("--learning_rate", "optimisation.learning_rate", number, "peak learning rate", example=3e-5,
                default=rate, aliases=("--adam.lr",)),
    )  # fmt: skip


def _cut(row: Parameter) -> Parameter:
    """Return of the longest row what the trainer on labels does."""
    return (
        replace(row, reason="tokens of a row, prompt included; longer ones are cut") if row.name == "--max_len" else row
    )


def _named(rows: tuple[Parameter, ...], name: str) -> Parameter:
    return next(row for row in rows if row.name == name)


WITHOUT_DROPOUT: Final = refused(
    "--lora_dropout", "a pair's loss takes two passes, which must compute the same: leave it out", default=0,
    aliases=("--ds.lora.dropout",),
)  # fmt: skip
REFERENCE_OFFLOAD: Final = unsupported(
    "what a GPU's host keeps is said by parallelism.offload (reference): this changes memory, not what is computed",
    "--ref_offload", "--ref.offload",
)  # fmt: skip
SFT_ROWS: tuple[Parameter, ...] = (
    *_own(longest=2048, micro=8, epochs=2, rate=5e-6),
    replace(OPENRLHF.parameters["--input_template"], default="User: {}\nAssistant: ",
            context={"--apply_chat_template": False, "--output_key": "answer"}),
    LORA["--lora_dropout"],
    translated("--input_key", "data.prompt_column", text, "column with the prompt, or with conversations",
               example="question", default="input", aliases=("--data.input_key",)),
    translated("--output_key", "job.response_column", text, "column with the answer; null: input_key holds all of it",
               example="answer", default=None, aliases=("--data.output_key",)),
    translated("--multiturn", "job.train_on", flag, "all turns of the assistant are learned; else the last",
               example=True, default=False, context={"--output_key": None, "--apply_chat_template": True},
               aliases=("--data.multiturn",)),
    refused("--pretrain_mode", "the loss is on answers alone: without prompts there is no job of this kind",
            default=False, aliases=("--model.pretrain_mode_enable",)),
)  # fmt: skip
KTO_ROWS: tuple[Parameter, ...] = (
    *(_cut(row) for row in _own(longest=2048, micro=8, epochs=1, rate=1e-5)),
    WITHOUT_DROPOUT,
    _named(SFT_ROWS, "--input_template"),
    _named(SFT_ROWS, "--input_key"),
    replace(_named(SFT_ROWS, "--output_key"), reason="column with the answer; null: input_key holds all of it"),
    applied("--label_key", "job.label_column", text, "column that says whether the answer is desirable",
            example="score", default="label", aliases=("--data.label_key",)),
    applied("--beta", "job.beta", number, "how strongly the policy is held to the reference", example=0.3,
            default=0.01, aliases=("--model.beta",)),
    *ignored("OpenRLHF's trainer computes with 1 for both, whatever these say: job.desirable_weight and "
             "job.undesirable_weight are what they promise", "--desirable_loss_weight", "--undesirable_loss_weight"),
    *REFERENCE_OFFLOAD,
)  # fmt: skip
KD_ROWS: tuple[Parameter, ...] = (
    *_own(longest=2048, micro=8, epochs=1, rate=5e-6),
    *(_named(SFT_ROWS, name) for name in ("--input_template", "--lora_dropout", "--input_key", "--pretrain_mode")),
    replace(_named(SFT_ROWS, "--output_key"), default="output", reason="column with the answer"),
    translated("--teacher_model", "job.distillation.path", text, "the teacher, in the trainer",
               example="another-teacher", default=None, aliases=("--teacher.model_name_or_path",)),
    translated("--kd_coef", "job.distillation.coefficient", number, "weight of the teacher; the answers' own "
               "likelihood has the rest; 0 is fine-tuning", example=0.7, default=0.4, aliases=("--model.kd_coef",)),
    *unsupported("the teacher is sharded as the student is: this changes memory, not what is computed",
                 "--teacher_offload", "--teacher.offload"),
)  # fmt: skip
PAIR_ROWS: tuple[Parameter, ...] = (
    OPENRLHF.parameters["--input_template"],
    WITHOUT_DROPOUT,
    translated("--prompt_key", "data.prompt_column", text, "column with the prompt; without it the answers' columns "
               "hold whole conversations", example="question", default=None, aliases=("--data.prompt_key",)),
    translated("--chosen_key", "job.chosen_column", text, "column with the preferred answer", example="better",
               default="chosen", aliases=("--data.chosen_key",)),
    applied("--rejected_key", "job.rejected_column", text, "column with the other one", example="worse",
            default="rejected", aliases=("--data.rejected_key",)),
)  # fmt: skip
DPO_ROWS: tuple[Parameter, ...] = (
    *_own(longest=512, micro=8, epochs=1, rate=1e-5),
    applied("--beta", "job.loss.beta", number, "how strongly the policy is held to the reference", example=0.3,
            default=0.1, aliases=("--model.beta",)),
    translated("--ipo", "job.loss.kind", flag, "the squared loss of IPO", example=True, default=False,
               aliases=("--model.ipo_enable",)),
    applied("--label_smoothing", "job.loss.label_smoothing", number, "share of labels taken to be wrong", example=0.1,
            default=0.0, context={}, aliases=("--model.label_smoothing",)),
    applied("--nll_loss_coef", "job.supervised_coefficient", number, "weight of the preferred answers' likelihood",
            example=0.2, default=0.0, aliases=("--model.nll_loss_coef",)),
    refused("--ref_pretrain", "the reference is the policy as it begins: leave it out", default=None, is_judged=True,
            aliases=("--ref.model_name_or_path",)),
    *REFERENCE_OFFLOAD,
)  # fmt: skip
RM_ROWS: tuple[Parameter, ...] = (
    *_own(longest=512, micro=1, epochs=1, rate=9e-6),
    refused("--loss", "the loss is Bradley-Terry's, of which sigmoid and logexp are two spellings", default="sigmoid",
            harmless=("logexp",), aliases=("--model.loss_type",)),
    refused("--margin_loss", "pairs have no margins", default=False, aliases=("--model.margin_loss_enable",)),
    *ignored("the head has the name that transformers gives it, score", "--value_head_prefix",
             "--ds.value_head_prefix"),
    *ignored("scores are float32", "--compute_fp32_loss", "--model.compute_fp32_loss_enable"),
)  # fmt: skip


def _rows(source: Source) -> Fields:
    """Make the training rows and the held-out ones."""
    places = [file_or_hub(written) for written in source.value("--dataset") or []]
    split = source.value("--dataset_split")
    places = [{**place, "split": split} if takes_split(place) and split != "train" else place for place in places]
    if not places:
        source.lack("data.path: give --dataset")
    fields = _weighed(source, places)
    held_out = source.value("--eval_dataset")
    if held_out is not None:
        every = source.required("--eval_steps")
        fields["job.held_out"] = {**file_or_hub(held_out), "every_steps": every if every > 0 else None}
    return fields | {"data.label_column": None}


def _weighed(source: Source, places: list[Fields]) -> Fields:
    """Make the sources with their weights, and how many rows are taken of each, or of all."""
    most = {"max_rows": source.required("--max_samples")} if source.has("--max_samples") else {}
    weights = numbers("--dataset_probs", source.value("--dataset_probs")) or []
    if weights and len(weights) != len(places):
        source.refuse("--dataset_probs", f"{len(weights)} weights for {len(places)} datasets: give one for each")
    elif len(places) > 1 and weights:
        weighted = zip(places, weights, strict=True)
        return training([{**place, **most, "weight": weight} for place, weight in weighted])
    return {**(training(places) if places else {}), **{f"data.{name}": value for name, value in most.items()}}


def _template(source: Source) -> Fields:
    template = source.value("--input_template")
    if source.value("--apply_chat_template"):
        return {}
    return {"data.input_template": template if template is not None and PLACE in template else PLACE}


def _sizes(source: Source) -> Fields:
    """Make lengths, batches, steps and schedule."""
    longest, size = source.required("--max_len"), source.required("--train_batch_size")
    fields = decay(source) | {
        "job.max_tokens": longest,
        "optimisation.groups_per_mini_batch": size,
        "optimisation.micro_batch_tokens": source.required("--micro_train_batch_size") * longest,
        "model.dtype": dtype_of(source, "--param_dtype"),
    }
    rows = None if source.rows is None else min(source.rows, source.required("--max_samples"))
    total = 0 if rows is None else int(rows * source.required("--max_epochs") // size)
    if not total:
        source.lack("optimisation.steps: --max_epochs counts passes over the data: give --rows N, their number")
        return fields
    return fields | over_steps(source, total, updates=total)


def _sft(source: Source) -> Fields:
    answer = source.value("--output_key")
    is_all = bool(source.value("--multiturn")) or answer is not None
    fields: Fields = {
        "job.kind": "sft",
        "data.prompt_column": source.required("--input_key"),
        "job.train_on": "all" if is_all else "last",
    }
    if answer is None:
        source.value("--input_template")
        return fields
    return fields | {"job.response_column": answer} | _template(source)


def _kto(source: Source) -> Fields:
    if source.required("--micro_train_batch_size") == 1:
        source.note("with --micro_train_batch_size 1 OpenRLHF has no other prompt's answer for the reference point and "
                    "takes each prompt's own; here it is another's of the whole batch")  # fmt: skip
    answer = source.value("--output_key")
    fields: Fields = {
        "job.kind": "kto",
        "job.overlong": "truncate",
        "data.prompt_column": source.required("--input_key"),
    }
    if answer is not None:
        return fields | {"job.response_column": answer} | _template(source)
    source.value("--input_template")
    return fields


def _kd(source: Source) -> Fields:
    teacher, share = source.value("--teacher_model"), source.required("--kd_coef")
    fields: Fields = {
        "job.kind": "sft",
        "data.prompt_column": source.required("--input_key"),
        "job.response_column": source.required("--output_key"),
    } | _template(source)
    if share == 0:
        return fields
    if teacher is None:
        source.lack("job.distillation.path: give --teacher_model")
    source.note("OpenRLHF compares the distributions after each of the answer's tokens, here those are compared that "
                "predict its tokens, as its likelihood is")  # fmt: skip
    dtype = dtype_of(source, "--param_dtype")
    return fields | {"job.distillation": {"path": teacher, "coefficient": share, "dtype": dtype}}


def _pairs(source: Source) -> Fields:
    prompt, chosen = source.value("--prompt_key"), source.required("--chosen_key")
    fields: Fields = {"data.prompt_column": prompt or chosen, "job.chosen_column": chosen}
    return fields if prompt is None else fields | _template(source)


def _dpo(source: Source) -> Fields:
    reference = source.value("--ref_pretrain")
    if reference is not None and reference != source.value("--pretrain"):
        source.refuse("--ref_pretrain", "the reference is the policy as it begins: leave it out")
    fields: Fields = {"job.kind": "preference"}
    if source.value("--ipo"):
        return fields | {"job.loss.kind": "ipo"}
    return fields | {"job.loss.kind": "dpo", "job.loss.label_smoothing": source.required("--label_smoothing")}


def _reward_model(source: Source) -> Fields:
    return {"job.kind": "reward_model"}


def _system(name: str, rows: tuple[Parameter, ...], *rules: Rule) -> System:
    return make_system(f"openrlhf {name}", (COMMON, rows), rules=(model, _rows, _sizes, router, *rules, tracking))


FINISHED: Mapping[str, System] = {
    "openrlhf.cli.train_sft": _system("train_sft", SFT_ROWS, _sft),
    "openrlhf.cli.train_dpo": _system("train_dpo", PAIR_ROWS + DPO_ROWS, _pairs, _dpo),
    "openrlhf.cli.train_kto": _system("train_kto", KTO_ROWS, _kto),
    "openrlhf.cli.train_kd": _system("train_kd", KD_ROWS, _kd),
    "openrlhf.cli.train_rm": _system("train_rm", PAIR_ROWS + RM_ROWS, _pairs, _reward_model),
}
"""The system of each program."""
