"""The engines that sample completions: the embedded one, and servers, SGLang's and vLLM's.

Each class names what its engine promises, and which of the spec's wishes need a promise that it does not make.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from flotilla.shared.config.base.addresses import is_loopback
from flotilla.shared.config.base.model import Config, DeviceChoice, Threads
from flotilla.shared.config.sections.components import well_formed_url
from flotilla.shared.schemas.engine import EngineCapability

ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/]+$"), AfterValidator(well_formed_url)]
OptionValue = bool | int | float | str | None
Options = Mapping[str, OptionValue | tuple[OptionValue, ...]]
OWNED_OPTIONS: Mapping[str, str] = {
    "host": "nothing: the server listens on the loopback address",
    "port": "nothing: a free port is taken",
    "dtype": "model.dtype",
    "api_key": "nothing: the server gets a key of its own",
    "data_parallel_size": "resources.rollouts: one server is one replica",
    "nnodes": "nothing: a server runs on one node",
    "node_rank": "nothing: a server runs on one node",
    "ssl_keyfile": "nothing: the server listens on the loopback address",
    "ssl_certfile": "nothing: the server listens on the loopback address",
    "config": "rollout.engine.options: it would override what is set here",
    "trust_remote_code": "nothing: code from a model directory is never run",
    "model": "model.path",
    "skip_tokenizer_init": "nothing: it depends on rollout.sampling.stop",
}
"""Arguments of any server that follow from the rest of the spec, and what sets them instead."""
SGLANG_OPTIONS: Mapping[str, str] = {
    name: instead
    for instead, names in {
        "model.path": ("model_path", "load_format", "revision", "tokenizer_path"),
        "rollout.engine.device": ("device", "base_gpu_id"),
        "rollout.engine.slots": ("max_running_requests",),
        "rollout.engine.context_tokens": ("context_length",),
        "rollout.sampling": ("preferred_sampling_params",),
        "resources.sharing": ("enable_memory_saver",),
        "data.images": (
            *("limit_mm_data_per_request", "mm_process_config", "image_processor_backend"),
            *("disable_fast_image_processor", "mm_preprocess_cache_size_mb"),
        ),
        "resources.rollouts: one server is one replica": ("dp_size", "dp"),
        "nothing: it is the policy version": ("weight_version",),
        "nothing: the server gets a key of its own": ("admin_api_key",),
        "nothing: what does not fit the context is refused": ("allow_auto_truncate",),
        "nothing: several do not check the server's key": ("tokenizer_worker_num",),
        "nothing: the server speaks HTTP": ("grpc_mode", "smg_grpc_mode", "grpc_port", "fastapi_root_path"),
        "nothing: requests that the server rejects are never answered": ("max_queued_requests",),
        "nothing: one server samples whole completions": ("disaggregation_mode",),
        "nothing: the server's processes are its rollout's": ("use_ray",),
        "nothing: the server begins with the weights of model.path, at once": (
            *("checkpoint_engine_wait_weights_before_ready", "gated_launch_port"),
        ),
        "nothing: weights that servers share cannot be replaced": ("weight_cache_mode",),
        "nothing: a draft model would be given the policy's weights": ("speculative_draft_model_path",),
        "nothing: model.path is not the server's to delete": ("delete_ckpt_after_loading",),
        "nothing: it names a module, which would be imported": ("custom_weight_loader", "forward_hooks", "sidecar"),
    }.items()
    for name in names
}
"""Those of SGLang."""
SGLANG_IMPORTS: Mapping[str, str] = {
    "hicache_storage_backend": "dynamic",
    "unified_cache_external_linker_backend": "dynamic",
}
"""Values of its arguments with which it imports a module that another argument names."""
MAX_ADAPTER_RANK = 512
"""That vLLM has room for."""
VLLM_OPTIONS: Mapping[str, str] = {
    name: instead
    for instead, names in {
        "model.path": ("model_tag", "tokenizer", "revision"),
        "rollout.engine.slots": ("max_num_seqs",),
        "rollout.engine.context_tokens": ("max_model_len",),
        "rollout.sampling": ("generation_config", "override_generation_config", "logprobs_mode"),
        "resources.rollouts: one server is one replica": (
            *("data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_address"),
            *(
                "data_parallel_rpc_port",
                "data_parallel_backend",
                "data_parallel_external_lb",
                "data_parallel_hybrid_lb",
            ),
            "data_parallel_multi_port_external_lb",
        ),
        "nothing: the server listens where only its rollout reaches it": ("uds", "ssl_ca_certs", "root_path"),
        "nothing: the server speaks HTTP": ("headless", "grpc", "grpc_port"),
        "nothing: its endpoints are how it is asked": ("enable_scale_out", "tokens_only"),
        "nothing: its load is read from them": ("disable_log_stats",),
        "nothing: several do not know each other's requests": ("api_server_count",),
        "nothing: the model has no other name": ("served_model_name",),
        "data.images": ("limit_mm_per_prompt", "mm_processor_kwargs"),
        "nothing: a server is given pixels as the model reads them": ("mm_device_do_normalize",),
        "model.lora": ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_modules"),
        "resources.sharing": ("enable_sleep_mode",),
        "nothing: weights are read from images": ("weight_transfer_config",),
        "nothing: a draft model would keep its initial weights": ("speculative_config", "spec_model", "spec_method"),
        "nothing: it names modules, which would be imported": (
            *("middleware", "tool_parser_plugin", "reasoning_parser_plugin", "io_processor_plugin"),
            *("logits_processors", "worker_cls", "worker_extension_cls", "scheduler_cls", "compilation_config"),
            *("kv_transfer_config", "ec_transfer_config", "additional_config", "model_loader_extra_config"),
        ),
    }.items()
    for name in names
}
"""Those of vLLM."""


class RecordedConfig(Config):
    """Completions of an earlier run in the place of a model's: a mock engine, to run all that is around one."""

    dump: str = Field(min_length=1)
    """Whose completions: the directory of a run or of an experiment, its folder `samples`, or one file of it."""
    token_seconds: float = Field(0.0, ge=0, le=60)
    """Time that a step of the batch takes, which gives each running completion one token."""


