"""Attention by name, as other systems call it."""

from typing import Any

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
