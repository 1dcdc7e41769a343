"""Element types by the names that other systems have for them."""

from collections.abc import Mapping
from typing import Final

from flotilla.importers.source import Source

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