class TorchEngineConfig(Config):
    """The embedded engine: any Hugging Face causal LM, on CPU or one GPU."""

    CAPABILITIES: ClassVar[frozenset[EngineCapability]] = frozenset(
        {
            EngineCapability.SEEDED_SAMPLING,
            EngineCapability.EXACT_RESUMPTION,
            EngineCapability.SPARE_COPY,
            EngineCapability.EXACT_SPANS,
            EngineCapability.SLEEP,
            EngineCapability.UNCUT_LOG_PROBS,
        }
    )
    TAKES_ADAPTERS: ClassVar[bool] = True

    kind: Literal["torch"] = "torch"
    slots: int = Field(128, ge=1)
    """Completions sampled at the same time."""
    context_tokens: int = Field(2048, ge=8)
    """Longest prompt and completion together; the KV cache grows up to it."""
    threads: Threads = "auto"
    """Compute threads of the engine's process. auto: where the native kernels compute, as many cores of its host as
    others leave it, as parallelism.threads has it, and the same bits with any number; else one, since torch's operators
    gain by more on large models alone: give a number there."""
    batch_invariant: bool = False
    """Compute each completion in the same shapes whatever else is in the batch, so that its tokens and their
    log-probabilities are the same to the last bit on every rollout and after every restart. Where the native kernels
    compute (a CPU, float32, a C compiler) it costs nothing; elsewhere each step then costs what a full
    batch costs: set slots to what is really used. For models that the fused forward runs; others are refused."""
    prefix_cache_mb: int = Field(256, ge=0)
    """Megabytes of the KV cache of finished turns that are kept, on the engine's device, so that the next turn of an
    episode or of an agent computes only what is new; the longest unused make room, new weights empty it. 0: none."""
    device: DeviceChoice = "auto"
    """Torch device, such as cpu or cuda:0. auto: cuda where every rollout that the experiment starts with has a GPU
    that its torch can use, else cpu."""
    recorded: RecordedConfig | None = None
    """Load no model, and answer with the recorded completions of a dump, with their lengths and log-probabilities; a
    prompt that was never answered gets a completion of another. Versions are those that are published, whose weights
    are not read. Null: the model answers. See docs/jobs.md."""


