"""Who may call back for a grader, with what, and when."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flotilla.services.gateway.app import create_app
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.clock import ManualClock
from flotilla.shared.net.authorisation.tokens import callback_key, new_callback_key, signature
from tests.unit.gateway.builders import a_gateway, add_experiment

NAME = "0123456789abcdef" * 2
GRADES = b'{"grades": [{"reward": 1}]}'


class World:
    app: Any
    client: httpx.AsyncClient

    def __init__(self) -> None:
        self.clock = ManualClock(1_000_000.0)
        self.gateway = a_gateway(clock=self.clock)
        self.token = ""

    async def expect(self, secret: str | None = None, seconds: float = 60.0) -> None:
        experiment = await add_experiment(self.gateway)
        key = new_callback_key(secret, NAME)
        await experiment.train.mailbox.expect(NAME, key=key, seconds=seconds)
        self.token = key.partition(":")[0]

    async def post(
        self, body: bytes = GRADES, *, token: str | None = None, key: str | None = None, age: float = 0, **given: str
    ) -> int:
        headers = {}
        if key is not None:
            timestamp = str(int(self.clock.now() - age))
            headers = {
                "X-Flotilla-Timestamp": timestamp,
                "X-Flotilla-Signature": f"sha256={signature(key, timestamp, body)}",
            }
        query = {"experiment": "tiny-1", "token": self.token if token is None else token} | given
        answer = await self.client.post(f"/v1/gradings/{NAME}", params=query, content=body, headers=headers)
        return answer.status_code


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    app = create_app(GatewaySettings(token="t", redis_url="redis://nowhere", data=Path("/nowhere")))

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"gateway": made.gateway}}, receive, send)

    made.app = with_state
    transport = httpx.ASGITransport(with_state)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as made.client:
        yield made


async def test_the_same_answer_again_is_taken_and_another_one_is_not(world: World) -> None:
    await world.expect()

    assert [await world.post(), await world.post(), await world.post(b"{}")] == [200, 200, 409]


async def test_only_who_was_told_the_address_may_post(world: World) -> None:
    await world.expect()

    assert [await world.post(token="other"), await world.post(token=""), await world.post(experiment="x")] == [401] * 3
    assert await world.post() == 200


async def test_a_callback_is_signed_where_the_grader_has_a_secret(world: World) -> None:
    await world.expect("s3cret")
    key = callback_key("s3cret", NAME)

    assert await world.post() == 401
    assert await world.post(key="s3cret") == 401
    assert await world.post(key=key, age=301) == 401
    assert await world.post(key=key) == 200


async def test_a_late_or_endless_answer_is_refused(world: World) -> None:
    await world.expect(seconds=0.0)

    assert await world.post(b"x" * (1024 * 1024 + 1)) == 413
    assert await world.post() == 410


async def test_of_whoever_does_not_know_an_address_no_body_is_read_and_no_answer_kept(world: World) -> None:
    await world.expect()
    pieces: list[bytes] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            pieces.append(b"x" * 65536)
            yield pieces[-1]

    url, key = f"/v1/gradings/{NAME}", {"Idempotency-Key": "k"}
    unknown = await world.client.post(
        url, params={"experiment": "tiny-1", "token": "x"}, content=endless(), headers=key
    )
    before = len(pieces)
    known = await world.client.post(url, params={"experiment": "tiny-1", "token": world.token}, content=endless())

    assert (unknown.status_code, before) == (401, 0)
    assert (known.status_code, known.json()["code"]) == (413, "body_too_large")
    assert len(pieces) == 17
    assert await world.gateway.store.answer(f"{url} k") is None


async def test_an_answer_that_breaks_off_is_not_taken(world: World) -> None:
    await world.expect()
    coming = iter([{"type": "http.request", "body": GRADES, "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(coming)

    async def send(_message: Any) -> None:
        """Nobody is there to read it."""

    path, query = f"/v1/gradings/{NAME}", f"experiment=tiny-1&token={world.token}".encode()
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": query}
    await world.app(scope | {"headers": [], "server": ("x", 80), "scheme": "http"}, receive, send)

    assert await world.post(b"{}") == 200
