"""Which dataset rows become tasks."""

from pydantic import Field

from shared.config.base import Config


class DataConfig(Config):
    """Training prompts: one row, one task per epoch."""

    path: str = Field(min_length=1)
    """JSON, JSONL, CSV or parquet file; a relative path is taken from the spec file's folder."""
    prompt_column: str = "prompt"
    """Column with the user's text, or with a list of {role, content} messages."""
    label_column: str | None = "label"
    """Column that verifiers compare with; null if the dataset has none."""
    data_source_column: str | None = None
    """Column whose value chooses among verifiers; null if there is one verifier for all."""
    system_prompt: str | None = None
    """Put before each prompt as a system message."""
    max_rows: int | None = Field(None, ge=1)
    """Use the first rows only."""
    shuffle: bool = True
    """Draw each epoch in another order; false issues rows as they stand in the file."""
