"""Calls have a deadline, retries stay within it, problems come back as the same exceptions."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from flotilla.shared.errors import ActionNotAllowed, DeadlineExceeded, FlotillaError, InvalidSpec, Unavailable
from flotilla.shared.net.client.client import GatewayClient, problem_to_error
from flotilla.shared.net.server.serving import problem_response


def a_client(handler: httpx.MockTransport) -> GatewayClient:
    return GatewayClient("http://gateway", "secret-token", transport=handler)


async def test_a_call_bears_the_token_and_a_post_an_idempotency_key() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"fine": True})

    async with a_client(httpx.MockTransport(answer)) as client:
        assert await client.call("POST", "/v1/things", body={"a": 1}) == {"fine": True}

    assert seen[0].headers["Authorization"] == "Bearer secret-token"
    assert len(seen[0].headers["Idempotency-Key"]) == 32


async def test_a_retried_post_keeps_its_idempotency_key() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            raise httpx.ConnectError("refused")
        return httpx.Response(201, json=1)

    async with a_client(httpx.MockTransport(answer)) as client:
        await client.call("POST", "/v1/things", deadline_seconds=5)

    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_an_unreachable_gateway_is_unavailable_within_the_deadline() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with a_client(httpx.MockTransport(refuse)) as client:
        with pytest.raises(Unavailable, match="http://gateway"):
            await client.call("GET", "/v1/things", deadline_seconds=0.05)


async def test_a_refusal_is_not_repeated() -> None:
    calls = 0

    def conflict(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return httpx.Response(409, content=problem_response(ActionNotAllowed("no", state="draft")).body)

    async with a_client(httpx.MockTransport(conflict)) as client:
        with pytest.raises(ActionNotAllowed) as caught:
            await client.call("POST", "/v1/things")

    assert calls == 1
    assert caught.value.context == {"state": "draft"}


def test_a_problem_document_round_trips() -> None:
    error = InvalidSpec("bad", errors=[{"path": "a.b", "value": 3, "allowed": "a string"}])

    read = problem_to_error(422, bytes(problem_response(error).body))

    assert type(read) is InvalidSpec
    assert (read.detail, read.errors) == ("bad", error.errors)


@pytest.mark.parametrize(("status", "kind"), [(502, Unavailable), (504, DeadlineExceeded), (500, FlotillaError)])
def test_an_answer_that_is_no_problem_document_still_becomes_an_error(status: int, kind: type[FlotillaError]) -> None:
    assert type(problem_to_error(status, b"<html>proxy</html>")) is kind


@pytest.mark.parametrize("body", [b"<html>\n  Not   Found", b'{"detail": "Not Found"}'])
async def test_who_answers_and_is_no_gateway_is_named(body: bytes) -> None:
    other = httpx.MockTransport(lambda request: httpx.Response(404, content=body))

    async with a_client(other) as client:
        with pytest.raises(FlotillaError, match="Not Found") as caught:
            await client.call("GET", "/v1/fleet")

    said = "GET http://gateway/v1/fleet was not answered by a Flotilla server: HTTP 404: "
    assert caught.value.detail.startswith(said)


async def test_an_answer_that_is_no_json_is_waited_out_and_named() -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(200, html="<html>soon again</html>"))

    async with a_client(page) as client:
        with pytest.raises(
            Unavailable, match="not answered by a Flotilla server: text/html; charset=utf-8 in place of JSON"
        ):
            await client.call("GET", "/v1/fleet", deadline_seconds=0.05)


def test_a_code_of_a_newer_server_becomes_the_base_error() -> None:
    error = problem_to_error(418, json.dumps({"code": "teapot", "detail": "short and stout"}).encode())

    assert type(error) is FlotillaError
    assert error.detail == "short and stout"


async def test_an_answer_that_drips_in_does_not_outlast_the_deadline() -> None:
    """httpx limits each read alone, so a server that sends a byte now and then would be waited for without end."""

    async def drip(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        return httpx.Response(200)

    async with a_client(httpx.MockTransport(drip)) as client:
        with pytest.raises(DeadlineExceeded):
            await client.call("GET", "/v1/things", deadline_seconds=0.03)


def a_group_of_gateways(asked: list[str], leads: str, *, hint: str | None = None) -> httpx.MockTransport:
    """Gateways of which one leads, one cannot be reached, and the others are standbys that name a leader."""

    def answer(request: httpx.Request) -> httpx.Response:
        host = request.url.host
        asked.append(host)
        if host == "gone":
            raise httpx.ConnectError("no route", request=request)
        if host == leads:
            return httpx.Response(200, json={"from": host})
        problem = {"code": "not_leading", "detail": "a standby"} | ({"leader": hint} if hint else {})
        return httpx.Response(503, json=problem)

    return httpx.MockTransport(answer)


async def test_of_several_gateways_the_one_that_leads_is_found_and_kept() -> None:
    asked: list[str] = []
    transport = a_group_of_gateways(asked, "third")
    async with GatewayClient("http://gone,http://second/, http://third", "t", transport=transport) as client:
        answers = [await client.call("GET", "/v1/fleet") for _ in range(2)]

        assert answers == [{"from": "third"}] * 2
        assert (asked, client.base_url) == (["gone", "second", "third", "third"], "http://third")


@pytest.mark.parametrize(("hint", "expected"), [("http://c", ["a", "c"]), ("http://elsewhere", ["a", "b", "c"])])
async def test_a_standby_is_believed_only_in_the_name_of_a_gateway_that_was_listed(
    hint: str, expected: list[str]
) -> None:
    asked: list[str] = []
    transport = a_group_of_gateways(asked, "c", hint=hint)
    async with GatewayClient("http://a,http://b,http://c", "t", transport=transport) as client:
        await client.call("GET", "/v1/fleet")

    assert asked == expected


class Dripping(httpx.AsyncByteStream):
    """An answer whose bytes come one after the other, and then no more."""

    def __init__(self, pauses: list[float]) -> None:
        self._pauses = pauses

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for pause in self._pauses:
            await asyncio.sleep(pause)
            yield b" "
        yield b"1"


async def test_of_several_gateways_one_is_waited_for_while_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.shared.net.client.client.HUNG_SECONDS", 0.05)
    limits: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"])
        return httpx.Response(200, stream=Dripping([0.03] * 5))

    async with GatewayClient("http://a,http://b", "t", transport=httpx.MockTransport(answer)) as client:
        assert await client.call("GET", "/v1/fleet", deadline_seconds=20) == 1
        with pytest.raises(DeadlineExceeded):
            await client.call("GET", "/v1/fleet", deadline_seconds=0.1)

    assert limits[0]["read"] == 0.05, "so long it may send nothing"
    assert len(limits) >= 2


class OneWay:
    """A server of kept connections; while it is ``cut``, requests arrive and their answers are lost."""

    def __init__(self) -> None:
        self.connections = 0
        self.asked_on: list[int] = []
        self.is_cut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = self.connections
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked_on.append(own)
                # So that calls that are made together have connections of their own.
                await asyncio.sleep(0.05)
                if not self.is_cut:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
                    await writer.drain()
        writer.close()


async def test_after_a_call_without_an_answer_no_connection_of_before_is_used() -> None:
    """Where a network carries one way only, each kept one would let the gateway hear who hears nothing."""
    server = OneWay()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with GatewayClient(f"http://127.0.0.1:{port}", "t") as client:
            await asyncio.gather(*(client.call("GET", "/v1/fleet") for _ in range(3)))
            assert sorted(server.asked_on) == [0, 1, 2]
            server.is_cut = True
            for _ in range(2):
                with pytest.raises(DeadlineExceeded):
                    await client.call("GET", "/v1/fleet", deadline_seconds=0.3)
            server.is_cut = False
            lost = server.asked_on[3:]

            await client.call("GET", "/v1/fleet")
            again = server.asked_on[3 + len(lost) :]
            await client.call("GET", "/v1/fleet")

    assert lost[0] in {0, 1, 2}, "nothing was wrong with it before"
    assert set(lost[1:] + again).isdisjoint({0, 1, 2}), server.asked_on
    assert [server.asked_on[-1]] == again, "what was answered is kept, and nothing of before"


async def test_a_call_that_fails_ends_none_that_is_under_way_and_all_connections_are_closed() -> None:
    asked = list[str]()
    is_failed = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Authorization"])
        if request.url.path == "/fails":
            raise httpx.ReadError("broken off", request=request)
        if request.url.path == "/waits":
            await is_failed.wait()
        return httpx.Response(200, json=request.url.path)

    client = a_client(httpx.MockTransport(answer))
    async with client:
        client.adopt("a-pass")
        before = client._https[0]
        waiting = asyncio.create_task(client.call("GET", "/waits"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await client.call("GET", "/fails", deadline_seconds=0.01)
        assert not before.is_closed
        is_failed.set()

        assert await waiting == "/waits"
        assert before.is_closed
        assert await client.call("GET", "/after") == "/after"
        after = client._https[0]

    assert after.is_closed and not client._lent
    assert set(asked) == {"Bearer a-pass"}
