"""Held-out rows with finished answers, as the trainer reads them from the gateway."""

from pydantic import Field

from flotilla.shared.schemas.wire import TolerantWire


class HeldOutAnswer(TolerantWire):
    """One answer."""

    token_ids: tuple[int, ...]
    """Prompt and answer."""
    loss_mask: tuple[int, ...]
    """1 for each token that counts."""
    reward: float
    """1 of a demonstration and of a preferred answer, else 0."""


class HeldOutPage(TolerantWire):
    """Some rows, in their order; those that are too long are left out."""

    rows: tuple[tuple[HeldOutAnswer, ...], ...]
    """The answers of each."""
    next: int | None = Field(None, ge=0)
    """First row of the next page; null after the last."""
