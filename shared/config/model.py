"""Which model is trained."""

from typing import Literal

from pydantic import Field

from shared.config.base import Config


class ModelConfig(Config):
    """A causal language model in Hugging Face format."""

    path: str = Field(min_length=1)
    """Directory with config.json, safetensors and a tokenizer. A relative path is taken from the spec file's folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the weights in training and sampling. On a CPU without AMX, bfloat16 is much slower."""
