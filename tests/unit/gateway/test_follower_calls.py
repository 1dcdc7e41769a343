"""Which calls of those who follow a run take the short way, and that they are answered as by the routes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.routes import follower_calls
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.writes import PointRecord
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import a_gateway, add_experiment, add_service

LIST = "/v1/experiments"
ONE = f"{LIST}/tiny-1"


class Follower:
    """A gateway with an experiment, and a client of its operator."""

    def __init__(self, gateway: GatewayState, app: FastAPI) -> None:
        self.gateway = gateway
        self.routed: list[str] = []
        self.opened: dict[str, Any] = {}
        framework = FastAPI.build_middleware_stack

        def noting(app: FastAPI) -> Any:
            inner = framework(app)

            async def call(scope: Any, receive: Any, send: Any) -> None:
                self.routed.append(scope["path"])
                await inner(scope, receive, send)

            return call

        self.noting = noting

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"state": {"gateway": gateway, **self.opened}}, receive, send)

        headers = {"Authorization": f"Bearer {gateway.settings.token}"}
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(with_state), base_url="http://x", headers=headers)


@pytest.fixture
async def follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    gateway = a_gateway()
    await add_experiment(gateway)
    for kind in (ServiceKind.ROLLOUT, ServiceKind.TRAINER, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value, "tiny-1")
    points = [
        PointRecord(name, step, 0, step / 7, "now") for step in range(3) for name in ("loss/total", "reward/mean")
    ]
    await gateway.store.put_metrics("tiny-1", points)
    await gateway.events.append("tiny-1", "stalled", component="a", cause="\u00fc")
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))
    made = Follower(gateway, app)
    monkeypatch.setattr(FastAPI, "build_middleware_stack", made.noting)
    return made


@pytest.mark.parametrize(
    ("path", "query"),
    [
        (LIST, {}),
        (LIST, {"spec": "false", "limit": "1"}),
        (ONE, {}),
        (f"{ONE}/ledger", {}),
        (f"{ONE}/metrics", {}),
        (f"{ONE}/metrics", {"names": "reward/mean,loss/total", "after": "2", "limit": "3"}),
        (f"{ONE}/log", {}),
        (f"{ONE}/log", {"types": "stalled,experiment_created", "after": "0", "limit": "1000"}),
        ("/v1/services", {}),
        ("/v1/services", {"limit": "2"}),
        (f"{LIST}/other", {}),
        (f"{LIST}/other/ledger", {}),
        (f"{LIST}/other/metrics", {}),
        (f"{LIST}/other/log", {}),
        (f"{ONE}/metrics", {"names": "strange"}),
        (f"{ONE}/metrics", {"after": "x"}),
        (LIST, {"after": "nobody"}),
    ],
)
async def test_ordinary_calls_are_answered_as_by_the_routes_without_the_framework(
    follower: Follower, path: str, query: dict[str, str]
) -> None:
    short = await follower.client.get(path, params=query)
    assert follower.routed == []
    # A parameter that the route does not know means nothing to it.
    routed = await follower.client.get(path, params={**query, "unknown": "1"})

    assert follower.routed == [path]
    assert (short.status_code, short.json()) == (routed.status_code, routed.json())
    assert short.headers["content-type"] == routed.headers["content-type"]
    assert short.content == routed.content


@pytest.mark.parametrize(
    ("method", "path", "query", "status"),
    [
        ("GET", LIST, {"spec": "perhaps"}, 422),
        ("GET", LIST, {"limit": "0"}, 422),
        ("GET", f"{ONE}/metrics", {"limit": "10001"}, 422),
        ("GET", f"{ONE}/log", {"limit": "1001"}, 422),
        ("GET", f"{ONE}/log", {"types": "Stalled"}, 422),
        ("GET", "/v1/services", {"kind": "trainer"}, 200),
        ("GET", f"{ONE}/", {}, 307),
        ("GET", f"{ONE}/events", {"after": "x"}, 422),
        ("HEAD", ONE, {}, 405),
        ("DELETE", f"{LIST}/other", {}, 404),
    ],
)
async def test_every_other_call_goes_on_to_the_routes(
    follower: Follower, method: str, path: str, query: dict[str, str], status: int
) -> None:
    answer = await follower.client.request(method, path, params=query)

    assert (answer.status_code, follower.routed) == (status, [path]), answer.text


async def test_who_may_not_ask_is_not_answered(follower: Follower) -> None:
    for path in (LIST, ONE, f"{ONE}/ledger", f"{ONE}/metrics", f"{ONE}/log", "/v1/services"):
        answer = await follower.client.get(path, headers={"Authorization": "Bearer other"})

        assert answer.status_code == 401
    assert follower.routed == []


async def test_experiments_of_the_tinker_api_are_the_routes(follower: Follower) -> None:
    async def runs(_after: object, **_chosen: object) -> tuple[int, list[object]]:
        return 0, []

    follower.opened["tinker"] = None
    await follower.client.get(LIST)
    assert follower.routed == []

    follower.opened["tinker"] = SimpleNamespace(runs=runs)
    listed = await follower.client.get(LIST)
    await follower.client.get(f"{LIST}/a:train:0")
    assert [each["id"] for each in listed.json()["items"]] == ["tiny-1"]
    assert follower.routed == [LIST, f"{LIST}/a:train:0"]


def test_every_kind_of_call_is_a_route_of_the_framework() -> None:
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))
    documented = app.openapi()["paths"]
    for kind in follower_calls.KINDS:
        (found,) = (methods["get"] for path, methods in documented.items() if kind.path.fullmatch(path))
        asked = {each["name"] for each in found.get("parameters", ()) if each["in"] == "query"}
        assert kind.parameters <= asked
