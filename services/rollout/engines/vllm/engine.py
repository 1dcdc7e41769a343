"""vLLM as an engine: what its servers are asked, and in which words.

What goes to ``/inference/v1/generate`` and what comes back, and what ``/metrics`` says; pure functions.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.rollout.engines.base import GenerationRequest, Prefix, SamplingParameters
from flotilla.services.rollout.engines.servers.adapters import MAX_HELD
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
    label_in,
)
from flotilla.services.rollout.engines.servers.engine import ServerEngine
from flotilla.services.rollout.engines.servers.settings import ServerSettings, clean_environment, flags, plain_names
from flotilla.services.rollout.engines.vllm.features import features_of, limits_of
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import MAX_ADAPTER_RANK, OptionValue, VllmEngineConfig
from flotilla.shared.environment.settings import ENGINE_PYTHONS
from flotilla.shared.errors import InvalidSpec, ModelError, Unavailable
from flotilla.shared.schemas.trajectory import FinishReason

MODULE = "vllm.entrypoints.launchers.api_server.entry"
SOCKET = "server.sock"
HELD_WEIGHTS = Path(__file__).with_name("held_weights.py")
PACK_TIED = "flotilla_pack_tied"
EXTENSION, HASHES, ADAPTER_HASHES = "flotilla_held_weights", "flotilla_hashes", "flotilla_adapter_hashes"
"""The worker extension's module, a copy of that file in the server's directory, and its methods."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MAX_ADAPTER_RANK)
"""That it has room for; adapters of others take the next."""
MAX_SOCKET_PATH = 100
"""A Unix socket's path has 107 bytes at most on Linux."""
GIB = 1 << 30

ON_CPU: Mapping[str, OptionValue] = {"enforce_eager": True, "kv_cache_memory_bytes": GIB}
"""What the server needs without a GPU, unless options override it: it would take most of the memory."""


def command_line(settings: ServerSettings, *, context_tokens: int, logprobs_mode: str) -> list[str]:
    """Make the arguments behind the interpreter.

    Args:
        settings: of the engine.
        context_tokens: prompt and completion together, at most what the model can.
        logprobs_mode: which distribution the log-probabilities are of.
    """
    defaults: dict[str, OptionValue] = {"uvicorn_log_level": "warning", "disable_uvicorn_access_log": True}
    if settings.device == "cpu":
        defaults |= ON_CPU
    if settings.images is not None:
        # Requests bring their pixels, and what the tower makes of them is kept by itself.
        defaults["mm_processor_cache_gb"] = 0
        if settings.device == "cpu":
            defaults["skip_mm_profiling"] = True
    owned: dict[str, OptionValue] = {
        # Relative to its directory: a Unix socket's path is short, and every process that can connect may do anything.
        "uds": SOCKET,
        "model": str(settings.model_path),
        "dtype": settings.dtype,
        "max_num_seqs": settings.slots,
        "max_model_len": context_tokens,
        "logprobs_mode": logprobs_mode,
        # Its processors of images need one to begin with.
        "skip_tokenizer_init": not settings.decodes and settings.images is None,
        "enable_scale_out": True,
    }
    if settings.images is not None:
        owned |= limits_of(settings.images)
    if settings.adapters is not None:
        room = next(each for each in RANKS if each >= settings.adapters.rank)
        owned |= {"enable_lora": True, "max_loras": MAX_HELD, "max_cpu_loras": MAX_HELD, "max_lora_rank": room}
    if settings.device == "cpu" and "worker_extension_cls" not in plain_names(settings.options):
        owned["worker_extension_cls"] = f"{EXTENSION}.HeldWeights"
    if settings.sleeps and settings.device != "cpu":
        # Its build for CPUs refuses the flag: it goes to sleep all the same, and keeps its memory.
        owned["enable_sleep_mode"] = True
    given = plain_names(settings.options)
    return ["-m", MODULE, *flags({**defaults, **given, **owned}, negates=True)]


