"""Web hooks: signed, tried again a bounded number of times, and nobody waits for a receiver that never answers."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.events import webhooks
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.settings import read_webhooks
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import SystemClock
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.environment.webhooks import Webhook
from flotilla.shared.errors import InvalidRequest

SECRET = "a-secret-of-sixteen-letters"
HERE: tuple[IPNetwork, ...] = (IPv4Network("127.0.0.0/8"),)
Answer = Callable[[int], Awaitable[bytes]]


class Seen:
    """What a receiver got: headers and bodies of its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []

    def kinds(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.requests]


@asynccontextmanager
async def receiver(answer: Answer) -> AsyncIterator[tuple[str, Seen]]:
    """Listen, and answer each request as told by how many came before; gives the URL and what was got."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")[1:]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
                body = await reader.readexactly(int(headers["content-length"]))
                seen.requests.append((headers, body))
                writer.write(await answer(len(seen.requests)))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/key-in-the-path", seen
    finally:
        server.close()


def replies(*statuses: int) -> Answer:
    async def answer(number: int) -> bytes:
        status = statuses[min(number, len(statuses)) - 1]
        return f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\nlocation: http://127.0.0.1/\r\n\r\n".encode()

    return answer


async def never(_number: int) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


@asynccontextmanager
async def told(*hooks: Webhook, networks: tuple[IPNetwork, ...] = HERE) -> AsyncIterator[EventLog]:
    events = EventLog(MemoryStore(), SystemClock(), hooks, networks)
    task = asyncio.create_task(events.webhooks.run())
    try:
        yield events
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def hook(url: str, *kinds: str) -> Webhook:
    return Webhook.model_validate({"url": url, "events": kinds or ("*",), "secret": SECRET})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(webhooks, "TIMEOUT_SECONDS", 0.3)


async def test_chosen_events_are_posted_with_a_signature_that_their_receiver_can_check() -> None:
    async with receiver(replies(204)) as (url, seen), told(hook(url, "service_*", "stalled")) as events:
        await events.append("e-1", "checkpoint", step=1)
        await events.append("e-1", "service_failed", service_id="reward-1")
        await events.append("e-2", "stalled", component="trainer")
        await until(lambda: events.webhooks.view()[0].delivered == 2)
        (view,) = events.webhooks.view()

    assert seen.kinds() == ["service_failed", "stalled"]
    headers, body = seen.requests[0]
    assert json.loads(body)["data"] == {"experiment_id": "e-1", "service_id": "reward-1"}
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(SECRET.encode(), signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert view.url == url.replace("key-in-the-path", "***") and view.last_error is None


@pytest.mark.parametrize(
    ("statuses", "requests", "delivered", "error"),
    [
        ((503, 429, 200), 3, True, None),
        ((500,), webhooks.ATTEMPTS, False, "the receiver answered 500"),
        ((403,), 1, False, "the receiver answered 403"),
        ((302,), 1, False, "the receiver answered 302"),
    ],
)
async def test_attempts_are_bounded_and_a_refusal_is_final(
    statuses: tuple[int, ...], requests: int, delivered: bool, error: str | None
) -> None:
    async with receiver(replies(*statuses)) as (url, seen), told(hook(url)) as events:
        await events.append("e-1", "stalled")
        await until(lambda: events.webhooks.view()[0].delivered + events.webhooks.view()[0].failed == 1)
        (view,) = events.webhooks.view()

    assert len(seen.requests) == requests
    assert len({headers["webhook-id"] for headers, _ in seen.requests}) == 1
    assert (view.delivered, view.failed, view.last_error) == (int(delivered), int(not delivered), error)


async def test_a_receiver_that_never_answers_holds_back_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "MOST_WAITING", 3)
    async with (
        receiver(never) as (silent, seen),
        receiver(replies(200)) as (well, _),
        told(hook(silent), hook(well)) as events,
    ):
        async with asyncio.timeout(5):
            for number in range(1, 9):
                await events.append("e-1", "checkpoint", step=number)
                while events.webhooks.view()[1].delivered < number:
                    await asyncio.sleep(0.01)
            await until(lambda: bool(seen.requests))
        first, _ = events.webhooks.view()
        assert first.delivered == 0 and first.waiting == 3 and first.dropped >= 2
        await until(lambda: events.webhooks.view()[0].failed >= 1)
        assert events.webhooks.view()[0].last_error == "no answer within 0.3 s"


async def test_an_address_that_is_neither_public_nor_named_is_not_connected_to() -> None:
    async with receiver(replies(200)) as (url, seen), told(hook(url), networks=()) as events:
        await events.append("e-1", "stalled")
        await until(lambda: events.webhooks.view()[0].failed == 1)
        (view,) = events.webhooks.view()

    assert seen.requests == []
    assert "neither public nor in a network" in str(view.last_error)


async def test_an_error_that_nobody_expected_ends_one_delivery_and_no_hook() -> None:
    # Validation refuses such a URL: this one stands for what it does not foresee.
    broken = hook("http://127.0.0.1/key").model_copy(update={"url": "http://127.0.0.1:99999/key"})
    async with receiver(replies(200)) as (url, _), told(broken, hook(url)) as events:
        for number in (1, 2):
            await events.append("e-1", "checkpoint", step=number)
            await until(
                lambda number=number: [view.failed + view.delivered for view in events.webhooks.view()] == [number] * 2  # type: ignore[misc]
            )
        view, _ = events.webhooks.view()

    assert view.waiting == 0 and view.delivered == 0
    assert view.last_error is not None and "OverflowError" in view.last_error and "key" not in view.last_error


async def test_the_documented_receiver_verifies_what_secrets_of_both_forms_sign() -> None:
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    verifies = next(code for code in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "whsec_" in code)
    documented: dict[str, Any] = {}
    exec(verifies, documented)
    key = b"the key, which is of 32 bytes...."
    for secret, raw in ((SECRET, SECRET.encode()), (f"whsec_{base64.b64encode(key).decode()}", key)):
        async with receiver(replies(200)) as (url, seen):
            given = Webhook.model_validate({"url": url, "secret": secret})
            async with told(given) as events:
                await events.append("e-1", "stalled")
                await until(lambda events=events: events.webhooks.view()[0].delivered == 1)  # type: ignore[misc]
        headers, body = seen.requests[0]
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        assert headers["webhook-signature"] == f"v1,{base64.b64encode(hmac.digest(raw, signed, 'sha256')).decode()}"
        assert documented["is_from_flotilla"](secret, headers, body)
        assert not documented["is_from_flotilla"](secret, headers, body + b" ")
        assert not documented["is_from_flotilla"](secret, headers | {"webhook-timestamp": "1"}, body)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"url": "ftp://host/x", "secret": SECRET}, "webhooks.0.url"),
        ({"url": "https://user:word@host/x", "secret": SECRET}, "without a user"),
        ({"url": "https://:word@host/x", "secret": SECRET}, "without a user"),
        ({"url": "https://host/x", "secret": "short"}, "at least 16"),
        ({"url": "https://host/x", "secret": SECRET, "evnts": []}, "webhooks.0.evnts"),
        ({"url": "http://127.0.0.1:99999/x", "secret": SECRET}, "port is not from 1 to 65535"),
        ({"url": "http://127.0.0.1:0/x", "secret": SECRET}, "port is not from 1 to 65535"),
        ({"url": "http://exämple..x/", "secret": SECRET}, "its host is no name"),
        ({"url": "http://example..x/", "secret": SECRET}, "its host is no name"),
        ({"url": "https://host/x", "secret": "whsec_not-base64-at-all"}, "must be the base64"),
        ({"url": "https://host/x", "secret": "whsec_c2hvcnQgaXQgaXM="}, "at least 16 bytes"),
    ],
)
def test_a_file_with_an_error_is_refused_by_its_place_and_without_its_secret(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    path = tmp_path / "hooks.yaml"
    path.write_text(json.dumps({"webhooks": [entry]}))

    with pytest.raises(InvalidRequest, match=words) as refused:
        read_webhooks({"FLOTILLA_WEBHOOKS": str(path)})
    assert entry["secret"] not in refused.value.detail
