"""A provider's calls: repeated where that does no harm, bounded, and told by their cause without what they showed."""

import asyncio
import gzip
import json
import os
import shlex
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from flotilla.services.sandbox.providers import daytona, wire
from flotilla.services.sandbox.providers.base import Box, Cause, Provider, ProviderFailed, Wanted
from flotilla.services.sandbox.providers.daytona import Daytona
from flotilla.services.sandbox.providers.docker import LAST_BYTES, Docker
from flotilla.services.sandbox.providers.e2b import E2B, _Messages
from flotilla.services.sandbox.providers.kubernetes import Kubernetes
from flotilla.services.sandbox.providers.wire import Wire, object_of
from flotilla.shared.schemas.sandbox import RunCodeRequest, SessionRequest, is_image

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
        ((302, "", {"location": "http://elsewhere/"}), Cause.FAILED, "302"),
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
        (envelope("[" * 50_000), Cause.FAILED),
        (b"\0\xff\xff\xff\xff", Cause.FAILED),
    ],
)
def test_a_stream_that_ends_with_an_error_or_is_none_is_told(content: bytes, cause: Cause) -> None:
    with pytest.raises(ProviderFailed) as failed:
        _Messages().fed(content)

    assert failed.value.cause is cause


class Saying(httpx.AsyncBaseTransport):
    """Answers all calls alike."""

    def __init__(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.content, self.status, self.headers = content, status, headers or {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(self.status, headers=self.headers, stream=_Whole(self.content))


async def test_an_answer_that_nobody_asked_to_be_packed_is_not_unpacked() -> None:
    packed = gzip.compress(bytes(64 << 20))
    wire = Wire("there", "http://there", transport=Saying(packed, headers={"content-encoding": "gzip"}))

    reply = await wire.ask("GET", "/x")

    assert reply.content == packed
    with pytest.raises(ProviderFailed, match="no JSON"):
        object_of("there", reply)


def providers_over(transport: httpx.AsyncBaseTransport) -> list[Provider]:
    return [
        Docker("http://there", "me", transport=transport),
        E2B("http://there", KEY, "me", transport=transport),
        Daytona("http://there", KEY, "me", transport=transport),
        Kubernetes("http://there", KEY, "me", transport=transport),
    ]


ODD = [
    "[" * 50_000,
    "null",
    "1",
    "[1]",
    "[null]",
    "{}",
    '[{"Id": 1}]',
    '{"items": 1}',
    '{"items": [1]}',
    '{"items": [{}]}',
    '{"items": [{"id": ""}]}',
    '{"items": [{"metadata": []}]}',
    '{"items": [], "metadata": 1}',
]


@pytest.mark.parametrize("said", ODD)
async def test_a_list_of_whatever_shape_is_read_or_is_a_failure_of_the_provider(said: str) -> None:
    for provider in providers_over(Saying(said.encode())):
        try:
            assert list(await provider.list()) == []
        except ProviderFailed as failed:
            assert failed.cause is Cause.FAILED
        await provider.close()


async def test_labels_of_strangers_may_be_anything() -> None:
    said = b'[{"Id": "a", "Labels": ["x"]}, {"Id": "b", "Labels": {"n": 1}}, {"Id": "c", "Labels": null}]'

    found = await Docker("http://there", "me", transport=Saying(said)).list()

    assert [(each.id, each.labels) for each in found] == [("a", {}), ("b", {"n": "1"}), ("c", {})]


WANTED = Wanted("b", "image", 60.0, 1 << 20, 1.0, 8, has_network=False)


@pytest.mark.parametrize(
    "said",
    [
        "[]",
        "[" * 50_000,
        '{"Id": [], "sandboxID": 1, "id": {}, "status": []}',
        '{"Id": "a\\u0000", "sandboxID": "a", "domain": ["x"], "id": "a", "state": [], "status": {"conditions": [1]}}',
        '{"Id": "a", "id": "a", "state": "started", "toolboxProxyUrl": 7, "status": {"conditions": 3}}',
    ],
)
async def test_what_is_answered_to_a_creation_is_read_or_is_a_failure_of_the_provider(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("daytona", "kubernetes"):
        monkeypatch.setattr(f"flotilla.services.sandbox.providers.{module}.START_SECONDS", 0.0)
    for provider in providers_over(Saying(said.encode())):
        try:
            await provider.create(WANTED)
        except ProviderFailed as failed:
            assert failed.cause in {Cause.FAILED, Cause.LATE}
        await provider.close()


@pytest.mark.parametrize("url", ["http://[", "http://there:x", "nowhere://x", "http://there/\n"])
async def test_an_address_that_is_none_is_a_failure_of_the_provider(url: str) -> None:
    provider = Daytona("http://there", KEY, "me", transport=Saying(b'{"state": "started"}'))

    with pytest.raises(ProviderFailed) as failed:
        await provider.execute(Box("b", "b", "image", 0.0, url), "true", 0.1)

    assert failed.value.cause is Cause.FAILED


async def test_the_progress_of_a_pull_is_not_kept_whole_and_its_last_line_counts() -> None:
    progress = b"x" * (3 * LAST_BYTES) + b'\n{"errorDetail": {}, "error": "no such image"}\n'

    with pytest.raises(ProviderFailed, match=r"could not pull 'image'.*no such image"):
        await Docker("http://there", "me", transport=Saying(progress))._pull("image")
    await Docker("http://there", "me", transport=Saying(b'{"error"\n{"status": "there"}\n'))._pull("image")


@pytest.mark.parametrize(("said", "is_lost"), [("path does not exist", False), ("The sandbox was not found", True)])
async def test_a_sandbox_of_e2b_that_is_gone_is_no_file_that_is_missing(said: str, is_lost: bool) -> None:
    transport = Saying(f'{{"message": "{said}"}}'.encode(), 404)
    reading = E2B("http://there", KEY, "me", transport=transport).read(Box("b", "b", "i", 0.0, "http://box"), "/f", 9)

    if is_lost:
        with pytest.raises(ProviderFailed) as failed:
            await reading
        assert failed.value.cause is Cause.LOST
    else:
        assert await reading is None


async def test_a_sandbox_of_daytona_without_base64_ends_as_one_in_which_nothing_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["command"])
        return httpx.Response(200, stream=_Whole(b'{"exitCode": 0}'))

    monkeypatch.setattr(daytona, "SCRIPT", str(tmp_path / "script"))
    (tmp_path / "sh").symlink_to("/bin/sh")
    provider = Daytona("http://there", KEY, "me", transport=httpx.MockTransport(answer))
    await provider.execute(Box("b", "b", "image", 0.0, "http://there/b"), "exit 7", 5.0)
    words = shlex.split(asked[0])

    codes = [subprocess.run(words, env={"PATH": path}).returncode for path in (os.environ["PATH"], str(tmp_path))]

    assert codes == [7, 127]


@pytest.mark.parametrize("image", ["swebench/x\nRUN id", "swebench/x\n", "a b", "", "x" * 501, "caf\u00e9"])
def test_an_image_is_one_word(image: str) -> None:
    """Daytona makes a line of a Dockerfile of it, in which further lines would run with a network."""
    fine = SessionRequest(image="registry.example:5000/swebench/x@sha256:00").image

    assert fine is not None and is_image(fine) and not is_image(image)
    with pytest.raises(ValidationError, match="image"):
        SessionRequest(image=image)
    with pytest.raises(ValidationError, match="image"):
        RunCodeRequest(code="", language="python", image=image)
