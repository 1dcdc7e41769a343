"""A function of the user's as a verifier, in a process of its own that knows no secret of the service.

As a program it reads JSON lines: first the verifier's section, then samples; it answers each with a grade.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from services.reward.verifiers.custom import CustomVerifier
from shared.config.reward import CustomConfig
from shared.confinement import confine
from shared.errors import FlotillaError, GradingFailed, InvalidSpec
from shared.places import Places
from shared.processes import die_with_parent, python_module, reap
from shared.schemas.grading import Grade, GradingSample
from shared.secret_variables import without_secrets

START_SECONDS = 300.0
"""A file may import much."""
MAX_LINE_BYTES = 64 * 1024 * 1024
READY = "ready"


class CustomProcessVerifier:
    """Grades by the function in a child process, all samples at once; a child that died is started again.

    Args:
        config: the file and its function.
        places: where code may be.

    Raises:
        InvalidSpec: the file is in no folder that the operator allows.
    """

    def __init__(self, config: CustomConfig, places: Places) -> None:
        places.check_code(config.path, "reward component of kind custom")
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Grade]] = {}
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start the process and let it load the function.

        Raises:
            InvalidSpec: there is no such function, or importing the file fails.
            GradingFailed: the process did not start.
        """
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            await self._end()
            environment = without_secrets(os.environ)
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            process = await asyncio.create_subprocess_exec(
                *python_module(__name__),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env=environment,
            )
            self._process = process
            try:
                async with asyncio.timeout(START_SECONDS):
                    await self._greet(process)
            except BaseException as error:
                await self._end()
                if isinstance(error, TimeoutError):
                    detail = f"{self._config.path} was not loaded within {START_SECONDS:g} s"
                    raise GradingFailed(detail) from None
                raise
            self._reading = asyncio.create_task(self._read(process), name="custom grades")

    async def _greet(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._config.model_dump_json().encode() + b"\n")
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise InvalidSpec(f"custom verifier {self._config.path!r}: its process ended while it loaded the file")
        answer = json.loads(line)
        if answer != READY:
            raise InvalidSpec(str(answer))

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Grade each sample by what the function returns; an exception is an error that names its type and line."""
        try:
            await self.start()
        except FlotillaError as error:
            return [Grade.error(error.detail)] * len(samples)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._grade(sample)) for sample in samples]
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """End the process."""
        await self._end()

    async def _grade(self, sample: GradingSample) -> Grade:
        process, number = self._process, next(self._numbers)
        if process is None or process.stdin is None:
            return Grade.error("the process of the custom function has ended")
        answer: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            line = json.dumps([number, sample.model_dump(mode="json")]).encode() + b"\n"
            if len(line) > MAX_LINE_BYTES:
                return Grade.error("the sample is too large")
            process.stdin.write(line)
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            # The function has its time in its own process; what exceeds this has not even been answered there.
            async with asyncio.timeout(self._config.timeout_seconds + START_SECONDS):
                return await answer
        except TimeoutError:
            return Grade.error("the process of the custom function does not answer")
        finally:
            self._waiting.pop(number, None)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                number, grade = json.loads(line)
                if (answer := self._waiting.get(number)) is not None and not answer.done():
                    answer.set_result(Grade.model_validate(grade))
        except (ValueError, TypeError, ValidationError):
            pass  # it wrote what is no answer: it is not trusted to write another
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await reap(process)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(Grade.error(f"the process of the custom function ended with code {code}"))

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await reap(process)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None


async def _serve(lines: asyncio.StreamReader, answers: Any) -> None:
    config = CustomConfig.model_validate_json(await lines.readline())
    try:
        verifier = CustomVerifier(config)
    except InvalidSpec as error:
        answers.write(json.dumps(error.detail) + "\n")
        return
    answers.write(json.dumps(READY) + "\n")
    grading: set[asyncio.Task[None]] = set()

    async def grade(number: int, sample: GradingSample) -> None:
        (found,) = await verifier.score([sample])
        answers.write(json.dumps([number, found.model_dump(mode="json")]) + "\n")

    while line := await lines.readline():
        number, sample = json.loads(line)
        task = asyncio.create_task(grade(number, GradingSample.model_validate(sample)))
        grading.add(task)
        task.add_done_callback(grading.discard)


async def _main() -> None:
    # What the user's code prints goes to standard error, where the service's log is.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        await _serve(lines, answers)


if __name__ == "__main__":
    die_with_parent()
    confine()
    asyncio.run(_main())
