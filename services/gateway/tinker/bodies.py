"""Bodies of the Tinker API's requests, as its client (SDK 0.38) sends them; what is not read is left out."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from flotilla.shared.tinker.records import AdamStep, Lora, Record, Sample

MOST_BYTES = 32 * 1024 * 1024
"""Of what is to be computed, as it is; the client cuts it into chunks of five megabytes, by its own estimate."""
LARGEST_NUMBER = 2**31 - 1
"""Of a model of a session, or of a request of a model: part of file names, and of what Redis counts."""
LONGEST_SECONDS = 100 * 366 * 24 * 3600
"""The end of what is kept is a date."""


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=128)], Annotated[str, Field(max_length=4096)]], Field(max_length=64)
]
"""Kept with models and what is saved of them."""


class CreateSession(Record):
    """Open a session."""

    tags: list[Annotated[str, Field(max_length=256)]] = Field(default_factory=list, max_length=100)
    sdk_version: str = Field("", max_length=64)


class OfSession(Record):
    """Names a session."""

    session_id: str


class Optimizer(Record):
    """Which optimiser."""

    type: str = "adamw"


class CreateModel(Record):
    """Make a model."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=LARGEST_NUMBER)
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: Metadata | None = None


class OfModel(Record):
    """Names a model, and the place among its requests."""

    model_id: str
    seq_id: int = Field(1, ge=1, le=LARGEST_NUMBER)


class OptimStep(OfModel):
    """Update a model."""

    optim_params: AdamStep = Field(validation_alias=AliasChoices("optim_params", "adam_params"))


class SaveWeights(OfModel):
    """Save a model to train from it."""

    path: str | None = None
    ttl_seconds: int | None = Field(None, ge=1, le=LONGEST_SECONDS)
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(OfModel):
    """Save a model to sample from it."""

    path: str | None = None
    sampling_session_seq_id: int | None = Field(None, ge=0, le=LARGEST_NUMBER)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(None, ge=1, le=LONGEST_SECONDS)
    user_metadata: Metadata | None = None


class SaveExternal(OfModel):
    """Save a model to download it."""

    path: str
    ttl_seconds: int | None = Field(None, ge=1, le=LONGEST_SECONDS)
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Record):
    """Load what was saved: as a model's first request, or into one that was just made."""

    path: str
    optimizer: bool = False
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, le=LARGEST_NUMBER)
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1, le=LARGEST_NUMBER)
    optimizer_config: Optimizer | None = None
    user_metadata: Metadata | None = None


class CreateSampler(Record):
    """Open a sampling session."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=LARGEST_NUMBER)
    base_model: str | None = None
    model_path: str | None = None


class AskSample(Sample):
    """Sample; what names the weights, and what is not served."""

    base_model: str | None = None
    model_path: str | None = None
    seq_id: int | None = Field(None, ge=0, le=LARGEST_NUMBER)
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: dict[str, object] | None = None


class Retrieve(Record):
    """Ask for an answer."""

    request_id: str = Field(max_length=300)


class WeightsInfo(Record):
    """Ask what a saved model is."""

    tinker_path: str


class Ttl(Record):
    """How long a saved model is kept from now on; null: without end."""

    ttl_seconds: int | None = Field(None, ge=1, le=LONGEST_SECONDS)
