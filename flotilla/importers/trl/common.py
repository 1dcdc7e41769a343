"""What the parameters of all of TRL's trainers mean together: model, rows, schedule, checkpoints, trackers."""

import math
import re
from typing import Any, Final

from flotilla.importers.adapter import adapter_name, trl_rows_adapter
from flotilla.importers.datasets import file_or_hub
from flotilla.importers.source import Source
from flotilla.importers.spelling import ALL, HALF, PATTERN, WIDENED, chosen
from flotilla.importers.trl.arguments import spec_name
from flotilla.importers.trl.releases import default
from flotilla.importers.trl.written import Called, Rows
from flotilla.importers.values import shown

Fields = dict[str, Any]
FILES: Final = frozenset({"json", "csv", "parquet", "arrow"})
"""Builders of datasets that read files."""
FIRST_ROWS: Final = re.compile(r"([\w.-]+)\[:(\d+)\]")
SCHEDULES: Final = {
    "linear": ("linear", 0.0), "cosine": ("cosine", 0.0), "constant": ("constant", None),
    "constant_with_warmup": ("constant", None), "cosine_with_min_lr": ("cosine", None),
    "cosine_with_restarts": ("cosine", 0.0),
}  # fmt: skip
FED: Final = frozenset({"wandb", "tensorboard", "mlflow", "trackio", "swanlab"})
STEPS: Final = (
    "optimisation.steps: num_train_epochs counts passes over the rows: give --rows N, their number, or max_steps"
)
OF_PEFT: Final = ["q_proj", "v_proj"]
"""What peft adapts by itself in most models (src/peft/utils/constants.py)."""


def naming(source: Source) -> Fields:
    """Name the experiment."""
    return {"name": spec_name(source.value("run_name"), source.value("output_dir"), source.value("model"))}


def _has_adapters(source: Source) -> bool:
    return any(name.startswith("peft_config.") for name in source.given)


def _element_type(source: Source) -> Fields:
    """Make the element type of passes, and of the weights where these are trained as they are."""
    dtype = str(source.value("model_init_kwargs.dtype") or "").removeprefix("torch.")
    is_half = dtype == "bfloat16"
    if dtype not in {"", "auto", "bfloat16", "float32", *HALF}:
        source.refuse("model_init_kwargs.dtype", f"{dtype!r} is not offered here: use bfloat16 or float32")
    is_scaled = dtype in HALF or bool(source.value("fp16"))
    if is_scaled:
        source.note(WIDENED)
    is_narrow = (is_half or default(source, "bf16")) and not is_scaled
    masters: Fields = {"optimisation.masters": "model"} if is_half and is_narrow and not _has_adapters(source) else {}
    return {"model.dtype": "bfloat16" if is_narrow else "float32", **masters}


def model(source: Source) -> Fields:
    """Make the model, what its weights are kept as, and its adapters."""
    path = source.value("model")
    fields: Fields = {}
    if path is None:
        source.lack("model.path: give model=, a directory or a name on the hub")
    else:
        fields["model.path"] = path
    fields |= _element_type(source)
    if (revision := source.value("model_init_kwargs.revision")) not in {None, "main"}:
        fields["model.revision"] = revision
    attention = source.value("model_init_kwargs.attn_implementation")
    if attention in {"eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"}:
        fields["model.attention"] = attention
    elif attention is not None:
        source.put_aside(source.given["model_init_kwargs.attn_implementation"].spelling, "attention is torch's own")
    return fields | (_adapters(source) if _has_adapters(source) else _quantised_alone(source))


def _quantised_alone(source: Source) -> Fields:
    if _is_packed(source):
        name = "load_in_4bit" if "load_in_4bit" in source.given else "model_init_kwargs.quantization_config"
        source.refuse(name, "weights that train are not quantised, only those beside adapters: give a peft_config")
    return {}


