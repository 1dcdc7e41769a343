"""Web hooks: signed, tried again a bounded number of times, and nobody waits for a receiver that never answers."""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.events import webhooks
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.settings import GatewaySettings, read_webhooks
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import DeleteExperiment
from flotilla.shared.clock import ManualClock, SystemClock
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.environment.webhooks import Webhook
from flotilla.shared.errors import InvalidRequest, Unavailable
from flotilla.shared.net.client.client import GatewayClient
from tests.integration.gateway.fleet import TOKEN, a_spec
from tests.integration.gateway.fleet import until as waiting_for
from tests.integration.gateway.test_faults import GatewayProcess

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
async def receiver(answer: Answer, port: int = 0) -> AsyncIterator[tuple[str, Seen]]:
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

    server = await asyncio.start_server(serve, "127.0.0.1", port)
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
async def told(
    *hooks: Webhook, networks: tuple[IPNetwork, ...] = HERE, store: Store | None = None
) -> AsyncIterator[EventLog]:
    events = EventLog(store or MemoryStore(), SystemClock(), hooks, networks)
    await events.webhooks.load()
    task = asyncio.create_task(events.webhooks.run())
    try:
        yield events
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def hook(url: str, *kinds: str) -> Webhook:
    return Webhook.model_validate({"url": url, "events": kinds or ("*",), "secret": SECRET})


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
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


async def test_what_a_gateway_did_not_send_is_sent_by_the_next_under_the_same_id_and_first() -> None:
    store = MemoryStore()
    async with receiver(replies(503)) as (url, refused), told(hook(url), store=store) as events:
        await events.append("e-1", "checkpoint", step=1)
        await events.append("e-1", "checkpoint", step=2)
        await until(lambda: bool(refused.requests))
        port = int(url.split(":")[2].split("/")[0])
    assert len(await store.deliveries()) == 2

    async with (
        receiver(replies(200), port) as (again, seen),
        told(hook(again), store=store) as events,
    ):
        assert again == url
        await events.append("e-1", "checkpoint", step=3)
        await until(lambda: events.webhooks.view()[0].delivered == 3)
        await until(lambda: not store._deliveries)

    assert [json.loads(body)["data"]["step"] for _, body in seen.requests] == [1, 2, 3]
    assert seen.requests[0][0]["webhook-id"] == refused.requests[0][0]["webhook-id"]


async def test_what_no_hook_wants_any_more_is_forgotten_when_a_gateway_begins() -> None:
    store = MemoryStore()
    gone, kept = hook("http://127.0.0.1:9/gone"), hook("http://127.0.0.1:9/kept", "stalled", "checkpoint")
    events = EventLog(store, SystemClock(), (gone, kept))
    await events.append("e-1", "stalled")
    await events.append("e-1", "checkpoint", step=1)
    assert len(await store.deliveries()) == 4

    narrowed = EventLog(store, SystemClock(), (hook("http://127.0.0.1:9/kept", "stalled"),))
    await narrowed.webhooks.load()

    assert [each.type for each in await store.deliveries()] == ["stalled"]
    assert [view.waiting for view in narrowed.webhooks.view()] == [1]


