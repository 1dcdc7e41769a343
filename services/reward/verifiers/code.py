"""A program that must pass test cases, run by the sandbox.

Only the sandbox runs the program. What goes wrong in the sandbox, or on the way to it, is an error of the sample and
never a failed test case.

A label is JSON in one of these forms::

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}              given on stdin, compared with stdout
    [{"stdin": "1 2\\n", "stdout": "3\\n"}]                  the same
    {"assert_case": ["assert add(1, 2) == 3"]}              what holds of the program's functions (Python only)

Source: the first and the last form are verl's.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import httpx
from pydantic import ValidationError

from flotilla.services.reward.grader_call import ASKS_FOR_PAUSE, Reachability, Retryable
from flotilla.services.reward.verifiers.assertions.rounds import Assertions
from flotilla.services.reward.verifiers.base import NO_LABEL
from flotilla.shared.config.sections.reward import CodeConfig
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.retry import OTHERS_FIRST_PAUSE_SECONDS, OTHERS_LONGEST_PAUSE_SECONDS, Backoff, retry
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.sandbox import (
    EXPERIMENT_HEADER,
    CommandStatus,
    RunCodeRequest,
    RunCodeResponse,
    RunStatus,
    is_image,
)
from flotilla.shared.schemas.service import SANDBOX, Failure

OPENING = re.compile(r"[ \t]*```[ \t]*([\w+#.-]*)")
ALIASES = {
    "python": {"python", "py", "python3"},
    "javascript": {"javascript", "js", "node", "nodejs"},
    "nodejs": {"javascript", "js", "node", "nodejs"},
    "cpp": {"cpp", "c++", "cc", "cxx"},
    "bash": {"bash", "sh", "shell"},
}
RETRIED_STATUSES = {429, 502, 503, 504}
ATTEMPTS = 4
QUEUE_SECONDS = 60.0
"""How long a call may wait in the sandbox's queue, beyond the time of the program itself."""
EXTENSION_SECONDS = 60.0
"""How much longer a command may take on a busy machine: the sandbox does not count what it waits for a processor."""


@dataclass(frozen=True)
class Case:
    """One test: the program's input and its expected output, or statements about its functions."""

    stdin: str = ""
    expected: str = ""
    statements: str | None = None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """List the fenced blocks of a text as (language word, content); one that is never closed is none.

    Line by line: an answer that repeats itself has thousands of openings, and a pattern would look for the end of each.
    """
    blocks = []
    word: str | None = None
    content: list[str] = []
    for line in text.splitlines(keepends=True):
        if word is None:
            opening = OPENING.match(line)
            if opening is not None:
                word, content = opening[1].lower(), []
        elif line.strip() == "```":
            blocks.append((word, "".join(content)))
            word = None
        else:
            content.append(line)
    return blocks


def extract_program(response: str, language: str) -> str | None:
    """Take the program out of an answer: the last fenced block in ``language``, else the last fenced block."""
    blocks = fenced_blocks(response)
    names = ALIASES.get(language, {language})
    chosen = [content for word, content in blocks if word in names] or [content for _, content in blocks]
    return chosen[-1] if chosen else None


def parse_cases(label: str, language: str) -> list[Case]:
    """Read the test cases of a label.

    Raises:
        ValueError: the label is not JSON in one of the forms that the module names, or has no case.
    """
    given = json.loads(label)
    if isinstance(given, list):
        cases = [Case(stdin=_text(case, "stdin"), expected=_text(case, "stdout")) for case in given]
    elif isinstance(given, Mapping) and given.get("fn_name"):
        raise ValueError("cases that call a function by name (fn_name) are not supported; use assert_case")
    elif isinstance(given, Mapping) and "assert_case" in given:
        if language != "python":
            raise ValueError(f"assert_case is for python, not {language}")
        cases = [Case(statements=str(line)) for line in given["assert_case"]]
    elif isinstance(given, Mapping) and "inputs" in given and "outputs" in given:
        if len(given["inputs"]) != len(given["outputs"]):
            raise ValueError(f"{len(given['inputs'])} inputs do not go with {len(given['outputs'])} outputs")
        cases = [
            Case(str(stdin), str(expected)) for stdin, expected in zip(given["inputs"], given["outputs"], strict=True)
        ]
    else:
        raise ValueError("it has neither inputs and outputs, nor assert_case, nor is it a list of cases")
    if not cases:
        raise ValueError("it has no test case")
    return cases


def _text(case: object, key: str) -> str:
    if not isinstance(case, Mapping) or not isinstance(case.get(key), str):
        raise ValueError(f"a test case has no text {key!r}")  # noqa: TRY004  the label's content is wrong, not a type
    return str(case[key])