def environment(settings: ServerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Make the server's environment from ours; its telemetry is off."""
    kept = clean_environment(inherited)
    kept |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    kept["VLLM_USE_RUST_FRONTEND"] = "0"
    if settings.adapters is not None:
        kept["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    given = plain_names(settings.options)
    if settings.device == "cpu":
        # Another pool that spins, or that is bound to cores which others use, makes both several times slower.
        kept |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1")}
        kept.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if given.get("enforce_eager", True):
            kept["TORCHDYNAMO_DISABLE"] = "1"
    elif ":" in settings.device:
        first = int(settings.device.partition(":")[2])
        sizes = (given.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline"))
        num = 1
        for size in sizes:
            num *= size if isinstance(size, int) else 1
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(first + num)]
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + num])
    return kept


def _finding(place: Path, settings: ServerSettings) -> dict[str, str]:
    """Let the server's processes find the worker extension."""
    if settings.device != "cpu":
        return {}
    others = environment(settings, os.environ).get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(place), *([others] if others else [])])}


ID_PREFIX = "generate-tokens-"
"""What the server puts before the id of a request of ``/inference/v1/generate``; aborts go by the whole."""
GENERATED = "vllm:generation_tokens_total"
RUNNING = "vllm:num_requests_running"


REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
NO_LOG_PROB = -9999.0
"""What the server writes for one that is not a number, or minus infinity."""
SEED_STRIDE = 0x9E3779B97F4A7C15
MAX_SEED = 1 << 63


def generate_body(
    request: GenerationRequest, index: int, prefix: Prefix | None, request_id: str, serving: int
) -> dict[str, Any]:
    """Make the body that asks for one completion; arguments as of ``Dialect.body``."""
    kept = prefix.token_ids if prefix is not None else ()
    return {
        "request_id": request_id,
        "token_ids": [*request.prompt_ids, *kept],
        "sampling_params": _sampling(request.sampling, request.seeds[index], len(kept)),
        "cache_salt": str(serving),
    }