async def test_what_ended_is_deleted_whatever_its_end_and_again_where_the_database_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, deleted = MemoryStore(), MemoryStore.delete_deliveries
    failures = [Unavailable("the database does not answer")]

    async def delete(self: MemoryStore, ids: Collection[str]) -> None:
        if failures:
            raise failures.pop()
        await deleted(self, ids)

    monkeypatch.setattr(MemoryStore, "delete_deliveries", delete)
    monkeypatch.setattr(webhooks, "FORGET_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(webhooks, "LONGEST_WAIT_SECONDS", 100.0)
    async with receiver(replies(200, 403)) as (url, seen):
        old = EventLog(store, ManualClock(SystemClock().now() - 101.0), (hook(url),))
        await old.append("e-1", "checkpoint", step=0)
        async with told(hook(url), store=store) as events:
            await events.append("e-1", "checkpoint", step=1)
            await events.append("e-1", "checkpoint", step=2)
            await until(lambda: not store._deliveries)
            (view,) = events.webhooks.view()

    assert (view.dropped, view.delivered, view.failed) == (1, 1, 1)
    assert [json.loads(body)["data"]["step"] for _, body in seen.requests] == [1, 2], "what is too old is not sent"


async def test_nothing_more_is_sent_of_an_experiment_that_is_deleted() -> None:
    store = MemoryStore()
    events = EventLog(store, SystemClock(), (hook("http://127.0.0.1:9/x"),))
    for experiment in ("e-1", "e-2", "e-1"):
        await events.append(experiment, "stalled")

    async with store.transaction() as change:
        change.write(DeleteExperiment("e-1"))
        events.webhooks.stage_removal(change, "e-1")

    assert [each.experiment_id for each in await store.deliveries()] == ["e-2"]
    assert events.webhooks.view()[0].waiting == 1


def test_hooks_of_one_url_are_told_apart_and_no_url_is_in_a_name() -> None:
    names = webhooks.names_of([hook("http://host/key"), hook("http://host/key"), hook("http://host/other")])

    assert len(set(names)) == 3 and not any("host" in name or "key" in name for name in names)


async def test_a_gateway_killed_between_event_and_delivery_sends_it_after_its_restart(
    settings: GatewaySettings, tmp_path: Path
) -> None:
    process = GatewayProcess(settings)
    async with receiver(replies(503, 503, 503)) as (url, refused):
        port = int(url.split(":")[2].split("/")[0])
        hooks = {"webhooks": [{"url": url, "events": ["experiment_created"], "secret": SECRET}]}
        (tmp_path / "hooks.yaml").write_text(json.dumps(hooks))
        process.environment["FLOTILLA_WEBHOOKS"] = str(tmp_path / "hooks.yaml")
        process.start()
        async with GatewayClient(process.url, TOKEN) as client:
            await process.ready(client)
            await client.call("POST", "/v1/experiments", body=a_spec(tmp_path), deadline_seconds=20.0)
            await until(lambda: bool(refused.requests))
            process.end(signal.SIGKILL)

    async with receiver(replies(200), port) as (_, seen):
        process.start()
        try:
            await until(lambda: bool(seen.requests), 60)
            async with GatewayClient(process.url, TOKEN) as client:

                async def view() -> Any:
                    (found,) = (await client.call("GET", "/v1/webhooks"))["items"]
                    return found if found["delivered"] else None

                found = await waiting_for(view)
        finally:
            assert process.end(signal.SIGTERM) == 0
    assert (found["delivered"], found["waiting"], len(seen.requests)) == (1, 0, 1)
    assert seen.requests[0][0]["webhook-id"] == refused.requests[0][0]["webhook-id"]
    assert seen.requests[0][1] == refused.requests[0][1]

    async with receiver(replies(200), port) as (_, none):
        process.start()
        async with GatewayClient(process.url, TOKEN) as client:
            await process.ready(client)
            (found,) = (await client.call("GET", "/v1/webhooks"))["items"]
        assert process.end(signal.SIGTERM) == 0
    assert found["waiting"] == 0 and none.requests == [], "a delivery that succeeded is not repeated"


async def test_an_address_that_is_neither_public_nor_named_is_not_connected_to() -> None:
    async with receiver(replies(200)) as (url, seen), told(hook(url), networks=()) as events:
        await events.append("e-1", "stalled")
        await until(lambda: events.webhooks.view()[0].failed == 1)
        (view,) = events.webhooks.view()

    assert seen.requests == []
    assert "neither public nor in a network" in str(view.last_error)


async def test_an_error_that_nobody_expected_ends_one_delivery_and_no_hook() -> None:
    # Validation refuses such a URL: this one stands for what it does not foresee.
    broken = hook("http://127.0.0.1/key").model_copy(update={"url": "http://127.0.0.1:port/key"})
    async with receiver(replies(200)) as (url, _), told(broken, hook(url)) as events:
        for number in (1, 2):
            await events.append("e-1", "checkpoint", step=number)
            await until(
                lambda number=number: [view.failed + view.delivered for view in events.webhooks.view()] == [number] * 2  # type: ignore[misc]
            )
        view, _ = events.webhooks.view()

    assert view.waiting == 0 and view.delivered == 0
    assert view.last_error is not None and "InvalidURL" in view.last_error and "key" not in view.last_error


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
