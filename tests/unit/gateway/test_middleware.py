"""What a request must be before a route sees it."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from flotilla.services.gateway.access.tokens import Tokens
from flotilla.services.gateway.middleware import Guard, Opened
from flotilla.services.gateway.routes.dependencies import number_of
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.records import StoredAnswer
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.authorisation.access import Principal
from flotilla.shared.net.authorisation.access import Scope as Role
from flotilla.shared.net.authorisation.token_records import TokenRequest
from flotilla.shared.net.server.connections import EXTENSION
from flotilla.shared.net.server.request_body import Bodies
from flotilla.shared.schemas.service import ServiceKind


def nobody(_experiment_id: str) -> None:
    """Name no owner: no experiment has one here."""


class Seen:
    """An app that remembers the bodies that it is given, and what is sent."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}


PART = {"type": "http.request", "body": b"steps: 3", "more_body": True}
REST = {"type": "http.request", "body": b"000", "more_body": False}


class Flooded:
    """A connection from an address of which too many requests were refused."""

    def __init__(self) -> None:
        self.num_refused = 0

    def refused(self) -> int:
        self.num_refused += 1
        return 7


async def ask(
    messages: Sequence[Message],
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    token: str = "t",
    age_seconds: float = 0.0,
    connection: Flooded | None = None,
) -> Seen:
    """Ask the guard.

    Args:
        messages: of the request.
        headers: besides its token.
        token: which it has; ``pass``: a service's own.
        age_seconds: how long ago that was made.
        connection: which it comes on.
    """
    seen, left = Seen(), list(messages)

    async def receive() -> Message:
        return left.pop(0)

    store, clock = MemoryStore(), ManualClock()
    tokens = Tokens(store, clock, "t")
    opened = Opened(store, clock, tokens, nobody)
    if token == "pass":
        token = tokens.pass_of(ServiceKind.TRAINER, "trainer-1")
        clock.advance(age_seconds)
    guard = Guard(seen, opened_of=lambda _: opened, bodies=Bodies())
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/experiments",
        "raw_path": b"/v1/experiments",
        "query_string": b"",
        "state": {},
        "headers": [(b"authorization", b"Bearer " + token.encode()), *headers],
        "extensions": {} if connection is None else {EXTENSION: {"connection": connection}},
    }
    await guard(scope, receive, seen.send)
    return seen


@pytest.mark.parametrize(
    ("token", "age_seconds", "status", "counted"),
    [("wrong", 0.0, 429, 1), ("t", 0.0, 200, 0), ("pass", 0.0, 403, 0), ("pass", 1e6, 401, 0)],
)
async def test_only_who_has_no_token_of_the_fleet_is_refused_too_often(
    token: str, age_seconds: float, status: int, counted: int
) -> None:
    connection = Flooded()

    seen = await ask([REST], token=token, age_seconds=age_seconds, connection=connection)

    assert (seen.statuses, connection.num_refused) == ([status], counted)
    assert (seen.headers.get("retry-after"), seen.headers.get("connection")) == (
        ("7", "close") if counted else (None, None)
    )


async def test_a_body_that_broke_off_is_not_executed() -> None:
    assert (await ask([PART, REST])).bodies == [b"steps: 3000"]

    seen = await ask([PART, {"type": "http.disconnect"}])

    assert (seen.bodies, seen.statuses) == ([], [])


@pytest.mark.parametrize(("method", "is_answered"), [("GET", False), ("POST", True)])
async def test_a_reader_that_hangs_up_is_not_served_on_and_a_change_is_done(method: str, is_answered: bool) -> None:
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    begun, may_answer, answered = asyncio.Event(), asyncio.Event(), list[bool]()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        begun.set()
        await may_answer.wait()
        answered.append(True)

    async def receive() -> Message:
        return REST

    async def send(_message: Message) -> None:
        raise AssertionError("there is nobody")

    store, clock = MemoryStore(), ManualClock()
    opened = Opened(store, clock, Tokens(store, clock, "t"), nobody)
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": "/v1/experiments",
        "query_string": b"",
        "state": {},
        "headers": [(b"authorization", b"Bearer t")],
        "extensions": {EXTENSION: {"connection": SimpleNamespace(lost=lost)}},
    }
    asking = asyncio.create_task(Guard(app, opened_of=lambda _: opened, bodies=Bodies())(scope, receive, send))
    await begun.wait()

    lost.set_result(None)
    if is_answered:
        may_answer.set()
    await asking

    assert answered == [True] * is_answered
    assert not lost.cancelled()


@pytest.mark.parametrize("cursor", ["\u00b2", "9" * 25, "-1", "1.0", "", " 1", "\u0663"])
def test_a_cursor_is_a_number_that_a_database_holds(cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a cursor"):
        number_of(cursor)


class Kept(MemoryStore):
    """A store that counts the answers that it is given to keep."""

    num_answers = 0

    async def put_answer(self, answer: StoredAnswer) -> None:
        self.num_answers += 1
        await super().put_answer(answer)


@pytest.mark.parametrize(
    ("path", "num_answers"),
    [
        ("/v1/chat/completions", 0),
        ("/v1/completions", 0),
        ("/v1/messages", 0),
        ("/v1/messages/count_tokens", 0),
        ("/v1/experiments/e.1/episodes", 0),
        ("/v1/episodes/e.1.rollout-1.0/complete", 2),
    ],
)
async def test_an_idempotency_key_of_one_agent_says_nothing_to_another_and_keeps_no_key_of_an_episode(
    path: str, num_answers: int
) -> None:
    store, clock, seen = Kept(), ManualClock(), Seen()
    tokens = Tokens(store, clock, "t")
    guard = Guard(seen, opened_of=lambda _: Opened(store, clock, tokens, nobody), bodies=Bodies())
    for subject in ("e.1.rollout-1.0", "e.1.rollout-1.1"):
        token = tokens.issue(Principal(Role.AGENT, "an agent", experiment_id="e.1", subject=subject), 60.0)
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "state": {},
            "route": SimpleNamespace(status_code=None),
            "headers": [(b"authorization", f"Bearer {token}".encode()), (b"idempotency-key", b"turn-1")],
        }

        async def receive() -> Message:
            return REST

        await guard(scope, receive, seen.send)

    assert (seen.bodies, seen.statuses) == ([b"000", b"000"], [200, 200])
    assert store.num_answers == num_answers


async def test_a_later_token_of_the_same_name_has_no_answer_of_the_earlier_ones() -> None:
    store, clock, seen = Kept(), ManualClock(), Seen()
    tokens = Tokens(store, clock, "t")
    guard = Guard(seen, opened_of=lambda _: Opened(store, clock, tokens, nobody), bodies=Bodies())
    for owner in ("alice", "bob"):
        record, token = await tokens.create(TokenRequest(name="ci", scope=Role.OPERATOR, owner=owner))
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/experiments",
            "raw_path": b"/v1/experiments",
            "query_string": b"",
            "state": {},
            "route": SimpleNamespace(status_code=None),
            "headers": [(b"authorization", f"Bearer {token}".encode()), (b"idempotency-key", b"k1")],
        }

        async def receive() -> Message:
            return REST

        await guard(dict(scope), receive, seen.send)
        await guard(dict(scope, state={}), receive, seen.send)
        await tokens.revoke(record.id)

    assert len(seen.bodies) == 2, "once for each, and a repetition has the answer"
    assert store.num_answers == 2
