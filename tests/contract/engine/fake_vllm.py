"""A vLLM server in memory, behind a transport of httpx: it answers as the real one was recorded to.

It takes no field that vLLM 0.32 does not have, and has the habits that matter: aborts go by the id with the prefix that
it puts before it, a version's label is set by itself, and a directory that cannot be loaded is an error of the server.
"""

import asyncio
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.rollout.engines.scripted import log_prob_of
from tests.contract.engine.fake_server import Body, FakeServer, Sample, spans_of

REQUESTS = Path(__file__).parents[2] / "goldens" / "vllm" / "requests.json"
ID_PREFIX = "generate-tokens-"


class FakeVllm(FakeServer):
    """Serves a model directory; arguments as of ``FakeServer``.

    Attributes:
        logprobs_mode: as it was started with.
        has_scale_out: whether it was started with ``--enable-scale-out``.
        enable_sleep_mode: whether it was started so.
        paused_with: what the last pause asked for.
        asleep: what of its memory is freed.
        takes_adapters: whether it was started with ``--enable-lora``, and may be given some.
        refuses_adapters: why it takes none now.
        relabel_seconds: that the answer to a new label takes, which counts before.
        hangs: whether it answers a load in no time that anybody waits.
        max_held: the most that it had at a time.
        answers_as: which adapter it says that it sampled with, if it is wrong.
    """

    def __init__(self, model: Path, *, slots: int = 12, context_length: int = 4096, token_seconds: float = 0) -> None:
        super().__init__(model, REQUESTS, slots=slots, context_length=context_length, token_seconds=token_seconds)
        self.logprobs_mode = "processed_logprobs"
        self.has_scale_out = True
        self.enable_sleep_mode = True
        self.paused_with: Body = {}
        self.asleep: set[str] = set()
        self._has_weights = True
        self._num_generated = 0
        self.takes_adapters = False
        self.hangs = False
        self.relabel_seconds = 0.0
        self.refuses_adapters: str | None = None
        self.max_held = 0
        self.answers_as: str | None = None
        self._routes = {
            "POST /inference/v1/generate": self._generate,
            "POST /inference/v1/abort_requests": self._abort,
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /sleep": self._sleep,
            "POST /wake_up": self._wake_up,
            "POST /collective_rpc": self._reload,
            "POST /update_weight_version": self._set_label,
            "POST /v1/load_lora_adapter": self._load_adapter,
            "POST /v1/unload_lora_adapter": self._unload_adapter,
            "GET /version": lambda _: {"version": "0.32.0"},
            "GET /weight_info": lambda _: {"weight_version": self.label},
            "GET /is_sleeping": lambda _: {"is_sleeping": not self._goes_on.is_set()},
            "GET /server_info": self._info,
            "GET /metrics": self._metrics,
        }

    async def _generate(self, body: Body) -> Any:
        assert self._has_weights, "it samples with memory that nobody wrote to"
        params: Mapping[str, Any] = body["sampling_params"]
        if len(body["token_ids"]) + params["max_tokens"] > self.context_length:
            return httpx.Response(400, json={"error": {"message": "longer than the maximum model length"}})
        stops = params.get("stop_token_ids", ())
        adapter = body.get("model")
        if adapter is not None and adapter not in self.adapters:
            return httpx.Response(404, json={"error": {"message": f"The model `{adapter}` does not exist."}})
        greedy = not params["temperature"]
        sample = Sample(body["token_ids"], params["max_tokens"], stops, is_greedy=greedy, adapter=adapter)
        reason = await self._sampled(f"{ID_PREFIX}{body['request_id']}", sample)
        self._num_generated += len(sample.tokens)
        content = [{"token_id": token, "logprob": log_prob_of(token), "rank": 1} for token in sample.tokens]
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": sample.tokens,
            "logprobs": {"content": content},
            "weight_versions": spans_of(sample),
        }
        model = self.answers_as or adapter or str(self.model)
        return {"request_id": body["request_id"], "model": model, "choices": [choice]}

    async def _load_adapter(self, body: Body) -> httpx.Response:
        if not self.takes_adapters:
            return httpx.Response(404, json={"detail": "Not Found"})
        if self.refuses_adapters is not None:
            return httpx.Response(500, json={"error": {"message": self.refuses_adapters}})
        name, folder = body["lora_name"], Path(body["lora_path"])
        await asyncio.sleep(0)
        if self.hangs:
            raise httpx.ReadTimeout("")
        assert name not in self.adapters, "it takes a name once"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA" and config["lora_alpha"] > 0 and config["r"] <= 512
        self.adapters[name] = zlib.crc32((folder / "adapter_model.safetensors").read_bytes())
        self.max_held = max(self.max_held, len(self.adapters))
        return httpx.Response(200, text=f"Success: LoRA adapter '{name}' added successfully.")

    def _unload_adapter(self, body: Body) -> httpx.Response:
        name = body["lora_name"]
        if self.adapters.pop(name, None) is None:
            return httpx.Response(404, json={"error": {"message": f"The lora adapter '{name}' cannot be found."}})
        assert not any(sample.adapter == name for sample in self._samples.values()), "a request has it"
        return httpx.Response(200, text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _abort(self, body: Body) -> Any:
        if not self.has_scale_out:
            return httpx.Response(403, json={"error": {"message": "Scale-out endpoints are disabled."}})
        for rid in body["request_ids"]:
            if rid in self._samples:
                self._samples[rid].is_aborted = True
        return None

    def _pause(self, query: Body) -> Body:
        self.paused_with = query
        self._goes_on.clear()
        return {"status": "paused"}

    def _resume(self, _: Body) -> Body:
        self._goes_on.set()
        return {"status": "resumed"}

    def _sleep(self, query: Body) -> Body:
        assert query == {"level": "2"}
        for sample in self._samples.values():
            sample.is_aborted = True
        self._goes_on.clear()
        self.asleep, self._has_weights = {"weights", "kv_cache"}, False
        return {"status": "sleeping", "level": 2}

    def _wake_up(self, query: Body) -> Body:
        self.asleep -= {query["tags"]} if query else self.asleep
        if not self.asleep:
            self._goes_on.set()
        return {"status": "sleeping" if self.asleep else "awake", "tags": list(query.values()) or None}

    def _reload(self, body: Body) -> Any:
        assert not self._goes_on.is_set(), "weights change while it samples"
        assert "weights" not in self.asleep, "weights need memory"
        assert body["method"] == "reload_weights"
        why = self._misfit(Path(body["kwargs"]["weights_path"]))
        self._has_weights |= why is None
        return {"results": [None]} if why is None else httpx.Response(500, json={"error": {"message": why}})

    def _on_wrong_shapes(self) -> str:
        return "shape mismatch"

    async def _set_label(self, body: Body) -> Body:
        self.label = body["new_version"]
        await asyncio.sleep(self.relabel_seconds)
        return {"success": True, "new_version": self.label}

    def _info(self, _: Body) -> Body:
        facts = {
            "model": str(self.model),
            "max_model_len": self.context_length,
            "logprobs_mode": self.logprobs_mode,
            "enable_sleep_mode": self.enable_sleep_mode,
        }
        return {"vllm_config": {"model_config": facts}}

    def _metrics(self, _: Body) -> httpx.Response:
        running = [sample for sample in self._samples.values() if sample.is_running]
        generated = self._num_generated + sum(len(sample.tokens) for sample in self._samples.values())
        labels = '{engine="0",model_name="m"}'
        return httpx.Response(
            200,
            text=f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {len(running)}.0\n"
            f"vllm:generation_tokens_total{labels} {generated}.0\n",
        )
