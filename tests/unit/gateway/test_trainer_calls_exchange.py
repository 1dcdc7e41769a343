"""Which status calls take the short way, and what it answers."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from flotilla.services.gateway.routes.trainer_calls import StatusCalls
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import a_gateway, add_service

BODY = b'{"state": "idle"}'
JSON_HEADERS = [(b"host", b"gateway"), (b"content-type", b"application/json")]


class Call:
    """One request, made to ``StatusCalls`` around an app that notes what comes through."""

    def __init__(self, gateway: GatewayState, path: str, body: bytes = BODY, **scope: Any) -> None:
        self.passed_on: list[bytes] = []
        self.sent: list[Message] = []
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._scope: Scope = {
            "type": "http",
            "method": "PUT",
            "path": path,
            "query_string": b"",
            "headers": JSON_HEADERS,
            "state": {"gateway": gateway},
            **scope,
        }

    async def __call__(self) -> None:
        """Make it."""
        await StatusCalls(self._app)(self._scope, self._receive, self._send)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.passed_on.append((await receive())["body"])

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("query", [b"", b"wait=0", b"wait=0.0"])
async def test_a_call_in_plain_order_is_answered_with_the_desired_state(query: bytes) -> None:
    gateway = a_gateway()
    service_id = await add_service(gateway, ServiceKind.REWARD, "one")
    call = Call(gateway, f"/v1/services/{service_id}/status", query_string=query)

    await call()

    assert call.passed_on == []
    assert call.sent[0]["status"] == 200
    desired = gateway.fleet.desired(gateway.registry.get(service_id))
    assert json.loads(call.sent[1]["body"]) == desired.model_dump(mode="json")
    assert dict(call.sent[0]["headers"])[b"content-length"] == b"%d" % len(call.sent[1]["body"])


async def test_a_service_that_is_not_known_gets_a_problem() -> None:
    call = Call(a_gateway(), "/v1/services/rollout-1/status")

    await call()

    assert call.passed_on == []
    assert call.sent[0]["status"] == 404
    assert json.loads(call.sent[1]["body"])["code"] == "not_found"


@pytest.mark.parametrize(
    "unusual",
    [
        {"method": "POST"},
        {"path": "/v1/services/one/drain"},
        {"path": "/v1/services/one/more/status"},
        {"query_string": b"wait=soon"},
        {"query_string": b"wait=-1"},
        {"query_string": b"wait=1&wait=2"},
        {"headers": [(b"content-type", b"text/plain")]},
        {"headers": [(b"content-type", b"application/json; charset=utf-8")]},
        {"body": b"{"},
        {"body": b'{"state": 3}'},
    ],
)
async def test_every_other_call_goes_on_whole_to_the_routes(unusual: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"path": "/v1/services/one/status", **unusual}
    call = Call(a_gateway(), **asked)

    await call()

    assert call.passed_on == [asked.get("body", BODY)]
    assert call.sent == []