def _is_packed(source: Source) -> bool:
    config = source.value("model_init_kwargs.quantization_config")
    if config is not None and not (isinstance(config, dict) and config.get("load_in_4bit")):
        source.refuse("model_init_kwargs.quantization_config", "weights beside adapters are kept in 4 bits, or whole")
    packed = isinstance(config, dict) and bool(config.get("load_in_4bit"))
    kind = config.get("bnb_4bit_quant_type", "fp4") if packed and isinstance(config, dict) else "nf4"
    if kind not in {"nf4", "fp4"}:
        source.refuse("model_init_kwargs.quantization_config", f"{kind} is not offered here: use nf4 or fp4")
    return packed or bool(source.value("load_in_4bit"))


def _adapters(source: Source) -> Fields:
    targets = source.value("peft_config.target_modules")
    listed = [targets] if isinstance(targets, str) else targets
    if listed and any(sign in str(each) for each in listed for sign in PATTERN):
        source.refuse("peft_config.target_modules", f"{shown(targets)} is a pattern: name the layers, such as q_proj")
    fields: Fields = {
        "model.lora.rank": source.required("peft_config.r"),
        "model.lora.alpha": float(source.required("peft_config.lora_alpha")),
        "model.lora.targets": ALL if listed and set(listed) & {ALL, "all"} else listed or OF_PEFT,
    }
    if source.value("peft_config.use_rslora"):
        fields["model.lora.rank_stabilised"] = True
    dropout = source.value("peft_config.lora_dropout")
    if dropout and source.system.name in {"trl", "trl rloo", "trl sft"}:
        fields["model.lora.dropout"] = dropout
    if _is_packed(source):
        config = source.value("model_init_kwargs.quantization_config")
        of_config = config if isinstance(config, dict) else {"bnb_4bit_quant_type": "nf4"}
        fields["model.lora.quantisation.dtype"] = of_config.get("bnb_4bit_quant_type", "fp4")
        fields["model.lora.quantisation.double"] = bool(of_config.get("bnb_4bit_use_double_quant", False))
    return fields


def optimiser(source: Source) -> Fields:
    """Make AdamW and its rate."""
    norm = source.value("max_grad_norm")
    return {
        "optimisation.betas": [source.required("adam_beta1"), source.required("adam_beta2")],
        "optimisation.epsilon": source.required("adam_epsilon"),
        "optimisation.max_grad_norm": norm or None,
        "optimisation.activation_checkpointing": bool(default(source, "gradient_checkpointing")),
    }


def router(source: Source) -> Fields:
    """Make the balance of experts, where it is written: of a model without experts it would be refused."""
    name = "router_aux_loss_coef"
    balance = source.value(name) if name in source.given else None
    return {"optimisation.router.balance": balance, "optimisation.router.scope": "model"} if balance else {}


def batch(source: Source) -> int:
    """Count what one update is made of: rows, or answers."""
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    return math.prod(int(source.required(name)) for name in sizes)


