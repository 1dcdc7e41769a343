"""Names of other systems in our spelling: paths, element types, attention, adapters, images, trackers.

Where a launch file names no tracker none is fed, whatever its system would feed by itself: a tracker does not change
what is trained, and needs accounts and packages where the gateway runs.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from flotilla.importers.source import Source
from flotilla.importers.values import shown, texts


def experiment_name(value: Any) -> str:
    """Keep what an experiment's name may hold."""
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value if value is not None else "")).strip("-._")
    return kept[:63] or "imported"


def is_private_host(url: str) -> bool:
    """Return whether a URL names a host that only its own network knows."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".lan", ".svc"))


HALF: Final = frozenset({"float16", "fp16", "half"})
DTYPES: Mapping[str, str] = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32", "float": "float32",
    **dict.fromkeys(sorted(HALF), "float32"),
}  # fmt: skip
"""What a name means here: float16 is computed in float32, which holds all of its values and needs no scaled losses."""
WIDENED: Final = (
    "float16 becomes float32, which holds its values and needs no scaled losses: weights and activations take twice "
    "the memory; --set model.dtype=bfloat16 takes as much as float16, and rounds more"
)


def dtype_of(source: Source, name: str) -> str:
    """Return the element type that a parameter asks for; bfloat16 where it is refused."""
    if str(source.value(name)) in HALF:
        source.note(WIDENED)
    return str(source.choose(name, DTYPES) or "bfloat16")


ROUTER_DTYPE: Final = (
    "a router's scores are computed in model.dtype, as transformers' own model has it, with their softmax in float32: "
    "other experts may be chosen where two scores are close"
)
NAMES = {
    "eager": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    **{name: name for name in ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")},
}


def attention_of(written: Any, *, on_gpus: bool, dtype: str, divides_sequences: bool) -> str | None:
    """Return ``model.attention`` for a name; None where there is no such one, or where it cannot compute.

    Args:
        written: the name.
        on_gpus: whether the trainer is known to be on GPUs.
        dtype: what it computes in.
        divides_sequences: whether ranks share sequences, which they do around sdpa alone.
    """
    found = NAMES.get(str(written))
    if found is None or (divides_sequences and found != "sdpa"):
        return None
    is_possible = not found.startswith("flash") or (on_gpus and dtype == "bfloat16")
    return found if is_possible else None


OF_A_MODEL = re.compile(
    r"(?:^|[-_/.\d])(?:vl|vlm|vision|omni|llava|internvl|minicpm-?[ov])(?:$|[-_/.\d])", re.IGNORECASE
)
OF_ROWS = re.compile(r"geo3k|geometry3k|(?:^|[-_/.])(?:vl|vqa|visual|vision|images?)(?:$|[-_/.])", re.IGNORECASE)
VIDEOS = re.compile(r"videos?(?:$|[-_/.])", re.IGNORECASE)
TEXT_ONLY = re.compile(
    r"omni|llava|internvl(?!.*-hf$)|internvl.*gpt|minicpm|gemma|pixtral|molmo|idefics|smolvlm|glm-?4|kimi-?vl|phi-?[34]|llama",
    re.IGNORECASE,
)
"""Models that take images elsewhere and of which only the text is computed here (docs/images.md)."""
NOT_SEEN: Final = (
    "data.images: {model} is none of the models whose images are computed here, which are Qwen2-VL, Qwen2.5-VL, "
    "Qwen3-VL, Qwen3.5 and InternVL (its checkpoints whose names end in -hf): name one of them, or train on rows "
    "without images"
)


def not_seen(model: str) -> str | None:
    """Return why a model, by its name, cannot be shown images here; None where nothing is known against it."""
    last = model.rstrip("/").rpartition("/")[2]
    return NOT_SEEN.format(model=last) if TEXT_ONLY.search(last) else None


KINDS: Mapping[str, str | None] = {
    "wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard", "file": "jsonl", "trackio": "trackio",
    "swanlab": "swanlab",
    "console": None, "stdout": None,
}  # fmt: skip
"""What a name means here; None: flotilla watch shows it."""
KEY = "the account's key is not part of a spec: set WANDB_API_KEY, or SWANLAB_API_KEY, where the gateway runs"


def swanlab_project(name: str) -> str:
    """Replace what SwanLab refuses in a project's name."""
    return re.sub(r"[^0-9a-zA-Z_\-+.]", "_", name)[:100]


def chosen(source: Source, parameter: str, written: Sequence[str], **options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the trackers that a list of names asks for; one that is not offered is called unsupported.

    Args:
        parameter: that the list was written to.
        options: further fields by our kind.
    """
    kinds: list[str] = []
    for name in written:
        if name not in KINDS:
            why = f"{name} is none of the trackers here, which are {', '.join(sorted(KINDS))}: the run is shown by them"
            source.put_aside(source.given[parameter].spelling, why)
            continue
        kind = KINDS[name]
        if kind is not None and kind not in kinds:
            kinds.append(kind)
    return {"tracking.trackers": [{"kind": kind, **options.get(kind, {})} for kind in kinds]} if kinds else {}


ALL = "all-linear"
PATTERN = "*+?|()[]{}^$\\"


@dataclass(frozen=True, slots=True)
class LowRank:
    """A system's parameters of adapters; None where it has none."""

    rank: str
    alpha: str
    targets: str
    exclude: str | None = None
    dropout: str | None = None
    quantised: str | None = None


def layers(name: str, value: Any) -> list[str] | None:
    """Read names of layers: a list, or text with spaces or commas between them."""
    found = texts(name, value)
    return found and [part for item in found for part in item.replace(",", " ").split()]


def low_rank(source: Source, names: LowRank) -> dict[str, Any]:
    """Make the section of adapters; nothing where the rank is 0."""
    rank = source.value(names.rank)
    is_quantised = names.quantised is not None and bool(source.value(names.quantised))
    if not rank:
        if names.quantised is not None and is_quantised:
            reason = f"weights that train are not quantised, only those beside adapters: set {names.rank}"
            source.refuse(names.quantised, reason)
        return {}
    fields: dict[str, Any] = {"model.lora.rank": rank, "model.lora.alpha": float(source.required(names.alpha))}
    fields["model.lora.targets"] = named_layers(source, names.targets) or ALL
    if names.exclude is not None and (excluded := named_layers(source, names.exclude)):
        fields["model.lora.exclude"] = excluded
    if names.dropout is not None and (dropout := source.value(names.dropout)):
        fields["model.lora.dropout"] = dropout
    if is_quantised:
        fields |= {"model.lora.quantisation.dtype": "nf4", "model.lora.quantisation.double": True}
    return fields


def named_layers(source: Source, name: str) -> list[str] | str | None:
    """Read which layers a parameter names: all of them, or some; a pattern is refused."""
    found: list[str] | None = source.value(name)
    if found and set(found) & {ALL, "all"}:
        return ALL
    if found and any(sign in each for each in found for sign in PATTERN):
        source.refuse(name, f"{shown(found)} is a pattern of names: name the layers themselves, such as q_proj")
        return None
    return found
