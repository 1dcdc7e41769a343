"""The engines that sample completions: the embedded one, and SGLang.

Each class names what its engine promises, and which of the spec's wishes need a promise that it does not make.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.base import Config, Device, Threads
from shared.schemas.engine import EngineCapability

OptionValue = bool | int | float | str | None
Options = Mapping[str, OptionValue | tuple[OptionValue, ...]]
OWNED_OPTIONS: Mapping[str, str] = {
    "model": "model.path",
    "model_path": "model.path",
    "host": "nothing: the server listens on the loopback address",
    "port": "nothing: a free port is taken",
    "dtype": "model.dtype",
    "device": "rollout.engine.device",
    "base_gpu_id": "rollout.engine.device",
    "max_running_requests": "rollout.engine.slots",
    "context_length": "rollout.engine.context_tokens",
    "skip_tokenizer_init": "nothing: it depends on rollout.sampling.stop",
    "weight_version": "nothing: it is the policy version",
    "api_key": "nothing: the server gets a key of its own",
    "admin_api_key": "nothing: the server gets a key of its own",
    "data_parallel_size": "resources.rollouts: one server is one replica",
    "dp_size": "resources.rollouts: one server is one replica",
    "dp": "resources.rollouts: one server is one replica",
    "nnodes": "nothing: a server runs on one node",
    "node_rank": "nothing: a server runs on one node",
    "allow_auto_truncate": "nothing: what does not fit the context is refused",
    "tokenizer_worker_num": "nothing: several do not check the server's key",
    "preferred_sampling_params": "rollout.sampling",
    "ssl_keyfile": "nothing: the server listens on the loopback address",
    "ssl_certfile": "nothing: the server listens on the loopback address",
    "grpc_mode": "nothing: the server speaks HTTP",
    "config": "rollout.engine.options: it would override what is set here",
    "trust_remote_code": "nothing: code from a model directory is never run",
    "custom_weight_loader": "nothing: it names a module, which would be imported",
    "forward_hooks": "nothing: they name modules, which would be imported",
}
"""Server arguments that follow from the rest of the spec, and what sets them instead."""


class TorchEngineConfig(Config):
    """The embedded engine: any Hugging Face causal LM, on CPU or one GPU."""

    CAPABILITIES: ClassVar[frozenset[EngineCapability]] = frozenset(
        {
            EngineCapability.SEEDED_SAMPLING,
            EngineCapability.EXACT_RESUMPTION,
            EngineCapability.SPARE_COPY,
            EngineCapability.EXACT_SPANS,
            EngineCapability.SLEEP,
        }
    )

    kind: Literal["torch"] = "torch"
    slots: int = Field(128, ge=1)
    """Completions sampled at the same time."""
    context_tokens: int = Field(2048, ge=8)
    """Longest prompt and completion together; the KV cache grows up to it."""
    threads: Threads = 1
    """Compute threads of the engine's process. auto: as many cores of its host as others leave it, as
    parallelism.threads has it; one with batch_invariant, whose bits would depend on their number. More than one pays
    for large models and batches alone: a token's products are small, and each waits for the slowest thread."""
    batch_invariant: bool = False
    """Compute each completion in the same shapes whatever else is in the batch, so that its tokens and their
    log-probabilities are the same to the last bit on every rollout and after every restart. Each step then costs what a
    full batch costs: set slots to what is really used. For models that the fused forward runs; others are refused."""
    device: Device = "cpu"
    """Torch device, such as cpu or cuda:0."""


class SglangEngineConfig(Config):
    """An SGLang 0.5.23 server for each rollout service, under an interpreter of its own.

    The service starts it with the interpreter that FLOTILLA_SGLANG_PYTHON names, or uses the one at url.
    """

    CAPABILITIES: ClassVar[frozenset[EngineCapability]] = frozenset()

    kind: Literal["sglang"]
    slots: int = Field(128, ge=1)
    """Completions sampled at the same time (--max-running-requests)."""
    context_tokens: int = Field(2048, ge=8)
    """Longest prompt and completion together (--context-length)."""
    device: Device = "cpu"
    """Torch device, such as cpu or cuda:0; with tensor parallelism the first one."""
    options: Options = Field(default={})
    """Further arguments of the server, such as tp_size, mem_fraction_static or quantization: names as SGLang has them,
    with or without dashes; true for a switch, a list for several values. Those that follow from the spec are refused
    here, those that the server does not know by the server."""
    url: str | None = Field(None, pattern=r"^https?://[^/]+$")
    """Use the server at this address, which serves model.path, instead of starting one; no other rollout may use it.
    127.0.0.1 is one server for each machine that has a rollout service."""
    start_seconds: float = Field(600.0, gt=0)
    """Longest time that a server may take to load the model."""
    load_seconds: float = Field(120.0, gt=0)
    """Longest time that a server may take to load new weights; one that takes longer is started again."""

    @field_validator("options")
    @classmethod
    def _options_are_ours_to_give(cls, options: Options) -> Options:
        for name in options:
            plain = name.lstrip("-").replace("-", "_")
            if (instead := OWNED_OPTIONS.get(plain)) is not None:
                raise ValueError(f"{name!r} may not be given: it is set by {instead}")
            if any(owned.startswith(plain) for owned in OWNED_OPTIONS):
                raise ValueError(
                    f"{name!r} may not be given: the server would take it for a longer name; write that out"
                )
            if not plain.isidentifier():
                raise ValueError(f"{name!r} is no name of a server argument: write tp_size or tp-size")
        return options

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> "SglangEngineConfig":
        if self.url is not None and self.options:
            raise ValueError(
                "rollout.engine.options have no effect with rollout.engine.url, whose server runs already: give them "
                "to that server, or leave url out"
            )
        return self


EngineConfig = Annotated[TorchEngineConfig | SglangEngineConfig, Field(discriminator="kind")]
