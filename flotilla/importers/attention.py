"""How a model computes, as other systems say it: attention by name, and the precision of a router."""

from typing import Any, Final

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
