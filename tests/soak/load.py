"""The honest load of a soak, programs to grade and a grader to ask at a steady rate; and the replies of a hostile one.

A service that grades reads the replies of hostile graders itself, so that is done here, beside the honest ones.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from flotilla.services.reward.remote import RemoteVerifier
from flotilla.services.reward.verifiers.code import CodeVerifier
from flotilla.shared.config.sections.reward import CodeConfig, RemoteConfig
from flotilla.shared.schemas.grading import Grade, GradeStatus, GradingSample
from tests.soak.hostile import HostileProcess
from tests.soak.http import new_client
from tests.soak.report import Report, Window

HONEST_PAUSE_SECONDS = 0.5
"""Honest graders ask at this rate, whatever the answers take, as a training run's would."""
HOSTILE_PAUSE_SECONDS = 0.05
MOST_WAITING = 16
"""Of a kind; while so many wait for an answer none is asked for."""
MOST_FAILURES = 50
LOOK_SECONDS = 0.1
RIGHT = "n = int(input())\nprint(sum(i * i for i in range(n)))"
WRONG = "print(int(input()) + 1)"
NUMBERS = (30_000, 20_000)
LABEL = json.dumps(
    {
        "inputs": [f"{number}\n" for number in NUMBERS],
        "outputs": [f"{sum(i * i for i in range(number))}\n" for number in NUMBERS],
    }
)


@dataclass(frozen=True)
class Targets:
    """Whom the load meets.

    Attributes:
        sandbox: its URL.
        token: the operator's, which the sandbox lets in.
        grader: URL of a grader that answers right.
        neighbours: who is hostile.
        asks_hostile: whether their grader is asked.
    """

    sandbox: str
    token: str
    grader: str
    neighbours: HostileProcess
    asks_hostile: bool = True


class Load:
    """What is asked, and counted in the window that is set.

    Args:
        targets: whom it meets.
        report: where grades that are wrong or missing are noted.
    """

    def __init__(self, targets: Targets, report: Report) -> None:
        self.window = Window(is_hostile=False)
        self._neighbours = targets.neighbours
        self._sandbox = targets.sandbox
        self._asks_hostile = targets.asks_hostile
        self._report = report
        config = CodeConfig(run_timeout_seconds=2.0)
        client = new_client()
        client.event_hooks["response"].append(self._look)
        self._code = CodeVerifier(config, client, targets.sandbox, targets.token, experiment="honest")
        self._honest = _remote(targets.grader)
        self._hostile = _remote(targets.neighbours.grader)
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

    @asynccontextmanager
    async def beside_neighbours(self, window: Window) -> AsyncIterator[None]:
        """Let the neighbours be hostile while the block runs, if the window is, and count what they did."""
        if not window.is_hostile:
            yield
            return
        await self._neighbours.begin()
        replies = asyncio.create_task(self._replies())
        try:
            yield
        finally:
            replies.cancel()
            await asyncio.wait([replies])
            done = await self._neighbours.end()
            window.programs, window.requests = done.programs, done.requests
            self._report.rewarded += done.breaches

    async def left_alone(self, seconds: float) -> None:
        """Wait until the sandbox runs nothing, as it does now and then when all that it runs is honest.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(seconds), new_client() as client:
            while True:
                lines = (await client.get(f"{self._sandbox}/metrics")).text.splitlines()
                if {"flotilla_sandbox_running 0.0", "flotilla_sandbox_waiting 0.0"} <= set(lines):
                    return
                await asyncio.sleep(LOOK_SECONDS)

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

    async def _replies(self) -> None:
        while self._asks_hostile:
            (grade,) = await self._hostile.score([self._sample("y", None)])
            if grade.status is GradeStatus.SCORED:
                self._report.rewarded.append(f"a hostile reply became {grade}"[:500])
            self.window.replies += 1
            await asyncio.sleep(HOSTILE_PAUSE_SECONDS)

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

    def _sample(self, response: str, label: str | None) -> GradingSample:
        self._number += 1
        return GradingSample(id=f"{self._number}/0", prompt="p", response=response, label=label)


def _remote(url: str) -> RemoteVerifier:
    config = RemoteConfig(url=url, allow_private=True, deadline_seconds=20, attempt_seconds=5, max_attempts=2)
    return RemoteVerifier(config, "soak", new_client())


def grader_answer(_path: str, body: bytes) -> bytes:
    """Answer as the honest grader: each sample gets the length of its response."""
    request = json.loads(body)
    grades = [{"status": "scored", "reward": float(len(sample["response"]))} for sample in request["samples"]]
    return json.dumps({"id": request["id"], "grades": grades}).encode()
