"""The load of a soak: honest graders at a steady rate, and hostile programs, graders and clients without a pause."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx

from benchmarks.soak_report import Report, Window
from services.reward.remote import RemoteVerifier
from services.reward.verifiers.code import CodeVerifier
from shared.config.reward import CodeConfig, RemoteConfig
from shared.schemas.grading import Grade, GradeStatus, GradingSample
from tests.integration.sandbox.attacks import SIMPLE
from tests.integration.sandbox.campaign import PROGRAMS
from tests.integration.sandbox.poison import POISONS

HONEST_PAUSE_SECONDS = 0.5
"""Honest graders ask at this rate, whatever the answers take, as a training run's would."""
MOST_WAITING = 16
"""Of a kind; while so many wait for an answer none is asked for."""
MOST_FAILURES = 50
RIGHT = "n = int(input())\nprint(sum(i * i for i in range(n)))"
WRONG = "print(int(input()) + 1)"
NUMBERS = (30_000, 20_000)
LABEL = json.dumps(
    {
        "inputs": [f"{number}\n" for number in NUMBERS],
        "outputs": [f"{sum(i * i for i in range(number))}\n" for number in NUMBERS],
    }
)
ATTACKS = [*PROGRAMS.values(), *POISONS.values(), *(attack.code for attack in SIMPLE)]
REPLIES = (
    b'{"grades": [{"reward": ' + b"9" * 400 + b"}]}",
    b"[" * 20_000,
    b'{"grades": [{"status": "error", "reason": "\\ud800"}]}',
    b'{"grades": [{"reward": NaN}]}',
    b'{"grades": []}',
    b"\xff" * 100_000,
    b"",
)
"""What hostile graders answer."""
REQUESTS = (
    b'POST /v1/experiments HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"name": ',
    b"GET /v1/services?limit=" + b"9" * 4000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000,
    b"\x00\xff" * 5000,
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xed\xa0\x80\r\n\r\n",
    b"POST /run_code HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 9999999999\r\n\r\n",
)
"""What hostile clients send to the gateway and to the sandbox."""


@dataclass(frozen=True)
class Targets:
    """Whom the load meets.

    Attributes:
        gateway, sandbox: their URLs.
        token: the operator's, which the sandbox lets in.
        grader: URL of a grader that answers right under ``/honest`` and anything under ``/hostile``.
    """

    gateway: str
    sandbox: str
    token: str
    grader: str


