"""TRL's trainers on finished answers: ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer``.

Meanings and defaults: trl/trainer/{sft,dpo,kto,reward}_config.py and trl/trainer/{sft,dpo,kto,reward}_trainer.py of
v1.9.0, and of earlier releases where ``releases`` says so.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flotilla.importers.parameter import Parameter, applied, ignored, refused, translated, unsupported
from flotilla.importers.source import Rule, Source, System, make_system
from flotilla.importers.trl import arguments
from flotilla.importers.trl.common import (
    STEPS,
    batch,
    held_out,
    model,
    naming,
    optimiser,
    over,
    place,
    rate_of,
    router,
    tracking,
)
from flotilla.importers.trl.releases import default, release_of
from flotilla.importers.trl.written import Rows
from flotilla.importers.values import count, flag, number, text, texts, wrong

Fields = dict[str, Any]
HELD_OUT: Final = frozenset({"eval_strategy", "eval_steps", "eval_dataset", "dataset_test_split"})
CHECKED: Final = {"eval_dataset": "owner/held-out", "eval_strategy": "steps", "eval_steps": 8}
LENGTH: Final = 1024
POINTS: Final = {"kto": "mismatched", "apo_zero_unpaired": "zero"}
PROMPTED: Final = frozenset({"trl-lib/tldr", "trl-lib/math_shepherd"})


def _row(row: Parameter) -> Parameter:
    """Point what is measured on held-out rows at the job's own section."""
    if row.name not in HELD_OUT:
        return row
    target = "job.held_out.every_steps" if row.name == "eval_steps" else "job.held_out"
    context = {} if row.name == "dataset_test_split" else row.context
    return replace(row, targets=(target,), context={**context, **CHECKED})


COMMON: tuple[Parameter, ...] = (
    *(_row(row) for row in arguments.ROWS if row.name != "learning_rate"),
    translated("max_length", "job.max_tokens", count, "longest sequence", example=512, default=LENGTH,
               aliases=("max_seq_length",)),
)  # fmt: skip


def _rate(value: float) -> Parameter:
    return translated("learning_rate", "optimisation.learning_rate", number, "peak learning rate", example=3e-5,
                      default=value)  # fmt: skip


def _named(rows: tuple[Parameter, ...], name: str) -> Parameter:
    return next(row for row in rows if row.name == name)


WITHOUT_DROPOUT: Final = refused(
    "peft_config.lora_dropout", "a pair's loss takes two passes, which must compute the same: leave it out",
    default=0.0, harmless=(0,), aliases=("lora_dropout",),
)  # fmt: skip

