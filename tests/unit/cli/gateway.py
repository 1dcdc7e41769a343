"""A gateway in memory for commands: what it answers is given, what it is asked is kept."""

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from flotilla.client import AsyncClient
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.experiment import ExperimentView


class ScriptedGateway:
    """Answers paths below ``/v1``; a list is one page."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/v1")
        self.asked.append(f"{request.method} {path}")
        if request.method == "DELETE":
            return httpx.Response(204)
        if path not in self.answers:
            return httpx.Response(404, json={"code": "not_found", "detail": f"no {path}"})
        answer = self.answers[path]
        names = request.url.params.get("names")
        if isinstance(answer, list):
            items = [item for item in answer if names is None or item["name"] in names.split(",")]
            done = "after" in request.url.params and path.endswith("/metrics")
            return httpx.Response(200, json={"items": [] if done else items, "next": "c" if names else None})
        return httpx.Response(200, json=answer)


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> AsyncClient:
    """Make a client of a gateway that is a function."""

    class Transported(GatewayClient):
        def __init__(self, base_url: str, token: str | None) -> None:
            super().__init__(base_url, token, transport=httpx.MockTransport(answer))

    class Client(AsyncClient):
        gateway_class = Transported

    return Client("http://g", "t")


def serve(monkeypatch: pytest.MonkeyPatch, views: list[ExperimentView], answers: Mapping[str, Any]) -> ScriptedGateway:
    """Let every command talk to a scripted gateway."""
    listed = [view.model_dump(mode="json") for view in views]
    each = {f"/experiments/{view.id}": document for view, document in zip(views, listed, strict=True)}
    gateway = ScriptedGateway({"/experiments": listed, **each, **answers})

    async def send(client: httpx.AsyncClient, request: httpx.Request, **_: Any) -> httpx.Response:
        answer = gateway(request)
        answer.request = request
        return answer

    monkeypatch.setenv("FLOTILLA_GATEWAY_URL", "http://gateway")
    monkeypatch.setenv("FLOTILLA_TOKEN", "token")
    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    return gateway
