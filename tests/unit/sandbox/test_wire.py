"""A provider's calls: repeated where that does no harm, bounded, and told by their cause without what they showed."""

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from flotilla.services.sandbox.providers import wire
from flotilla.services.sandbox.providers.base import Cause, ProviderFailed
from flotilla.services.sandbox.providers.e2b import _Messages
from flotilla.services.sandbox.providers.wire import Wire

KEY = "key-that-nobody-may-see"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "DEADLINE_SECONDS", 0.5)
    monkeypatch.setattr(wire, "CALL_SECONDS", 0.2)


class Answering(httpx.AsyncBaseTransport):
    """Gives one answer after the other: a status with a body, an error, or a hang."""

    def __init__(self, *answers: tuple[int, str, dict[str, str]] | Exception | None) -> None:
        self.answers, self.num_calls = list(answers), 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_calls += 1
        assert request.headers["x-key"] == KEY
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(60.0)
            raise AssertionError
        status, text, headers = answer
        return httpx.Response(status, headers=headers, stream=_Whole(text.encode()))


class _Whole(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


def asking(transport: Answering) -> Wire:
    return Wire("there", "http://there", lambda: {"x-key": KEY}, transport=transport)


FINE: tuple[int, str, dict[str, str]] = (200, "{}", {})


@pytest.mark.parametrize(
    ("first", "is_repeatable", "num_calls"),
    [
        ((500, "no", {}), True, 2),
        ((500, "no", {}), False, 1),
        ((502, "no", {}), False, 1),
        ((429, "later", {}), False, 2),
        ((503, "later", {"retry-after": "0"}), True, 2),
        (httpx.ConnectError("refused"), False, 2),
        (httpx.ReadError("broken"), False, 1),
        (httpx.ReadError("broken"), True, 2),
        ((400, "wrong", {}), True, 1),
    ],
)
async def test_a_call_is_made_again_where_it_did_nothing_or_may_be_made_twice(
    first: tuple[int, str, dict[str, str]] | Exception, is_repeatable: bool, num_calls: int
) -> None:
    transport = Answering(first, FINE)

    try:
        await asking(transport).ask("POST", "/x", is_repeatable=is_repeatable)
        is_answered = True
    except ProviderFailed:
        is_answered = False

    assert transport.num_calls == num_calls
    assert is_answered == (num_calls == 2)


@pytest.mark.parametrize(
    ("answer", "cause", "words"),
    [
        ((500, "out of order", {}), Cause.FAILED, "there answered 500: out of order"),
        ((429, "", {}), Cause.BUSY, "there answered 429: nothing"),
        ((503, "full", {}), Cause.BUSY, "503"),
        ((401, "who?", {}), Cause.REFUSED, "401"),
        ((404, "none", {}), Cause.LOST, "404"),
        (httpx.ConnectError("refused"), Cause.ABSENT, "cannot be reached"),
        (httpx.RemoteProtocolError("x"), Cause.FAILED, "RemoteProtocolError"),
        (None, Cause.LATE, "within 0.2 s"),
        ((200, "x" * 50, {}), Cause.FAILED, "more than 20 bytes"),
    ],
)
async def test_a_failure_has_a_cause_a_bound_and_no_key(
    answer: tuple[int, str, dict[str, str]] | Exception | None, cause: Cause, words: str
) -> None:
    began = time.monotonic()

    with pytest.raises(ProviderFailed) as failed:
        await asking(Answering(answer)).ask("GET", "/x", max_bytes=20)

    assert failed.value.cause is cause
    assert words in failed.value.detail
    assert KEY not in f"{failed.value!r}{failed.value.__cause__!r}"
    assert time.monotonic() - began < 2.0


def envelope(text: str, flags: int = 0) -> bytes:
    return bytes([flags]) + len(text).to_bytes(4, "big") + text.encode()


def test_messages_of_a_stream_are_taken_apart_wherever_it_is_cut() -> None:
    whole = envelope('{"event": {"start": {}}}') + envelope('{"event": {"end": {}}}') + envelope("{}", 2)
    messages = _Messages()

    found = [said for number in range(len(whole)) for said in messages.fed(whole[number : number + 1])]

    assert found == [{"event": {"start": {}}}, {"event": {"end": {}}}, {}]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (envelope('{"error": {"code": "deadline_exceeded", "message": "late"}}', 2), Cause.LATE),
        (envelope('{"error": {"code": "unavailable", "message": "gone"}}', 2), Cause.FAILED),
        (envelope("{broken"), Cause.FAILED),
        (envelope("[]"), Cause.FAILED),
        (b"\0\xff\xff\xff\xff", Cause.FAILED),
    ],
)
def test_a_stream_that_ends_with_an_error_or_is_none_is_told(content: bytes, cause: Cause) -> None:
    with pytest.raises(ProviderFailed) as failed:
        _Messages().fed(content)

    assert failed.value.cause is cause
