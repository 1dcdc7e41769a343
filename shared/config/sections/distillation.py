"""The ``algorithm.distillation`` section: a teacher whose log-probs teach the student token by token."""

from typing import Literal, Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config
from flotilla.shared.config.sections.components import GraderUrl
from flotilla.shared.config.sections.model import ModelConfig, OtherModelConfig, is_hub_name


class TeacherServerConfig(Config):
    """A teacher behind a URL: an inference server that returns log-probabilities of given token ids."""

    url: GraderUrl
    """Base URL of the server, such as ``http://teacher.example.com:30000``."""
    kind: Literal["sglang", "vllm", "openai"]
    """How it is asked. sglang: ``/generate`` with ``logprob_start_len``; vllm: ``/v1/completions`` with
    ``prompt_logprobs``; openai: ``/v1/completions`` with ``echo``, which does not return token ids."""
    model: str | None = Field(None, min_length=1)
    """Name of the model on the server, of kinds vllm and openai. Null: none is sent."""
    data_sources: tuple[str, ...] | None = Field(None, min_length=1)
    """Teach only samples of these data sources. Null: all."""
    api_key_env: str | None = Field(None, min_length=1)
    """Name of the reward service's environment variable that holds the API key. Null: none is sent."""
    concurrency: int = Field(32, ge=1, le=1024)
    """Requests that one reward service has with the server at a time."""
    attempt_seconds: float = Field(120.0, gt=0, le=86400)
    """Time for one answer. A server that gives none is waited for, and named in the experiment's status."""
    allow_private: bool = False
    """As for a remote grader."""

    @model_validator(mode="after")
    def _model_where_it_is_sent(self) -> Self:
        if self.kind == "sglang" and self.model is not None:
            raise ValueError("model has no effect with kind sglang, whose server has one: leave it out")
        return self


class TeacherModelConfig(OtherModelConfig):
    """One of several teachers that the trainer loads, for the rows of some data sources."""

    data_sources: tuple[str, ...] = Field(min_length=1)
    """Whose samples it teaches."""


class DistillationConfig(Config):
    """On-policy distillation: each sampled token's advantage gets coefficient * (log p teacher - log p student)."""

    path: str | None = Field(None, min_length=1)
    """The teacher, which the trainer loads: a directory in Hugging Face format, or a name on the hub, as `model.path`
    has it. Its tokenizer must give every token the id that the student's gives it."""
    revision: str | None = Field(None, min_length=1)
    """Branch, tag or commit of a hub's model; null is its main branch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Element type of the teacher's weights."""
    teachers: tuple[TeacherModelConfig, ...] = ()
    """Instead of ``path``: several models that the trainer loads, each of which teaches its own data sources."""
    servers: tuple[TeacherServerConfig, ...] = ()
    """Instead of ``path``: teachers behind URLs, which the reward services ask. Of several each has its own data
    sources."""
    coefficient: float = Field(1.0, gt=0)
    """Advantage per nat by which the teacher finds a sampled token likelier than the student did."""
    value_clamp: float | None = Field(10.0, gt=0)
    """Bound of a token's difference in nats, either way; null for none."""
    pure: bool = False
    """The teacher alone teaches: advantages of rewards are left out, and `reward` may be."""

    @property
    def model(self) -> ModelConfig | None:
        """The teacher that the trainer loads, as what finds and downloads it reads it; None behind URLs."""
        if self.path is None:
            return None
        return ModelConfig(path=self.path, revision=self.revision, dtype=self.dtype)

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The teachers that the trainer loads, by the field of their path below this section."""
        named = {f"teachers.{number}.path": each.model for number, each in enumerate(self.teachers)}
        return named if self.model is None else {"path": self.model}

    @property
    def data_sources(self) -> frozenset[str] | None:
        """The data sources that have a teacher; None where all have one."""
        named = [*(each.data_sources for each in self.teachers), *(each.data_sources for each in self.servers)]
        if not named or None in named:
            return None
        return frozenset(source for sources in named for source in sources or ())

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if sum((self.path is not None, bool(self.teachers), bool(self.servers))) != 1:
            raise ValueError(
                "the teacher is a model that the trainer loads (path), or several are (teachers), or they are behind "
                "URLs (servers): give one of these"
            )
        if self.path is None and (self.revision is not None or self.dtype != "float32"):
            name, has = "dtype" if self.revision is None else "revision", "teachers" if self.teachers else "servers"
            why = "each of which has its own" if self.teachers else "which loaded their models themselves"
            raise ValueError(f"{name} has no effect with {has}, {why}: leave it out")
        if self.revision is not None and self.path is not None and not is_hub_name(self.path):
            raise ValueError("revision has an effect only where path is a name on the hub, as owner/name: leave it out")
        return self

    @model_validator(mode="after")
    def _one_teacher_each(self) -> Self:
        taught: set[str] = set()
        for number, server in enumerate(self.servers):
            if server.data_sources is None and len(self.servers) > 1:
                raise ValueError(
                    f"servers.{number} teaches all data sources, and there are others: name the data_sources of each"
                )
        for sources in (*(each.data_sources for each in self.teachers), *(each.data_sources for each in self.servers)):
            twice = taught & set(sources or ())
            if twice:
                raise ValueError(f"two teachers have the data source {min(twice)!r}: leave it with one of them")
            taught |= set(sources or ())
        return self
