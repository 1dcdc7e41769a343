"""Adapters of other systems: what their rank, scale and layers become in ``model.lora``."""

from dataclasses import dataclass
from typing import Any

from flotilla.importers.source import Source
from flotilla.importers.values import shown, texts

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
