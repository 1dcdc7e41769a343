"""How progress is measured on problems that are never trained on."""

from pydantic import Field

from shared.config.base import Config


class EvaluationConfig(Config):
    """Held-out problems, answered at one pinned policy version while training goes on."""

    path: str = Field(min_length=1)
    """Dataset with the columns that ``data`` names."""
    every_versions: int | None = Field(None, ge=1)
    """Evaluate each time this many versions were published; null: only at the start and at the end."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    greedy: bool = True
    """Take the most likely token; false samples as training does."""
    group_size: int = Field(1, ge=1)
    """Answers per problem; accuracy is their mean."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Upper bound on sampled tokens; null takes that of ``rollout.sampling``."""
    deadline_seconds: float = Field(600.0, gt=0)
    """An evaluation that takes longer is given up, and said to be."""
