"""An SGLang server in memory, behind a transport of httpx: it answers as the real one was recorded to.

It takes no field that SGLang 0.5.23 does not have, and has the habits that matter: aborts go by prefix of the id, what
waits at a pause is deaf to them, an in-place update counts the token under way to the new version, and a tensor of a
wrong shape ends it.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.rollout.engines.decoders.checkpoint import read_headers
from services.rollout.engines.scripted import log_prob_of, rolling_token
from shared.errors import WeightTransferFailed

REQUESTS = Path(__file__).parents[2] / "goldens" / "sglang" / "requests.json"
Body = Mapping[str, Any]


@dataclass(eq=False)
class Sample:
    """One request at the server."""

    body: Body
    tokens: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    is_running: bool = False
    is_aborted: bool = False
    paused_in: str | None = None


class FakeSglang(httpx.AsyncBaseTransport):
    """Serves a model directory.

    Args:
        model: the directory.
        slots: requests that run at a time.
        context_length: as ``/server_info`` says.
        token_seconds: that one token takes.
    """

    def __init__(self, model: Path, *, slots: int = 12, context_length: int = 4096, token_seconds: float = 0) -> None:
        self.token_seconds = token_seconds
        self.model, self.context_length = model, context_length
        self.label = "default"
        self.is_dead = False
        self.drops_connections = 0
        self.calls: list[tuple[str, Body | None]] = []
        self._shapes = {name: header.shape for name, header in read_headers([model / "model.safetensors"]).items()}
        self._slots = asyncio.Semaphore(slots)
        self._samples: dict[str, Sample] = {}
        self._mode: str | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._seeds = itertools.count()
        self._requests: dict[str, dict[str, list[str]]] = json.loads(REQUESTS.read_text())
        self._routes: dict[str, Callable[[Body], Any]] = {
            "POST /abort_request": self._abort,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /update_weights_from_disk": self._update,
            "GET /health": lambda _: None,
            "GET /model_info": lambda _: {"model_path": str(self.model), "weight_version": self.label},
            "GET /server_info": lambda _: {"model_path": str(self.model), "context_length": self.context_length},
            "GET /v1/loads": self._loads,
        }

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        route = f"{request.method} {request.url.path}"
        content = await request.aread()
        body = json.loads(content) if content else None
        self.calls.append((request.url.path, body))
        if self.is_dead:
            raise httpx.ConnectError("All connection attempts failed")
        if self.drops_connections:
            self.drops_connections -= 1
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        known = self._requests.get(route)
        if known is None:
            return httpx.Response(404, json={"detail": "Not Found"})
        unknown = _unknown(body, known)
        if unknown or (request.method == "POST" and body is None):
            return httpx.Response(400, json={"error": f"unknown fields {unknown}"})
        if route == "POST /generate":
            return await self._generate(body)
        answer = self._routes[route](body or {})
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200) if answer is None else httpx.Response(200, json=answer)

    async def _generate(self, body: Body) -> httpx.Response:
        rid = body["rid"]
        if rid in self._samples:
            return httpx.Response(400, json={"error": {"message": f"Duplicate request ID: {rid}"}})
        if len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] > self.context_length:
            return httpx.Response(400, json={"error": {"message": "Requested token count exceeds the context"}})
        await self._goes_on.wait()
        sample = self._samples[rid] = Sample(body)
        try:
            async with self._slots:
                sample.is_running = True
                reason = await self._run(sample, next(self._seeds))
        finally:
            del self._samples[rid]
        if self.is_dead:
            raise httpx.ReadError("")
        return httpx.Response(200, json=_reply(rid, sample, reason))

    async def _run(self, sample: Sample, seed: int) -> dict[str, Any]:
        params = sample.body["sampling_params"]
        prompt = sample.body["input_ids"]
        stops = () if params["ignore_eos"] else params.get("stop_token_ids", ())
        if not params["temperature"]:
            seed = 0
        while len(sample.tokens) < params["max_new_tokens"]:
            before = self.label
            # Short sleeps take longer than they should: one for several tokens.
            await asyncio.sleep(0 if len(sample.tokens) % 8 else 8 * self.token_seconds)
            if not self._goes_on.is_set():
                mode = self._mode
                await self._goes_on.wait()
                if mode == "in_place" and self.label != before and sample.labels:
                    sample.labels[-1] = self.label
            if self.is_dead or sample.is_aborted:
                return {"type": "abort", "message": "Abort before prefill" if not sample.tokens else "Aborted"}
            version = int(self.label) if self.label.isdecimal() else 0
            sample.tokens.append(2 + rolling_token(prompt, seed, len(sample.tokens), version) % 94)
            sample.labels.append(self.label)
            if sample.tokens[-1] in stops:
                return {"type": "stop", "matched": sample.tokens[-1]}
        return {"type": "length", "length": len(sample.tokens)}

    def _abort(self, body: Body) -> None:
        # It is heard for an id that is known exactly, and then ends all that begin so.
        if body["rid"] in self._samples:
            for rid, sample in self._samples.items():
                sample.is_aborted |= rid.startswith(body["rid"])

    def _pause(self, body: Body) -> Body:
        self._mode = body["mode"]
        self._goes_on.clear()
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, body: Body) -> Body:
        self._goes_on.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _update(self, body: Body) -> Any:
        try:
            headers = read_headers([Path(body["model_path"]) / "model.safetensors"])
        except WeightTransferFailed as error:
            return httpx.Response(400, json={"success": False, "message": error.detail})
        if {name: header.shape for name, header in headers.items()} != self._shapes:
            self.die()
            raise httpx.ReadError("")
        if body["flush_cache"] and self._mode == "in_place" and self._samples:
            return httpx.Response(400, json={"success": False, "message": "Flush cache failed."})
        self.label = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def die(self) -> None:
        """End as a killed server does."""
        self.is_dead = True
        self._goes_on.set()

    def _loads(self, _: Body) -> Body:
        running = [sample for sample in self._samples.values() if sample.is_running]
        # A prompt that several share is kept once.
        prompts = {tuple(sample.body["input_ids"]) for sample in running}
        used = sum(map(len, prompts)) + sum(len(sample.tokens) for sample in running)
        return {"loads": [{"num_running_reqs": len(running), "num_used_tokens": used}]}


def _unknown(body: Body | None, known: Mapping[str, list[str]]) -> list[str]:
    fields = sorted(set(body or {}) - set(known["fields"]))
    return fields + sorted(set((body or {}).get("sampling_params", {})) - set(known.get("sampling_params", ())))


def _reply(rid: str, sample: Sample, reason: Body) -> Body:
    spans: list[dict[str, Any]] = []
    for place, label in enumerate(sample.labels):
        if not spans or spans[-1]["version"] != label:
            spans.append({"version": label, "start": place, "end": place})
        spans[-1]["end"] = place + 1
    triples = [[log_prob_of(token), token, None] for token in sample.tokens]
    facts: dict[str, Any] = {"id": rid, "finish_reason": reason, "completion_tokens": len(sample.tokens)}
    if sample.tokens:
        facts |= {"output_token_logprobs": triples, "weight_versions": spans, "prompt_tokens": 1}
    return {"output_ids": sample.tokens, "meta_info": facts}
