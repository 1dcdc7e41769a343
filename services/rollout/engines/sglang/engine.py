"""SGLang as an engine: how its servers are started, asked and given weights."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir

import httpx
import psutil

from flotilla.services.rollout.engines.base import GenerationRequest, Prefix
from flotilla.services.rollout.engines.servers.client import Refused
from flotilla.services.rollout.engines.servers.completions import Sampled
from flotilla.services.rollout.engines.servers.dialect import (
    Adapting,
    Body,
    Caller,
    Check,
    Known,
    Launch,
    Prover,
    ServedHere,
    ShownImages,
    Sleeper,
)
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.servers.settings import (
    HOST,
    ServerSettings,
    clean_environment,
    flags,
    free_port,
    plain_names,
)
from flotilla.services.rollout.engines.sglang.buckets import Buckets
from flotilla.services.rollout.engines.sglang.handles import LoadingByHandles
from flotilla.services.rollout.engines.sglang.wire import UNKEPT, generate_body, limits_of, sampled_of, with_pictures
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import OptionValue, SglangEngineConfig
from flotilla.shared.environment.settings import ENGINE_PYTHONS
from flotilla.shared.errors import ModelError

MODULE = "sglang.launch_server"
MARGIN_TOKENS = 8
"""SGLang keeps up to six positions of its context for itself, and cuts a completion short that would need them."""
KEY_FILE = "server.yaml"
SHARED_MEMORY = ("sglang_loads_", "sgl_shm_")
MAX_PLACE = 90
"""A Unix socket's path has 107 bytes at most on Linux."""

ON_CPU: Mapping[str, OptionValue] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
}
"""What the server needs without a GPU, unless options override it."""


def command_line(settings: ServerSettings, *, port: int, key_file: str, label: str) -> list[str]:
    """Make the arguments behind the interpreter.

    Args:
        settings: of the engine.
        port: that the server listens on.
        key_file: YAML file with the server's key, which a command line would show to everybody on the machine.
        label: of its weights.
    """
    defaults: dict[str, OptionValue] = {"log_level_http": "warning", "skip_server_warmup": True}
    if settings.device == "cpu":
        defaults |= {**ON_CPU, "max_total_tokens": settings.slots * (settings.context_tokens + MARGIN_TOKENS)}
    owned: dict[str, OptionValue] = {
        "model_path": str(settings.model_path),
        "host": HOST,
        "port": port,
        "config": key_file,
        "dtype": settings.dtype,
        "device": settings.device.partition(":")[0],
        "max_running_requests": settings.slots,
        "context_length": settings.context_tokens + MARGIN_TOKENS,
        "weight_version": label,
        "skip_tokenizer_init": not settings.decodes,
    }
    if settings.sleeps and settings.device != "cpu":
        # On a CPU it frees nothing, with the flag or without.
        owned["enable_memory_saver"] = True
    if settings.records_experts:
        owned["enable_return_routed_experts"] = True
    if settings.images is not None:
        owned |= limits_of(settings.images)
    if ":" in settings.device:
        owned["base_gpu_id"] = int(settings.device.partition(":")[2])
    return ["-m", MODULE, *flags({**defaults, **plain_names(settings.options), **owned}, negates=False)]


def environment(settings: ServerSettings, inherited: Mapping[str, str], place: Path) -> dict[str, str]:
    """Make the server's environment from ours; its temporary files are in its own directory, and removed with it."""
    kept = clean_environment(inherited)
    if len(os.fsencode(place)) <= MAX_PLACE:
        # Each start leaves five of them, most of them sockets. What torch has compiled is for all.
        kept.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/torchinductor_{os.getuid()}")
        kept["TMPDIR"] = str(place)
    # The Rust server is another program; a context a little longer than the model's holds what SGLang keeps for itself.
    kept |= {"SGLANG_RUST_SERVER": "0", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if settings.device == "cpu":
        # A second thread pool that spins makes both several times slower, so idle threads sleep.
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
        kept |= on_cpu | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
    if settings.images is not None:
        kept |= UNKEPT
    interface = None if settings.group_host is None else interface_of(settings.group_host)
    if interface is not None:
        # Else gloo listens where the machine's name leads, and nccl on the first interface.
        kept |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return kept


def interface_of(address: str) -> str | None:
    """Name the network interface that has an address of this machine; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in {each.address.partition("%")[0] for each in addresses}:
            return name
    return None


PAUSES: Mapping[OnWeightUpdate, str] = {
    OnWeightUpdate.DRAIN: "retract",
    OnWeightUpdate.INTERRUPT: "retract",
    OnWeightUpdate.CONTINUE: "in_place",
}


class SglangSleeper:
    """Lends the memory of a server that was started with ``--enable-memory-saver``."""

    async def sleep(self, caller: Caller, *, seconds: float) -> None:
        """Free weights, KV cache and graphs; a running request, such as a health check's, would end the server."""
        await caller.post("/pause_generation", {"mode": "retract"})
        await caller.post("/release_memory_occupation", {}, seconds=seconds)

    async def wake(self, caller: Caller, source: Path, label: str, *, load_seconds: float) -> None:
        """Take memory for the weights, load them, then take the rest, and continue."""
        body = {"model_path": str(source), "weight_version": label, "flush_cache": True}
        await caller.post("/resume_memory_occupation", {"tags": ["weights"]}, seconds=load_seconds)
        await caller.post("/update_weights_from_disk", body, seconds=load_seconds)
        await caller.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}, seconds=load_seconds)
        await caller.post("/continue_generation", {})


