"""Graders that answer 202 and call back: in time, later, never, and while reward services come and go."""

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from pydantic import ValidationError

from flotilla.services.reward.remote import Callbacks, RemoteVerifier, request_id
from flotilla.shared.clock import ManualClock
from flotilla.shared.config.sections.reward import RemoteConfig
from flotilla.shared.net.authorisation.tokens import callback_key
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.streams.mailbox import Delivery
from flotilla.shared.streams.memory.plane import MemoryMailbox
from tests.unit.reward.builders import a_sample

SAMPLES = [a_sample("good", id="7/0")]
NAME = request_id("exp", SAMPLES)
GRADES = b'{"grades": [{"reward": 0.5}]}'


class World:
    """A grader, a mailbox, and as many reward services as are asked for."""

    def __init__(self, status: int = 202) -> None:
        self.seconds = 0.0
        self.mailbox = MemoryMailbox(lambda: self.seconds)
        self.requests: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self._status = status

    def verifier(self, secret: str | None = None) -> RemoteVerifier:
        def handle(request: httpx.Request) -> httpx.Response:
            self.requests.append(json.loads(request.content))
            self.asked.set()
            return httpx.Response(self._status, content=GRADES)

        client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        config = RemoteConfig(url="http://93.184.215.14/", callback_seconds=60)
        callbacks = Callbacks(self.mailbox, "http://gateway:8470/")
        return RemoteVerifier(config, "exp", client, secret, callbacks=callbacks, clock=ManualClock(0.0))

    async def scoring(self, secret: str | None = None) -> "asyncio.Task[Any]":
        """Let a new reward service ask; return once the grader has said that it answers later."""
        task = asyncio.create_task(self.verifier(secret).score(SAMPLES))
        async with asyncio.timeout(5):
            while (found := await self.mailbox.find(NAME)) is None or not found.is_accepted:
                await asyncio.sleep(0.001)
        return task


async def test_grades_that_come_later_are_the_samples_grades() -> None:
    world = World()
    scoring = await world.scoring()

    assert await world.mailbox.deliver(NAME, GRADES) is Delivery.TAKEN

    assert [grade.reward for grade in await scoring] == [0.5]
    found = await world.mailbox.find(NAME)
    assert found is not None
    url = urlsplit(world.requests[0]["callback_url"])
    assert (url.netloc, url.path) == ("gateway:8470", f"/v1/gradings/{NAME}")
    assert parse_qs(url.query) == {"experiment": ["exp"], "token": [found.key.partition(":")[0]]}


async def test_a_reward_service_that_takes_over_asks_nobody_again() -> None:
    world = World()
    first = await world.scoring()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    second = await world.scoring()
    await world.mailbox.deliver(NAME, GRADES)

    assert [grade.reward for grade in await second] == [0.5]
    assert len(world.requests) == 1


async def test_a_grader_that_never_calls_back_is_an_error_not_a_zero() -> None:
    world = World()
    scoring = await world.scoring()
    world.seconds = 61

    (grade,) = await scoring

    assert (grade.status, grade.reward) == (GradeStatus.ERROR, None)
    assert "did not call back within 60 s" in (grade.reason or "")


async def test_who_asks_again_after_a_deadline_was_missed_asks_the_grader_again() -> None:
    world = World()
    missed = await world.scoring()
    world.seconds = 61
    assert (await missed)[0].status is GradeStatus.ERROR

    again = asyncio.create_task(world.verifier().score(SAMPLES))
    async with asyncio.timeout(5):
        while len(world.requests) < 2 and not again.done():
            await asyncio.sleep(0.001)
    assert len(world.requests) == 2
    name = world.requests[1]["id"]
    assert name != NAME
    answer = json.dumps({"id": name, "grades": [{"reward": 0.5}]}).encode()
    assert await world.mailbox.deliver(name, answer) is Delivery.TAKEN

    assert [grade.reward for grade in await again] == [0.5]


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"grades": []}', b'{"grades": [{"reward": NaN}]}', b"\xff" * 100])
async def test_whatever_is_called_back_is_no_false_zero(answer: bytes) -> None:
    world = World()
    scoring = await world.scoring()
    await world.mailbox.deliver(NAME, answer)

    (grade,) = await scoring

    assert (grade.status, grade.reward) == (GradeStatus.ERROR, None)


async def test_a_grader_that_is_offered_a_callback_may_answer_at_once() -> None:
    world = World(status=200)

    assert [grade.reward for grade in await world.verifier().score(SAMPLES)] == [0.5]


async def test_the_signing_key_is_made_of_the_secret_and_the_requests_id() -> None:
    world = World()
    scoring = await world.scoring("s3cret")
    found = await world.mailbox.find(NAME)
    scoring.cancel()

    assert found is not None and found.key.partition(":")[2] == callback_key("s3cret", NAME)


def test_openrlhfs_dialect_knows_no_callbacks() -> None:
    with pytest.raises(ValidationError, match="callback_seconds"):
        RemoteConfig(url="http://g/", dialect="openrlhf", callback_seconds=5)
