"""What servers in memory have in common: they sample, wait at pauses, and take the real one's fields alone."""

import asyncio
import inspect
import itertools
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.rollout.engines.decoders.checkpoint import read_headers
from flotilla.services.rollout.engines.scripted import rolling_token
from flotilla.shared.errors import WeightTransferFailed

Body = Mapping[str, Any]


@dataclass(eq=False)
class Sample:
    """One request at the server."""

    prompt: Sequence[int]
    max_new_tokens: int
    stops: Sequence[int] = ()
    is_greedy: bool = False
    adapter: str | None = None
    """By which it is sampled; None: by the weights alone."""
    tokens: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    is_running: bool = False
    is_aborted: bool = False


class FakeServer(httpx.AsyncBaseTransport, ABC):
    """Serves a model directory behind a transport of httpx.

    Args:
        model: the directory; ``adapters`` are numbers made of those that it has by name.
        requests: JSON file with the fields of each route that is there.
        slots: requests that run at a time.
        context_length: prompt and completion together.
        token_seconds: that one token takes.
    """

    def __init__(self, model: Path, requests: Path, *, slots: int, context_length: int, token_seconds: float) -> None:
        self.token_seconds = token_seconds
        self.model, self.context_length = model, context_length
        self.label = "default"
        self.is_dead = False
        self.drops_connections = 0
        self.calls: list[tuple[str, Body | None]] = []
        self.weights = weights_in(model)
        self.adapters: dict[str, int] = {}
        self._shapes = {name: header.shape for name, header in read_headers([model / "model.safetensors"]).items()}
        self._slots = asyncio.Semaphore(slots)
        self._samples: dict[str, Sample] = {}
        self._mode: str | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._seeds = itertools.count()
        self._requests: dict[str, dict[str, list[str]]] = json.loads(requests.read_text())
        self._routes: dict[str, Callable[[Body], Any]] = {}

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
        unknown = unknown_fields(body, known)
        if unknown or (request.method == "POST" and known["fields"] and body is None):
            return httpx.Response(400, json={"error": f"unknown fields {unknown}"})
        if "query" in known:
            assert set(request.url.params) <= set(known["query"]), request.url
            body = dict(request.url.params)
        answer = self._routes[route](body or {})
        if inspect.isawaitable(answer):
            answer = await answer
            if self.is_dead:
                raise httpx.ReadError("")
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200) if answer is None else httpx.Response(200, json=answer)

    async def _sampled(self, rid: str, sample: Sample, relabels: Callable[[], bool] = lambda: False) -> str:
        """Sample to the end, and say why it ended.

        Args:
            rid: id of the request.
            sample: to be filled.
            relabels: whether the pause that is on counts the token under way to the version after it.
        """
        await self._goes_on.wait()
        self._samples[rid] = sample
        try:
            async with self._slots:
                sample.is_running = True
                return await self._run(sample, 0 if sample.is_greedy else next(self._seeds), relabels)
        finally:
            del self._samples[rid]

    async def _run(self, sample: Sample, seed: int, relabels: Callable[[], bool]) -> str:
        while len(sample.tokens) < sample.max_new_tokens:
            before = self.label
            # Short sleeps take longer than they should: one for several tokens.
            await asyncio.sleep(0 if len(sample.tokens) % 8 else 8 * self.token_seconds)
            if not self._goes_on.is_set():
                moves = relabels()
                await self._goes_on.wait()
                if moves and self.label != before and sample.labels:
                    sample.labels[-1] = self.label
            if self.is_dead or sample.is_aborted:
                return "abort"
            assert sample.adapter is None or self.label in sample.adapter, (
                "it labels tokens of one adapter as another's"
            )
            weights = self.weights if sample.adapter is None else self.adapters[sample.adapter]
            sample.tokens.append(token_of(sample.prompt, seed, len(sample.tokens), weights))
            sample.labels.append(self.label)
            if sample.tokens[-1] in sample.stops:
                return "stop"
        return "length"

    def _misfit(self, directory: Path) -> str | None:
        """Load the weights in a directory; say why they cannot be read, if they cannot."""
        try:
            headers = read_headers([directory / "model.safetensors"])
        except WeightTransferFailed as error:
            return error.detail
        if {name: header.shape for name, header in headers.items()} != self._shapes:
            return self._on_wrong_shapes()
        self.weights = weights_in(directory)
        return None

    @abstractmethod
    def _on_wrong_shapes(self) -> str | None:
        """Do what the real one does with weights that do not fit; return what it says, if it lives."""

    def die(self) -> None:
        """End as a killed server does."""
        self.is_dead = True
        self._goes_on.set()


def weights_in(directory: Path) -> int:
    """Make a number of the weights in a directory."""
    return zlib.crc32((directory / "model.safetensors").read_bytes())


def token_of(prompt: Sequence[int], seed: int, position: int, weights: int) -> int:
    """Sample a token: it depends on the weights themselves, not on what they are called; greedily the seed is 0."""
    return 2 + rolling_token(prompt, seed, position, weights) % 94


def unknown_fields(body: Body | None, known: Mapping[str, list[str]]) -> list[str]:
    """Name what a body has and a route has not."""
    fields = sorted(set(body or {}) - set(known["fields"]))
    return fields + sorted(set((body or {}).get("sampling_params", {})) - set(known.get("sampling_params", ())))


def spans_of(sample: Sample) -> list[dict[str, Any]]:
    """Make half-open spans of the tokens' versions."""
    spans: list[dict[str, Any]] = []
    for place, label in enumerate(sample.labels):
        if not spans or spans[-1]["version"] != label:
            spans.append({"version": label, "start": place, "end": place})
        spans[-1]["end"] = place + 1
    return spans
