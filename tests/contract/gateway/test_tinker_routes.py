"""Who is let in to the Tinker API: its own scope and operators, by the key in the client's header, and nobody else."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from flotilla.services.gateway.access.policy import RULES, refusal
from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.routes import tinker
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.tinker.packing import UnpackedBodies, pack, unpack
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.tinker.queue import Answer, Form, Request
from flotilla.shared.tinker.records import Verb
from tests.unit.gateway.builders import a_gateway

OPERATOR = "the-operators-token"
API = "/api/v1"
ROUTES = sorted(
    (method, f"{API}{route.path}")
    for route in tinker.router.routes
    if isinstance(route, APIRoute) and not route.path.startswith("/downloads/")
    for method in route.methods
)
"""But that of downloads, which a signed address lets in."""
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


class Echo:
    """Takes what is to be computed, and answers with it."""

    def __init__(self) -> None:
        self.unpacking = UnpackedBodies()
        self.taken: list[bytes] = []

    async def forward_backward(self, who: Principal, raw: bytes) -> Request:
        """Take a request."""
        self.taken.append(raw)
        return Request("m:1", "", Verb.FORWARD_BACKWARD, 1, "m", raw)

    async def answer(self, who: Principal, request_id: str) -> Answer:
        """Answer it."""
        return Answer(Form.PROTOBUF, self.taken[-1])


@asynccontextmanager
async def opened(served: Echo | None) -> AsyncIterator[httpx.AsyncClient]:
    gateway: Any = a_gateway(token=OPERATOR)
    app = create_app(GatewaySettings(OPERATOR, "redis://nowhere", Path("/nowhere"), tinker_model=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": gateway, "tinker": served}}, receive, send)

    transport = httpx.ASGITransport(with_state, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as found:
        yield found


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with opened(None) as found:
        yield found


@pytest.mark.parametrize(("method", "path"), [*ROUTES, ("GET", f"{API}/downloads/r/weights/n/f")])
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


async def test_bodies_are_in_zstd_as_the_client_asks() -> None:
    served, key = Echo(), {"X-API-Key": f"tml-{OPERATOR}"}
    plain = b"many tokens " * 1000
    async with opened(served) as client:
        for encoding, body in (("zstd", pack(plain)), ("identity", plain)):
            headers = {**key, "Content-Encoding": encoding}
            taken = await client.post(f"{API}/forward_backward", headers=headers, content=body)
            assert taken.json() == {"request_id": "m:1", "model_id": "m"}

        answers = [
            await client.post(
                f"{API}/retrieve_future", headers={**key, "Accept-Encoding": accepts}, json={"request_id": "m:1"}
            )
            for accepts in ("gzip, zstd", "gzip")
        ]

        assert served.taken == [plain, plain]
        assert [each.headers.get("content-encoding") for each in answers] == ["zstd", None]
        # This client reads it only where a library for it is installed.
        packed = answers[0].content
        assert packed == plain or unpack(packed, len(plain)) == plain
        assert answers[1].content == plain


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("zstd", pack(bytes(33 * 1024 * 1024)), 413),
        ("zstd", b"no zstd", 422),
        ("gzip", b"", 422),
    ],
)
async def test_what_cannot_be_unpacked_is_refused(encoding: str, body: bytes, status: int) -> None:
    served, key = Echo(), {"X-API-Key": f"tml-{OPERATOR}"}
    async with opened(served) as client:
        headers = {**key, "Content-Encoding": encoding}
        answer = await client.post(f"{API}/forward_backward", headers=headers, content=body)

    assert (answer.status_code, served.taken) == (status, [])