class ServerEngineConfig(Config):
    """What all engines that are servers have in common."""

    CAPABILITIES: ClassVar[frozenset[EngineCapability]]
    TAKES_ADAPTERS: ClassVar[bool] = False
    OWNED: ClassVar[Mapping[str, str]]

    kind: str
    slots: int = Field(128, ge=1)
    """Completions sampled at the same time (SGLang's --max-running-requests, vLLM's --max-num-seqs)."""
    context_tokens: int = Field(2048, ge=8)
    """Longest prompt and completion together (--context-length, --max-model-len)."""
    device: DeviceChoice = "auto"
    """Torch device, such as cpu or cuda:0; with tensor parallelism the first one. auto: cuda where every rollout that
    the experiment starts with has as many GPUs as the server needs, else cpu."""
    options: Options = Field(default={})
    """Further arguments of the server, such as SGLang's tp_size, mem_fraction_static or quantization, or vLLM's
    tensor_parallel_size or gpu_memory_utilization: names as the server has them, with or without dashes; true for a
    switch, a list for several values. Those that follow from the spec are refused here, those that the server does not
    know by the server."""
    url: ServerUrl | None = None
    """Use the server at this address, which serves model.path, instead of starting one; no other rollout may use it, so
    the experiment gets one rollout. 127.0.0.1 and localhost are one server for each machine that has a rollout
    service."""
    start_seconds: float = Field(600.0, gt=0)
    """Longest time that a server may take to load the model."""
    load_seconds: float = Field(120.0, gt=0)
    """Longest time that a server may take to load new weights; one that takes longer is started again."""

    @property
    def is_one_server(self) -> bool:
        """Whether all rollouts would have the same server: it is at an address that is not each machine's own."""
        return self.url is not None and not is_loopback(urlsplit(self.url).hostname or "")

    @field_validator("options")
    @classmethod
    def _options_are_ours_to_give(cls, options: Options) -> Options:
        for name in options:
            plain = name.lstrip("-").replace("-", "_").removeprefix("no_")
            if (instead := cls.OWNED.get(plain)) is not None:
                why = (
                    instead.removeprefix("nothing: ") if instead.startswith("nothing: ") else f"it is set by {instead}"
                )
                raise ValueError(f"{name!r} may not be given: {why}")
            if any(owned.startswith(plain) for owned in cls.OWNED):
                raise ValueError(
                    f"{name!r} may not be given: the server would take it for a longer name; write that out"
                )
            if not plain.isidentifier():
                raise ValueError(f"{name!r} is no name of a server argument: write tp_size or tp-size")
        return options

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.url is not None and self.options:
            raise ValueError(
                "rollout.engine.options have no effect with rollout.engine.url, whose server runs already: give them "
                "to that server, or leave url out"
            )
        return self


class SglangEngineConfig(ServerEngineConfig):
    """An SGLang 0.5.23 server for each rollout service, under an interpreter of its own.

    The service starts it with the interpreter that FLOTILLA_SGLANG_PYTHON names, or uses the one at url.
    """

    CAPABILITIES: ClassVar[frozenset[EngineCapability]] = frozenset(
        {EngineCapability.UNCUT_LOG_PROBS, EngineCapability.SLEEP}
    )
    OWNED: ClassVar[Mapping[str, str]] = {**OWNED_OPTIONS, **SGLANG_OPTIONS}

    kind: Literal["sglang"]
    update_weights_from: Literal["disk", "tensor", "distributed"] = "disk"
    """How a server loads new weights. disk: it reads the image's file, which is in memory, while it is paused. tensor:
    another process of the rollout puts them into the memory of the server's first GPU and the server copies them there,
    in pieces of up to 1 GiB, the first of which is there before the pause. distributed: the trainer broadcasts them to
    it, over nccl or gloo: the server's ranks are members of the group that the gateway negotiates, and no process of
    the rollout holds an image. Servers are paused until all of them have all of it and the version is committed."""

    @field_validator("options")
    @classmethod
    def _options_import_nothing(cls, options: Options) -> Options:
        for name, value in options.items():
            plain = name.lstrip("-").replace("-", "_")
            # A name may be cut short.
            if any(each.startswith(plain) and value == imports for each, imports in SGLANG_IMPORTS.items()):
                raise ValueError(f"{name!r} may not be {value}: a module that another option names would be imported")
        return options

    @model_validator(mode="after")
    def _handles_are_of_a_server_of_ours(self) -> Self:
        if self.url is not None and self.update_weights_from == "tensor":
            raise ValueError(
                "rollout.engine.update_weights_from tensor hands memory to a server that the rollout starts: leave "
                "rollout.engine.url or update_weights_from out"
            )
        return self


class VllmEngineConfig(ServerEngineConfig):
    """A vLLM 0.32 server for each rollout service, under an interpreter of its own.

    The service starts it with the interpreter that FLOTILLA_VLLM_PYTHON names, or uses the one at url.
    """

    CAPABILITIES: ClassVar[frozenset[EngineCapability]] = frozenset(
        {EngineCapability.EXACT_SPANS, EngineCapability.SLEEP}
    )
    TAKES_ADAPTERS: ClassVar[bool] = True
    OWNED: ClassVar[Mapping[str, str]] = {**OWNED_OPTIONS, **VLLM_OPTIONS}

    kind: Literal["vllm"]


EngineConfig = Annotated[TorchEngineConfig | SglangEngineConfig | VllmEngineConfig, Field(discriminator="kind")]