def is_same_output(given: str, expected: str) -> bool:
    """Compare line by line, without regard to white space at line ends and empty lines at the end."""
    return _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class CodeVerifier:
    """Grades programs through the sandbox.

    Args:
        config: the component's section.
        client: closed by this object.
        url: base URL of the sandbox service.
        token: the sandbox's bearer token; None for a server that takes none, such as SandboxFusion's.
        experiment: id of the experiment; its programs wait for each other's turns.
        backoff_seconds: the first pause between attempts; it doubles.
    """

    def __init__(
        self,
        config: CodeConfig,
        client: httpx.AsyncClient,
        url: str,
        token: str | None,
        *,
        experiment: str = "",
        backoff_seconds: float = OTHERS_FIRST_PAUSE_SECONDS,
    ) -> None:
        self._config = config
        self._client = client
        self._url = url.rstrip("/") + "/run_code"
        self._headers = {EXPERIMENT_HEADER: experiment} if experiment else {}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._backoff_seconds = backoff_seconds
        self._reachability = Reachability(SANDBOX)
        self._assertions = Assertions()
        self._slots = asyncio.Semaphore(config.concurrency)

    @property
    def problem(self) -> Failure | None:
        """The sandbox, where it did not answer when it was last asked."""
        return self._reachability.problem

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by its test cases; an answer without a fenced program gets 0."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """Close the connections to the sandbox."""
        await self._client.aclose()

    async def _grade(self, sample: GradingSample) -> Grade:
        if sample.label is None:
            return Grade.error(NO_LABEL)
        try:
            cases = parse_cases(sample.label, self._config.language)[: self._config.max_cases]
        except ValueError as error:
            return Grade.error(f"the label holds no test cases: {error}"[:500])
        image = None
        if (column := self._config.image_column) is not None:
            named = sample.metadata.get(column)
            if not isinstance(named, str) or not named:
                return Grade.error(f"the row has no text in {column!r}, which image_column names")
            if not is_image(named):
                return Grade.error(f"the row names no image in {column!r}, but {named[:100]!r}")
            image = named
        program = extract_program(sample.response, self._config.language)
        if program is None:
            return Grade.scored(0.0, metrics={"has_program": 0.0})
        failures: list[str] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._passes(program, case, image)) for case in cases]
        except* GradingFailed as failed:
            failures = [str(error) for error in failed.exceptions]
        if failures:
            return Grade.error(failures[0])
        passed = sum(task.result() for task in tasks)
        fraction = passed / len(cases)
        reward = fraction if self._config.reward == "fraction" else float(passed == len(cases))
        return Grade.scored(reward, metrics={"has_program": 1.0, "cases_passed": fraction, "cases": float(len(cases))})

    async def _passes(self, program: str, case: Case, image: str | None) -> bool:
        if case.statements is not None:
            return await self._assertions.hold(program, case.statements, partial(self._output, image=image))
        answer = await self._run(program, case.stdin, image)
        result = answer.run_result
        if answer.status is not RunStatus.SUCCESS or result is None or result.status is not CommandStatus.FINISHED:
            return False
        return is_same_output(result.stdout or "", case.expected)

    async def _output(self, program: str, stdin: str, *, image: str | None = None) -> str | None:
        """Run a program and return what it printed, however it ended."""
        result = (await self._run(program, stdin, image)).run_result
        return None if result is None else result.stdout

    async def _run(self, program: str, stdin: str, image: str | None) -> RunCodeResponse:
        """Have the sandbox run a program.

        Raises:
            GradingFailed: the sandbox does not answer, or could not run it.
        """
        async with self._slots:
            answer = await self._ask(program, stdin, image)
        if answer.status is RunStatus.SANDBOX_ERROR:
            raise GradingFailed(f"the sandbox failed: {answer.message}"[:500])
        return answer

    async def _ask(self, program: str, stdin: str, image: str | None) -> RunCodeResponse:
        config = self._config
        request = RunCodeRequest(
            code=program,
            language=config.language,
            stdin=stdin,
            compile_timeout=config.compile_timeout_seconds,
            run_timeout=config.run_timeout_seconds,
            image=image,
        )
        # A server that is not ours knows no image.
        body = request.model_dump(mode="json", exclude={"image"} if image is None else None)
        limit_seconds = config.compile_timeout_seconds + config.run_timeout_seconds
        attempt_seconds = limit_seconds + 2 * EXTENSION_SECONDS + QUEUE_SECONDS
        attempts = 0

        async def attempt() -> httpx.Response:
            nonlocal attempts
            attempts += 1
            with self._reachability.asking(self._url):
                return await self._post(body, attempt_seconds)

        reply = await retry(
            attempt,
            waiting_for="sandbox",
            backoff=Backoff(self._backoff_seconds, OTHERS_LONGEST_PAUSE_SECONDS),
            is_retryable=lambda error: isinstance(error, Retryable) and attempts < ATTEMPTS,
        )
        if reply.status_code != 200:
            raise GradingFailed(f"the sandbox refused the program with {reply.status_code}: {reply.text[:300]}")
        try:
            return RunCodeResponse.model_validate_json(reply.content)
        except ValidationError as error:
            raise GradingFailed(f"the sandbox's answer cannot be read: {error.errors()[0]['msg']}") from error

    async def _post(self, body: object, seconds: float) -> httpx.Response:
        try:
            async with asyncio.timeout(seconds):
                reply = await self._client.post(
                    self._url, json=body, headers=self._headers, timeout=seconds, follow_redirects=False
                )
        except (httpx.HTTPError, TimeoutError) as error:
            raise Retryable(f"the sandbox does not answer: {error!r}") from error
        if reply.status_code in RETRIED_STATUSES:
            detail = f"the sandbox answered {reply.status_code}: {reply.text[:200]}"
            raise Retryable(detail, is_outage=reply.status_code != ASKS_FOR_PAUSE, answered=reply.status_code)
        return reply
