"""Who is let in to the Tinker API: its own scope and operators, by the key in the client's header, and nobody else."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from flotilla.services.gateway.access.policy import RULES, refusal
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.routes import tinker
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import a_gateway

OPERATOR = "the-operators-token"
API = "/api/v1"
ROUTES = sorted(
    (method, f"{API}{route.path}")
    for route in tinker.router.routes
    if isinstance(route, APIRoute)
    for method in route.methods
)
OTHERS = (
    Principal(Scope.READER, "reader"),
    Principal(Scope.AGENT, "agent", experiment_id="e-1"),
    Principal(Scope.GRADER, "grader", experiment_id="e-1"),
    Principal(Scope.SERVICE, "joining"),
    *(Principal(Scope.SERVICE, "own", kind, "own") for kind in ServiceKind),
    Principal(Scope.SERVICE, "its trainer", ServiceKind.TRAINER, "own", "e-1", epoch=1),
)


def filled(path: str) -> str:
    return re.sub(r"\{\w+(:path)?\}", "1", path)


def test_there_is_a_rule_for_each_route_and_a_route_for_each_rule() -> None:
    assert len(ROUTES) > 25
    assert {(method, path) for method, path in RULES if path.startswith(API)} == set(ROUTES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_its_own_scope_and_operators_are_let_in(method: str, path: str) -> None:
    for who in (Principal(Scope.TINKER, "loop"), Principal(Scope.OPERATOR, "operator")):
        assert refusal(method, filled(path), who) is None
    for who in OTHERS:
        assert refusal(method, filled(path), who) is not None, who


def test_its_scope_is_let_in_nowhere_else() -> None:
    who = Principal(Scope.TINKER, "loop")

    let_in = [(method, path) for method, path in RULES if refusal(method, filled(path), who) is None]

    assert set(let_in) - set(ROUTES) == {("GET", "/v1/tokens/self")}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    gateway: Any = a_gateway(token=OPERATOR)
    app = create_app(GatewaySettings(OPERATOR, "redis://nowhere", Path("/nowhere"), tinker_model=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway, "tinker": None}}, receive, send)

    transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as found:
        yield found


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_missing_or_wrong_key_is_refused_before_anything_is_read(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    for headers in ({}, {"X-API-Key": "tml-"}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": "wrong"}):
        answer = await client.request(method, filled(path), headers=headers, content=b"\xff")
        assert answer.status_code == 401, headers


async def test_a_key_is_a_token_with_the_clients_prefix(client: httpx.AsyncClient) -> None:
    for key in (f"tml-{OPERATOR}", OPERATOR):
        answer = await client.post(f"{API}/client/config", headers={"X-API-Key": key}, json={})
        # Let in, and told that there is no model.
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_the_clients_header_lets_nobody_in_elsewhere(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/experiments", headers={"X-API-Key": f"tml-{OPERATOR}"})

    assert answer.status_code == 401


async def test_a_body_that_is_too_large_is_not_read(client: httpx.AsyncClient) -> None:
    headers = {"X-API-Key": f"tml-{OPERATOR}", "Content-Length": str(33 * 1024 * 1024)}

    answer = await client.post(f"{API}/forward_backward", headers=headers, content=b"\x00" * (33 * 1024 * 1024))

    assert answer.status_code == 413
