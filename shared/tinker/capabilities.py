"""What a base model can be used for through the Tinker API; read from its files, without torch."""

import json
from pathlib import Path

from pydantic import ValidationError

from flotilla.shared.errors import ModelError
from flotilla.shared.tinker.records import Record

LONGEST_CONTEXT = 4096
"""Prompt and completion together: the sampler keeps room for this many in each place of its batch."""


class _Positions(Record):
    max_position_embeddings: int | None = None
    n_positions: int | None = None


def positions_of(model: Path) -> int:
    """Return how many tokens the model can read.

    Raises:
        ModelError: the model's ``config.json`` cannot be read.
    """
    try:
        found = _Positions.model_validate(json.loads((model / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ModelError(f"{model}: config.json cannot be read: {error}") from error
    return found.max_position_embeddings or found.n_positions or LONGEST_CONTEXT


def context_tokens_of(model: Path) -> int:
    """Return how many tokens prompt and completion may have together.

    Raises:
        ModelError: the model's ``config.json`` cannot be read.
    """
    return min(LONGEST_CONTEXT, positions_of(model))