def over(source: Source, updates: int, per_step: int) -> Fields:
    """Make steps, schedule, warm-up and checkpoints.

    Args:
        source: with the parameters.
        updates: of all steps, at least 1.
        per_step: updates that a step of the spec makes.
    """
    steps = max(updates // per_step, 1)
    return {"optimisation.steps": steps} | _schedule(source, updates) | _checkpoints(source, updates, per_step, steps)


def _schedule(source: Source, updates: int) -> Fields:
    kind = source.value("lr_scheduler_type")
    found = source.choose("lr_scheduler_type", SCHEDULES)
    if found is None:
        return {}
    name, floor = found
    fields: Fields = {"optimisation.schedule": name}
    if kind == "cosine_with_min_lr":
        rate, least = source.value("lr_scheduler_kwargs.min_lr_rate"), source.value("lr_scheduler_kwargs.min_lr")
        if rate is None and least is None:
            source.refuse("lr_scheduler_type", "cosine_with_min_lr takes min_lr_rate or min_lr: give one")
        floor = rate if rate is not None else (least or 0.0) / rate_of(source)
    if floor is not None:
        fields["optimisation.min_learning_rate_ratio"] = floor
    written, share = source.required("warmup_steps"), source.value("warmup_ratio")
    warmup = (
        math.ceil(updates * (share or 0)) if not written else math.ceil(updates * written if written < 1 else written)
    )
    return fields | {"optimisation.warmup_updates": 0 if kind == "constant" else warmup}


def rate_of(source: Source) -> float:
    """Return the peak learning rate."""
    rate: float = default(source, "learning_rate", source.system.name.rpartition(" ")[2])
    return rate


def _checkpoints(source: Source, updates: int, per_step: int, steps: int) -> Fields:
    strategy = source.choose("save_strategy", {"steps": "steps", "no": "no", "epoch": "epoch", "best": "steps"})
    every = steps
    if strategy == "steps":
        written = source.required("save_steps")
        every = min(max(math.ceil(updates * written if written < 1 else written) // per_step, 1), steps)
    elif strategy == "epoch":
        every = max(int(steps / max(source.required("num_train_epochs"), 1)), 1)
    fields: Fields = {"checkpoint.every_steps": every}
    if (keep := source.value("save_total_limit")) is not None:
        fields["checkpoint.keep"] = keep
    if source.value("save_only_model"):
        fields["checkpoint.contents"] = ["model"]
    return fields


def tracking(source: Source) -> Fields:
    """Make the trackers that are named."""
    written = [each for each in source.value("report_to") or [] if each not in {"none", "all"}]
    others = [each for each in written if each not in FED]
    if others:
        source.put_aside(source.given["report_to"].spelling, f"{', '.join(others)} is not fed: use wandb, tensorboard, "
                         "mlflow, trackio or swanlab")  # fmt: skip
    return chosen(source, "report_to", [each for each in written if each in FED])


def held_out(source: Source) -> tuple[Fields, int | None] | None:
    """Read the rows that are evaluated on, and after how many steps; None where there are none, or no strategy asks."""
    strategy = source.choose("eval_strategy", {"no": None, "steps": "steps", "epoch": "epoch"})
    if strategy is None:
        return None
    found = place(source, "eval_dataset", "dataset_test_split")
    if found is None and source.has("dataset_test_split"):
        found = place(source, "train_dataset", "dataset_test_split")
    if found is None:
        return None
    every = source.value("eval_steps") if strategy == "steps" else None
    return found, None if every is None else int(every)


def place(source: Source, name: str, split_name: str) -> Fields | None:
    """Read where rows are; None where nothing is written, or where it was refused."""
    value = source.value(name)
    if value is None:
        return None
    if isinstance(value, Rows):
        if value.why:
            source.refuse(name, f"{value.shown}: {value.why}: write a file of rows, or a function without it")
            return None
        file = adapter_name(f"{name}.py", "rows")
        source.files[file] = trl_rows_adapter(value.code)
        return {"custom": f"{file}:Rows"}
    if isinstance(value, Called):
        return _loaded(source, name, value)
    if not isinstance(value, str):
        source.refuse(name, f"{shown(value)}: give the name of a dataset, or load_dataset(...)")
        return None
    found = file_or_hub(value)
    subset, split = source.value("dataset_config"), source.value(split_name)
    if "hub" in found:
        found |= {"subset": subset} if subset else {}
        found |= {"split": split} if split not in {None, "train"} else {}
    return found


def _loaded(source: Source, name: str, call: Called) -> Fields | None:
    path, subset = call.argument(0, "path"), call.argument(1, "name")
    split, files = call.keywords.get("split", "train"), call.argument(3, "data_files")
    found: Fields = {}
    if (first := FIRST_ROWS.fullmatch(str(split))) is not None:
        split, found["max_rows"] = first[1], int(first[2])
    elif not re.fullmatch(r"[\w.-]+", str(split)):
        source.refuse(name, f"split {split!r}: name one split, perhaps with its first rows: train[:1000]")
        return None
    if "first" in call.keywords:
        found["max_rows"] = min(call.keywords["first"], found.get("max_rows", call.keywords["first"]))
    if isinstance(files, dict):
        files = files.get(split)
    listed = [files] if isinstance(files, str) else files or []
    if path in FILES or listed:
        if not listed:
            source.refuse(name, f"{call!r}: name the files in data_files")
            return None
        more = {"more_paths": listed[1:]} if listed[1:] else {}
        return {"path": listed[0], **more, **found}
    found = {**file_or_hub(str(path)), **found}
    if "hub" in found or not re.search(r"\.\w+$", str(found["path"])):
        found |= {"subset": subset} if subset else {}
        found |= {"split": split} if split != "train" else {}
    return found
