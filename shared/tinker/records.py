"""Records of the Tinker API's models, requests and answers, exchanged by gateway, trainer and sampler."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

MANIFEST = "manifest.json"


class Record(BaseModel):
    """Kept as JSON; what a later release added is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Verb(StrEnum):
    """What a request of a model asks for."""

    CREATE = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save_weights"
    LOAD = "load_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    UNLOAD = "unload_model"


class Lora(Record):
    """Which adapters a model has."""

    rank: int = Field(ge=1, le=512)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """Asked for by the client as it is; the output layer is never adapted here, as ``weights_info`` reports."""

    @property
    def shape(self) -> tuple[int, bool, bool]:
        """What makes weights fit, whatever they were drawn from."""
        return self.rank, self.train_mlp, self.train_attn


class Model(Record):
    """A model that is trained.

    Attributes of its creation; how far it is, the queue knows.
    """

    model_id: str
    session_id: str
    owner: str
    lora: Lora | None = None
    """None: all weights are trained."""
    created: float = 0.0
    user_metadata: dict[str, str] = Field(default_factory=dict)
    began_from: str | None = None
    """``tinker://`` path of what it was made from; None: the base."""
    began_at: int = 0
    """Updates that those weights had."""


class AdamStep(Record):
    """Parameters of one update."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class Load(Record):
    """Begin with what was saved."""

    path: str
    optimizer: bool = False


class Save(Record):
    """Keep the present weights."""

    path: str
    """``tinker://`` path; of an ephemeral one, too."""
    ttl_seconds: int | None = Field(None, ge=1)
    overwrite: bool = False
    user_metadata: dict[str, str] = Field(default_factory=dict)
    sampling_session_id: str | None = None
    """Of an ephemeral one: the session that samples from it."""
    is_inflight: bool = False
    """Whether the sampling sessions of this kind of the model all sample from it now."""


class Saved(Record):
    """What a saved model is; written beside it, last."""

    path: str
    owner: str
    created: float
    seq: int = 0
    """The place of the request that saved it, among its model's."""
    step: int
    """Updates of its weights since the model was made, those before a load included."""
    num_bytes: int
    lora: Lora | None = None
    has_optimizer: bool = False
    is_public: bool = False
    expires: float | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)


class Sampled(Record):
    """Which weights sampled the tokens of one sequence from one on."""

    first_token: int
    path: str | None = None
    """Of the saved weights; None: the base model."""
    step: int = 0
    """Updates that those weights had."""


class SampledSequences(Record):
    """Of each sequence of a request: runs of its tokens, in order."""

    sequences: list[list[Sampled]]


class Chunk(Record):
    """Encoded text of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list)


class Prompt(Record):
    """What a model is given."""

    chunks: list[Chunk]

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(Record):
    """How to sample."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(Record):
    """A prompt to be completed, or scored."""

    prompt: Prompt
    sampling_params: Sampling = Sampling()
    num_samples: int = Field(1, ge=1, le=4096)
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = Field(0, ge=0, le=100)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    sampling_session_id: str = ""
    """What it samples from; or else the path."""
    path: str | None = None
    """Of the weights, where there is no session; None: the base model."""

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's own tokens are asked about."""
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


class Sampler(Record):
    """A sampling session."""

    session_id: str
    owner: str
    path: str | None = None
    """What it samples from; None: the base model, or what is in flight."""
    inflight_of: str | None = None
    """The model whose newest weights of this kind it samples from."""


class Session(Record):
    """What a client opened."""

    owner: str
    created: float
    sdk_version: str = ""
    tags: list[str] = Field(default_factory=list)
    is_finished: bool = False


class Update(Record):
    """What is known of one update of a model."""

    step: int
    """Updates of its weights with this one; loaded weights bring theirs along."""
    grad_norm: float
    learning_rate: float
    loss: float | None = None
    """Sum of the losses whose gradients it used; None where there was none."""
    seconds: int = 0
    """When it was done, since the epoch."""


class Category(StrEnum):
    """Whose fault a failure is."""

    USER = "user"
    SERVER = "server"


class Failure(Record):
    """Why a request failed."""

    error: str
    category: Category