class SglangProver:
    """Asks a server for the hashes of its tensors, where it has one rank: on a CPU they are of SHA-256."""

    signs_zeros = True
    asks_others = True

    async def hashes(self, caller: Caller, *, seconds: float) -> Mapping[str, str]:
        """Read ``/weights_checker``; see ``Prover.hashes``."""
        body = {"action": "checksum", "selector": "target"}
        ranks = (await caller.post("/weights_checker", body, seconds=seconds))["ranks"]
        if len(ranks) != 1:
            raise Refused(f"an SGLang server of {len(ranks)} ranks does not tell the hashes of whole tensors", 200)
        return {str(name): str(found) for name, found in ranks[0]["checksums"].items()}


class SglangDialect:
    """SGLang's side of ``servers.dialect.Dialect``.

    Args:
        handles: loads weights by handles; None has the server read their file.
        records_experts: whether it is asked which experts routers chose.
    """

    name = "SGLang"
    variable = ENGINE_PYTHONS["sglang"]
    capabilities = SglangEngineConfig.CAPABILITIES
    margin_tokens = MARGIN_TOKENS
    generate_path = "/generate"
    alive_path = "/model_info"
    health_path = "/health"
    label_path = "/model_info"
    asks_when_idle = False
    places_images = False
    prover: Prover | None = SglangProver()
    adapters: Adapting | None = None
    """Its backend for CPUs needs memory that is pinned for a GPU, and no other has been tried."""
    sleeper: Sleeper | None = SglangSleeper()

    def __init__(self, handles: LoadingByHandles | None = None, *, records_experts: bool = False) -> None:
        self._handles = handles
        self._records_experts = records_experts

    def launch(self, settings: ServerSettings, place: Path, context_tokens: int, label: str) -> Launch:
        """Start it on a free port, with a key in a file."""
        port, key = free_port(), secrets.token_hex(24)
        return Launch(
            arguments=tuple(command_line(settings, port=port, key_file=str(place / KEY_FILE), label=label)),
            environment=environment(settings, os.environ, place),
            url=f"http://{HOST}:{port}",
            key=key,
            files={KEY_FILE: f"api-key: {json.dumps(key)}\n"},
            shared_memory=SHARED_MEMORY,
        )

    async def describe(self, caller: Caller, settings: ServerSettings) -> ServedHere:
        """Read ``/server_info``."""
        facts = await caller.get("/server_info")
        if self._records_experts and not facts.get("enable_return_routed_experts"):
            raise ModelError(
                "algorithm.router_replay R3 needs the server at rollout.engine.url started with "
                "--enable-return-routed-experts"
            )
        return ServedHere(Path(facts["model_path"]), facts.get("context_length"), "--context-length")

    async def greet(self, caller: Caller, label: str) -> None:
        """Do nothing: the label was said on the command line, or is said when weights are loaded."""

    def body(
        self, request: GenerationRequest, index: int, prefix: Prefix | None, request_id: str, serving: int
    ) -> Body:
        """Make a body of ``/generate``; seeds have no effect there."""
        body = generate_body(request, request_id, prefix, serving=serving)
        return body | {"return_routed_experts": True} if self._records_experts else body

    def with_images(self, body: Body, shown: ShownImages) -> Body:
        """Add them encoded, with one token for each."""
        return with_pictures(body, shown)

    def sampled(self, reply: Body) -> Sampled:
        """Read a reply of ``/generate``."""
        return sampled_of(reply)

    async def abort(self, caller: Caller, request_id: str) -> None:
        """End a completion; one that the server does not know is ignored."""
        await caller.post("/abort_request", {"rid": request_id})

    async def switch(
        self, caller: Caller, source: Path, label: str, mode: OnWeightUpdate, *, load_seconds: float, check: Check
    ) -> None:
        """Pause, load, check, continue; running samples are retracted, or keep their cache, by the mode."""
        done = {"weight_version": label, "flush_cache": mode is not OnWeightUpdate.CONTINUE}
        prepared = await self._handles.prepare(caller, source) if self._handles is not None else None
        await caller.post("/pause_generation", {"mode": PAUSES[mode]})
        if self._handles is not None and prepared is not None:
            await self._handles.load(caller, prepared, done, seconds=load_seconds)
        else:
            await caller.post("/update_weights_from_disk", {"model_path": str(source), **done}, seconds=load_seconds)
        await check()
        await caller.post("/continue_generation", {})

    async def load(self, caller: Caller, known: Known) -> tuple[int, int]:
        """Count what runs, and estimate its tokens from the memory that they take."""
        loads = (await caller.get("/v1/loads?include=core"))["loads"]
        running, used = (sum(int(each[name]) for each in loads) for name in ("num_running_reqs", "num_used_tokens"))
        return running, max(0, used - known.prompt_tokens)


class SglangEngine(ServerEngine):
    """An ``Engine`` whose work an SGLang server does; see ``ServerEngine``.

    Args:
        settings: how the server runs, or where.
        transport: another one than sockets, for tests.
        buckets: holds weights for the server, which is given handles of them; None has it read their file.
    """

    def __init__(
        self,
        settings: ServerSettings,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        buckets: Buckets | None = None,
    ) -> None:
        handles = None if buckets is None else LoadingByHandles(buckets)
        super().__init__(settings, SglangDialect(handles, records_experts=settings.records_experts), transport)
        self._buckets = buckets

    async def close(self) -> None:
        """See ``ServerEngine.close``."""
        await super().close()
        if self._buckets is not None:
            await self._buckets.close()