SFT_ROWS: tuple[Parameter, ...] = (
    _rate(2e-5),
    translated("completion_only_loss", ("job.response_column",), flag, "the completion alone is learned, which is so "
               "by itself where rows have prompt and completion", example=True, default=None, context={}),
    translated("assistant_only_loss", "job.train_on", flag, "the assistant's turns alone are learned; by itself every "
               "token of a conversation is", example=True, default=False, context={}),
    refused("packing", "an update counts rows, and there packed rows of max_length tokens: leave it out, and set "
            "per_device_train_batch_size to the rows of an update; here rows share a forward pass by themselves",
            default=False),
    refused("loss_type", "tokens lose their negative log-likelihood", default=None,
            harmless=("nll", "chunked_nll")),
    refused("truncation_mode", "a longer row loses its last tokens", default="keep_start"),
    refused("dataset_text_field", "the loss is on answers: rows have messages, or prompt and completion",
            default="text", is_judged=True),
    refused("formatting_func", "write rows with messages, or with prompt and completion: dataset.map(...) is followed",
            default=None),
    *ignored("transformers draws each epoch in another order by itself", "shuffle_dataset"),
    *unsupported(arguments.PLACE, "packing_strategy", "eval_packing", "num_of_sequences", "chars_per_token"),
)  # fmt: skip
DPO_ROWS: tuple[Parameter, ...] = (
    _rate(1e-6),
    applied("beta", "job.loss.beta", number, "how strongly the policy is held to the reference", example=0.3,
            default=0.1),
    refused("loss_type", "the loss is sigmoid", default=["sigmoid"], is_judged=True, convert=texts),
    translated("label_smoothing", "job.loss.label_smoothing", number, "share of labels taken to be wrong; from 0.29 on "
               "without effect on sigmoid", example=0.1, default=0.0, context={"trl_version": "0.24.0"}),
    refused("loss_weights", "there is one loss", default=None, harmless=([1.0], [1])),
    refused("truncation_mode", "a longer pair loses its last tokens", default="keep_start", is_judged=True),
    refused("ref_model", "the reference is the policy as it begins: leave it out", default=None, is_judged=True),
    *(refused(name, why, default=value, harmless=(None,)) for name, why, value in (
        ("rpo_alpha", "its likelihood is a mean over the tokens of a batch: set job.supervised_coefficient, which is "
         "one over each answer's", None),
        ("ld_alpha", "all tokens of an answer count alike", None),
        ("f_divergence_type", "the divergence is the reverse KL", "reverse_kl"),
        ("use_weighting", "pairs count alike", False), ("sync_ref_model", "the reference stays as it began", False),
        ("reference_free", "there is a reference", False), ("padding_value", "rows have no padding", None),
    )),
    *unsupported("pairs are cut as a whole, where they are longer than max_length", "max_prompt_length",
                 "max_completion_length"),
    *unsupported(arguments.PLACE, "precompute_ref_log_probs", "precompute_ref_batch_size", "base_model_attribute_name"),
    *ignored("without effect beside the parameters that are translated", "f_alpha_divergence_coef", "discopop_tau",
             "ref_model_mixup_alpha", "ref_model_sync_steps", "label_pad_token_id", "generate_during_eval",
             "force_use_ref_model", "model_adapter_name", "ref_adapter_name", "ref_model_init_kwargs"),
)  # fmt: skip
KTO_ROWS: tuple[Parameter, ...] = (
    _rate(1e-6),
    applied("beta", "job.beta", number, "how strongly the policy is held to the reference", example=0.3, default=0.1),
    applied("desirable_weight", "job.desirable_weight", number, "weight of desirable answers", example=1.5,
            default=1.0),
    applied("undesirable_weight", "job.undesirable_weight", number, "weight of the others", example=1.5, default=1.0),
    translated("loss_type", "job.reference_point", text, "kto: mismatched; apo_zero_unpaired: zero",
               example="apo_zero_unpaired", default="kto"),
    _named(DPO_ROWS, "ref_model"),
    *(_named(DPO_ROWS, name) for name in ("sync_ref_model", "padding_value")),
    *unsupported("rows that are longer than max_length are left out", "truncation_mode", "max_prompt_length",
                 "max_completion_length"),
    *unsupported(arguments.PLACE, "precompute_ref_log_probs", "precompute_ref_batch_size"),
    *ignored("without effect beside the parameters that are translated", "ref_model_mixup_alpha",
             "ref_model_sync_steps", "label_pad_token_id", "generate_during_eval", "model_adapter_name",
             "ref_adapter_name", "ref_model_init_kwargs", "is_encoder_decoder"),
)  # fmt: skip
REWARD_ROWS: tuple[Parameter, ...] = (
    _rate(1e-4),
    refused("center_rewards_coefficient", "the loss is Bradley-Terry's alone", default=None),
    *ignored("a reward model's head has one output", "model_init_kwargs.num_labels"),
)  # fmt: skip


def _rows(source: Source) -> Fields:
    """Make training and held-out rows, lengths, batches and schedule."""
    fields: Fields = {"data.label_column": None, "job.max_tokens": source.value("max_length"),
                      "optimisation.groups_per_mini_batch": batch(source),
                      "optimisation.learning_rate": rate_of(source)}  # fmt: skip
    found = place(source, "train_dataset", "dataset_train_split")
    if found is not None:
        fields |= {"data.path": found["path"]} if set(found) == {"path"} else {"data.sources": [found]}
    elif source.value("train_dataset") is None:
        source.lack("data.path: give train_dataset, or dataset_name")
    return fields | _held_out(source) | _steps(source)


def _held_out(source: Source) -> Fields:
    if (held := held_out(source)) is None:
        return {}
    found, every = held
    return {"job.held_out": {**found, "every_steps": every}}