def _sampling(sampling: SamplingParameters, seed: int, num_kept: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens - num_kept,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        # The server's random numbers begin with the request: what goes on must not draw those of its beginning again.
        "seed": (seed + num_kept * SEED_STRIDE) % MAX_SEED,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.min_p and not sampling.greedy:
        body["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1:
        body["repetition_penalty"] = sampling.repetition_penalty
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body


def sampled_of(reply: Mapping[str, Any]) -> Sampled:
    """Read a reply; errors as of ``Dialect.sampled``."""
    [choice] = reply["choices"]
    content = (choice.get("logprobs") or {}).get("content") or ()
    return Sampled(
        token_ids=[int(token) for token in choice.get("token_ids") or ()],
        scores=[(int(each["token_id"]), _log_prob(float(each["logprob"]))) for each in content],
        spans=list(choice.get("weight_versions") or ()),
        reason=REASONS[choice["finish_reason"]],
    )


def _log_prob(value: float) -> float:
    return float("nan") if value <= NO_LOG_PROB else value


def metric_of(page: str, name: str) -> int:
    """Add up the samples of a metric on a page of ``/metrics``; 0 if there are none."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return int(sum(map(float, found)))


class VllmProver:
    """Asks a server of one rank that was started with ``held_weights.py`` for the hashes of its tensors."""

    signs_zeros = False
    asks_others = False

    async def hashes(self, caller: Caller, *, seconds: float) -> Mapping[str, str]:
        """Ask its worker; see ``Prover.hashes``."""
        return await _asked_of_worker(caller, {"method": HASHES}, seconds)


async def _asked_of_worker(caller: Caller, call: Body, seconds: float) -> Mapping[str, str]:
    results = (await caller.post("/collective_rpc", call, seconds=seconds))["results"]
    if len(results) != 1:
        raise Refused(f"a vLLM server of {len(results)} ranks does not tell the hashes of whole tensors", 200)
    return {str(name): str(found) for name, found in results[0].items()}


class VllmAdapters:
    """Has a server that was started with ``--enable-lora`` sample with adapters: each is a model of its own there."""

    async def load(self, caller: Caller, name: str, directory: Path, *, seconds: float) -> None:
        """Load a folder between two steps; see ``Adapting.load``."""
        await caller.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}, seconds=seconds)

    async def unload(self, caller: Caller, name: str) -> None:
        """Forget its name; its memory goes to the next but one."""
        await caller.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def relabel(self, caller: Caller, label: str) -> None:
        """Label it, and look: a server that was restarted has no adapters."""
        await _relabel(caller, label)
        await _check_label(caller, label)

    def asked_with(self, body: Body, name: str) -> Body:
        """Ask for the adapter as a model."""
        return {**body, "model": name}

    def sampled_with(self, reply: Body) -> object:
        """Read the model."""
        return reply.get("model")

    async def hashes(self, caller: Caller, rank: int, *, seconds: float) -> Mapping[str, str]:
        """Ask its worker; see ``Adapting.hashes``."""
        return await _asked_of_worker(caller, {"method": ADAPTER_HASHES, "args": [rank]}, seconds)


class VllmSleeper:
    """Lends the memory of a server that was started with ``--enable-sleep-mode``."""

    async def sleep(self, caller: Caller, *, seconds: float) -> None:
        """Throw weights and KV cache away: the next weights come with the waking."""
        await caller.post("/sleep?level=2", None, seconds=seconds)

    async def wake(self, caller: Caller, source: Path, label: str, *, load_seconds: float) -> None:
        """Take memory for the weights, load and label them, then take that of the KV cache, and continue."""
        await caller.post("/wake_up?tags=weights", None, seconds=load_seconds)
        await _reload(caller, source, label, load_seconds)
        await caller.post("/wake_up?tags=kv_cache", None, seconds=load_seconds)


class VllmDialect:
    """vLLM's side of ``servers.dialect.Dialect``.

    vLLM's log-probabilities are of the distribution that it samples from, after temperature, top-k and top-p, or of the
    model's own, before all of them. What is wanted is that after temperature and before the others: the first if
    nothing is cut, the second at temperature 1. With neither it gives the first, the sampler's own, which the spec then
    takes for nothing else.

    Args:
        raw: whether to give those of the model, before temperature and all else.
    """

    name = "vLLM"
    variable = ENGINE_PYTHONS["vllm"]
    capabilities = VllmEngineConfig.CAPABILITIES
    margin_tokens = 0
    generate_path = "/inference/v1/generate"
    alive_path = "/version"
    health_path = "/weight_info"
    """Its own ``/health`` asks the front alone: this one goes through the process that samples."""
    label_path = "/weight_info"
    asks_when_idle = True
    places_images = True
    prover: Prover | None = VllmProver()
    adapters: Adapting | None = VllmAdapters()
    sleeper: Sleeper | None = VllmSleeper()

    def __init__(self, *, raw: bool) -> None:
        self._logprobs_mode = "raw_logprobs" if raw else "processed_logprobs"
        self._generated_before = 0
        self._packs = False

    def launch(self, settings: ServerSettings, place: Path, context_tokens: int, label: str) -> Launch:
        """Start it on a Unix socket in our directory: keys guard a part of its endpoints only."""
        path = place / SOCKET
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise InvalidSpec(
                f"the vLLM server's socket would be {path}, whose path is too long: set TMPDIR of the rollout to a "
                "shorter one"
            )
        mode = self._logprobs_mode
        self._packs = settings.device == "cpu" and "worker_extension_cls" not in plain_names(settings.options)
        return Launch(
            arguments=tuple(command_line(settings, context_tokens=context_tokens, logprobs_mode=mode)),
            environment=environment(settings, os.environ) | _finding(place, settings),
            url="http://vllm",
            socket=SOCKET,
            files={f"{EXTENSION}.py": HELD_WEIGHTS.read_text(encoding="utf-8")} if settings.device == "cpu" else {},
        )

    async def describe(self, caller: Caller, settings: ServerSettings) -> ServedHere:
        """Read ``/server_info``, and whether it has the endpoints that are needed; wake it if it was left asleep."""
        try:
            # The first time the server looks around on its machine, for seconds.
            facts = await caller.get("/server_info?config_format=json", seconds=settings.start_seconds)
            await caller.post("/inference/v1/abort_requests", {"request_ids": []})
        except Refused as error:
            if error.passes:
                raise
            raise ModelError(
                f"the vLLM server at {settings.url} lacks what the fleet needs: start it with VLLM_SERVER_DEV_MODE=1 "
                f"in its environment and --enable-scale-out, without a key ({error.detail})"
            ) from error
        model = facts["vllm_config"]["model_config"]
        if model["logprobs_mode"] != self._logprobs_mode:
            raise ModelError(
                f"the vLLM server at {settings.url} gives {model['logprobs_mode']}: start it with --logprobs-mode "
                f"{self._logprobs_mode}"
            )
        if settings.sleeps and not model["enable_sleep_mode"]:
            raise ModelError(
                f"the vLLM server at {settings.url} cannot lend its memory, as resources.sharing time asks: start it "
                "on a GPU with --enable-sleep-mode, or leave sharing out"
            )
        if (await caller.get("/is_sleeping"))["is_sleeping"]:
            # Its last user was in the trainer's shift. It has no weights yet, but the memory for them.
            await caller.post("/wake_up", None, seconds=settings.load_seconds)
        return ServedHere(Path(model["model"]), model["max_model_len"], "--max-model-len")

    async def greet(self, caller: Caller, label: str) -> None:
        """Label its weights, and note what it has generated for others."""
        await _relabel(caller, label)
        self._generated_before = metric_of(await caller.get("/metrics"), GENERATED)

    def body(
        self, request: GenerationRequest, index: int, prefix: Prefix | None, request_id: str, serving: int
    ) -> Body:
        """Make a body of ``/inference/v1/generate``."""
        return generate_body(request, index, prefix, request_id, serving)

    def with_images(self, body: Body, shown: ShownImages) -> Body:
        """Add their pixels and places."""
        return {**body, "features": features_of(shown)}

    def sampled(self, reply: Body) -> Sampled:
        """Read a reply of ``/inference/v1/generate``."""
        return sampled_of(reply)

    async def abort(self, caller: Caller, request_id: str) -> None:
        """End a completion; one that the server does not know is ignored."""
        await caller.post("/inference/v1/abort_requests", {"request_ids": [f"{ID_PREFIX}{request_id}"]})

    async def switch(
        self, caller: Caller, source: Path, label: str, mode: OnWeightUpdate, *, load_seconds: float, check: Check
    ) -> None:
        """Pause between two steps, label, load, check, continue.

        Clearing the cache puts running requests back into the queue: they compute their prefix again when it continues.
        """
        clears = "false" if mode is OnWeightUpdate.CONTINUE else "true"
        await caller.post(f"/pause?mode=keep&clear_cache={clears}", None)
        await _reload(caller, source, label, load_seconds)
        if self._packs:
            await caller.post("/collective_rpc", {"method": PACK_TIED}, seconds=load_seconds)
        await check()
        await caller.post("/resume", None)

    async def load(self, caller: Caller, known: Known) -> tuple[int, int]:
        """Read its metrics; tokens of aborted requests are left out once it is idle."""
        page = await caller.get("/metrics")
        generated, running = metric_of(page, GENERATED), metric_of(page, RUNNING)
        if not known.prompt_tokens:
            self._generated_before = generated - known.generated_tokens
        return running, max(0, generated - self._generated_before - known.generated_tokens)


async def _reload(caller: Caller, source: Path, label: str, load_seconds: float) -> None:
    """Label the weights, load them, and check the label: a server that was restarted between has lost it.

    The other way round its old weights could get the new label.

    Raises:
        Unavailable: the server was restarted.
    """
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(source)}}
    await _relabel(caller, label)
    await caller.post("/collective_rpc", load, seconds=load_seconds)
    await _check_label(caller, label)


async def _relabel(caller: Caller, label: str) -> None:
    await caller.post("/update_weight_version", {"new_version": label})


async def _check_label(caller: Caller, label: str) -> None:
    found = label_in(await caller.get("/weight_info"))
    if found != label:
        raise Unavailable(f"the vLLM server was restarted while it loaded weights: they are labelled {found!r}")


class VllmEngine(ServerEngine):
    """An ``Engine`` whose work a vLLM server does; see ``ServerEngine`` and ``VllmDialect``."""

    def __init__(
        self, settings: ServerSettings, transport: httpx.AsyncBaseTransport | None = None, *, raw: bool = False
    ) -> None:
        super().__init__(settings, VllmDialect(raw=raw), transport)