class Load:
    """Honest and hostile lanes, which count in the window that is set.

    Args:
        targets: whom it meets.
        report: where grades that are wrong or missing are noted.
    """

    def __init__(self, targets: Targets, report: Report) -> None:
        self.window = Window(is_hostile=False)
        self._targets = targets
        self._report = report
        config = CodeConfig(run_timeout_seconds=2.0)
        client = _client()
        client.event_hooks["response"].append(self._look)
        self._code = CodeVerifier(config, client, targets.sandbox, targets.token)
        self._honest = self._remote("honest")
        self._hostile = self._remote("hostile")
        self._number = 0

    async def honest(self) -> None:
        """Ask honest graders at a steady rate until it is cancelled."""
        async with asyncio.TaskGroup() as asked:
            asked.create_task(self._steadily(self._grade_programs))
            asked.create_task(self._steadily(self._ask_grader))

    async def _steadily(self, ask: Callable[[], Coroutine[None, None, None]]) -> None:
        """Ask at the steady rate until it is cancelled."""
        waiting: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as asked:
            while True:
                if len(waiting) < MOST_WAITING:
                    task = asked.create_task(ask())
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
                await asyncio.sleep(HONEST_PAUSE_SECONDS)

    async def hostile(self, programs: int) -> None:
        """Do what hostile neighbours do, without a pause, until it is cancelled."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(programs):
                lanes.create_task(self._programs())
            lanes.create_task(self._replies())
            for url in (self._targets.gateway, self._targets.sandbox):
                lanes.create_task(self._requests(url))

    async def close(self) -> None:
        """Close the connections."""
        for verifier in (self._code, self._honest, self._hostile):
            await verifier.aclose()

    async def _grade_programs(self) -> None:
        samples = [self._sample(f"```python\n{code}\n```", LABEL) for code in (RIGHT, WRONG)]
        if self._note(await self._code.score(samples), (1.0, 0.0), "program"):
            self.window.gradings += 1

    async def _ask_grader(self) -> None:
        if self._note(await self._honest.score([self._sample("x" * 10, None)]), (10.0,), "grader"):
            self.window.answers += 1

    async def _look(self, answer: httpx.Response) -> None:
        """Keep what the sandbox said of an honest program that did not end well: all of them do, right or wrong."""
        if b'"status":"Success"' not in await answer.aread() and len(self._report.failures) < MOST_FAILURES:
            self._report.failures.append(answer.text[:1000])

    def _note(self, grades: list[Grade], expected: tuple[float, ...], what: str) -> bool:
        """Hold grades against the right ones; True if all are."""
        is_right = True
        for grade, right in zip(grades, expected, strict=True):
            if grade.status is not GradeStatus.SCORED:
                reason = f"{what}: {grade.reason}"[:200]
                self._report.absent[reason] = self._report.absent.get(reason, 0) + 1
                is_right = False
            elif grade.reward != right:
                self._report.false_grades.append(f"{what}: {right} was graded {grade}"[:500])
                is_right = False
        return is_right

    async def _programs(self) -> None:
        async with _client() as client:
            while True:
                body = {"code": random.choice(ATTACKS), "language": "python", "run_timeout": 5}
                with suppress(httpx.HTTPError):
                    answer = await client.post(
                        f"{self._targets.sandbox}/run_code",
                        json=body,
                        headers={"Authorization": f"Bearer {self._targets.token}"},
                        timeout=200,
                    )
                    if answer.status_code == HTTPStatus.OK and "BREACH" in (
                        (answer.json().get("run_result") or {}).get("stdout") or ""
                    ):
                        self._report.rewarded.append(f"{body['code'][:200]}: {answer.text[:300]}")
                    self.window.programs += 1

    async def _replies(self) -> None:
        while True:
            (grade,) = await self._hostile.score([self._sample("y", None)])
            if grade.status is GradeStatus.SCORED:
                self._report.rewarded.append(f"a hostile reply became {grade}"[:500])
            self.window.replies += 1
            await asyncio.sleep(0.05)

    async def _requests(self, url: str) -> None:
        address = urlsplit(url)
        while True:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                    writer.write(random.choice(REQUESTS))
                    with suppress(ConnectionError):
                        await writer.drain()
                    writer.close()
            self.window.requests += 1
            await asyncio.sleep(0.05)

    def _remote(self, path: str) -> RemoteVerifier:
        config = RemoteConfig(
            url=f"{self._targets.grader}/{path}",
            allow_private=True,
            deadline_seconds=20,
            attempt_seconds=5,
            max_attempts=2,
        )
        return RemoteVerifier(config, "soak", _client())

    def _sample(self, response: str, label: str | None) -> GradingSample:
        self._number += 1
        return GradingSample(id=f"{self._number}/0", prompt="p", response=response, label=label)


def grader_answer(path: str, body: bytes) -> bytes:
    """Answer as the soak's grader: an honest one gives each sample the length of its response."""
    if path.endswith("hostile"):
        return random.choice(REPLIES)
    request = json.loads(body)
    grades = [{"status": "scored", "reward": float(len(sample["response"]))} for sample in request["samples"]]
    return json.dumps({"id": request["id"], "grades": grades}).encode()


async def serve_grader(answer: Callable[[str, bytes], bytes] = grader_answer) -> asyncio.Server:
    """Serve the grader on a free port of the loopback interface."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0]))
            content = answer(head[0].split()[1], body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
            writer.write(f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()
        writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=None)