def _steps(source: Source) -> Fields:
    updates = source.required("max_steps")
    if updates <= 0:
        epochs = source.required("num_train_epochs")
        updates = 0 if source.rows is None else int(source.rows * epochs // batch(source))
    if not updates:
        source.lack(STEPS)
        return {}
    return over(source, int(updates), 1)


def keys_of(source: Source) -> set[str] | None:
    """List the columns that a script's own code writes; None where rows come as they are."""
    written = source.value("train_dataset")
    if not isinstance(written, Rows):
        return None
    found: set[str] = set()
    for node in ast.walk(ast.parse(written.code)):
        if isinstance(node, ast.Dict):
            found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
    return found


def _sft(source: Source) -> Fields:
    keys, asked = keys_of(source), source.value("completion_only_loss")
    fields: Fields = {"job.kind": "sft", "job.overlong": "truncate"}
    text_column = source.value("dataset_text_field")
    if text_column != "text":
        source.refuse("dataset_text_field", "rows have messages, or prompt and completion: make them so")
    is_pair = asked is not None or (keys is not None and {"prompt", "completion"} <= keys)
    if is_pair or str(source.value("train_dataset")) in PROMPTED:
        every = {"job.train_on": "every_token"} if asked is False else {}
        return fields | every | {"data.prompt_column": "prompt", "job.response_column": "completion"}
    if keys is None:
        source.note("rows are taken for conversations in the column messages; where they have prompt and completion: "
                    "completion_only_loss=True")  # fmt: skip
    learned = "all" if source.value("assistant_only_loss") else "every_token"
    return fields | {"data.prompt_column": "messages", "job.train_on": learned}


def _pairs(source: Source) -> Fields:
    keys = keys_of(source)
    if keys is not None and "prompt" in keys:
        return {"data.prompt_column": "prompt"}
    if keys is None:
        source.note("chosen and rejected are taken for whole conversations; where the rows have a prompt besides: "
                    "--set data.prompt_column=prompt")  # fmt: skip
    return {"data.prompt_column": "chosen"}


def _dpo(source: Source) -> Fields:
    if source.value("loss_type") != ["sigmoid"]:
        source.refuse("loss_type", f"{source.value('loss_type')} is not offered here: use sigmoid (TRL's ipo is a mean "
                      "over an answer's tokens, and here a sum)")  # fmt: skip
    _reference(source)
    if "truncation_mode" in source.given and source.value("truncation_mode") != "keep_start":
        source.refuse("truncation_mode", "a longer pair loses its last tokens: leave it out")
    smoothing = source.value("label_smoothing") if release_of(source) < (0, 29) else 0.0
    fields: Fields = {"job.kind": "preference", "job.loss.kind": "dpo", "job.loss.label_smoothing": smoothing}
    is_end = default(source, "truncation_mode", "dpo") == "keep_end"
    return fields | {"job.overlong": "filter" if is_end else "truncate"}


def _reference(source: Source) -> None:
    reference = source.value("ref_model")
    if reference is not None and reference != source.value("model"):
        source.refuse("ref_model", "the reference is the policy as it begins: leave it out")


def _kto(source: Source) -> Fields:
    _reference(source)
    kind = source.value("loss_type")
    if kind not in POINTS:
        raise wrong("loss_type", kind, " or ".join(POINTS))
    keys = keys_of(source)
    if keys is None:
        source.note("rows are taken for prompt, completion and label; where they have chosen and rejected, of which "
                    "TRL makes two rows, make them so: dataset.map(...) is followed")  # fmt: skip
    return {
        "job.kind": "kto",
        "job.response_column": "completion",
        "job.overlong": "filter",
        "job.reference_point": POINTS[kind],
        "data.prompt_column": "prompt",
        # Its trainer pairs prompts with others' answers by their places, and takes rows in their order.
        "data.shuffle": False,
    }


def _reward(source: Source) -> Fields:
    return {"job.kind": "reward_model", "job.overlong": "filter"}


def _system(name: str, rows: tuple[Parameter, ...], *rules: Rule) -> System:
    first = (naming, model, optimiser, router)
    common = COMMON if name == "sft" else tuple(each for each in COMMON if each.name != WITHOUT_DROPOUT.name)
    rows = rows if name == "sft" else (*rows, WITHOUT_DROPOUT)
    return make_system(f"trl {name}", (common, rows), rules=(*first, _rows, *rules, tracking))


TRL_FINISHED: Final[Mapping[str, System]] = {
    "SFTTrainer": _system("sft", SFT_ROWS, _sft),
    "DPOTrainer": _system("dpo", DPO_ROWS, _pairs, _dpo),
    "KTOTrainer": _system("kto", KTO_ROWS, _kto),
    "RewardTrainer": _system("reward", REWARD_ROWS, _pairs, _reward),
}
"""The system of each trainer."""
