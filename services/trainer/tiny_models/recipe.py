"""Which small models a trial needs. No torch here."""

from pydantic import Field, JsonValue

from flotilla.shared.config.base.model import Config


class ModelRecipe(Config):
    """One model."""

    directory: str = Field(min_length=1)
    """Where it goes, from the recipe's folder."""
    family: str = Field(min_length=1)
    """``model_type`` of transformers."""
    config: dict[str, JsonValue] | None = None
    """What its config.json says; null: transformers' defaults of the family."""
    scores: bool = False
    """Whether it is a sequence classifier with one output."""
    seed: int = Field(0, ge=0)
    """Of its weights."""


class Recipe(Config):
    """All that a trial needs."""

    models: tuple[ModelRecipe, ...] = Field(min_length=1)
    texts: tuple[str, ...]
    """What the tokenizer is trained on."""
    answers: tuple[str, ...]
    """What rows expect; each is one token."""
    max_tokens: int = Field(ge=8)
    """Longest sequence."""
