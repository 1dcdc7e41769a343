"""A process that runs somebody's code: it knows no secret of the service, and cannot look into the service's memory.

It speaks in JSON lines. The first is what to load, answered by ``{"ready": ...}`` or ``{"error": ..., "passes": ...}``;
then ``[number, content]`` is answered by ``[number, result]``, many at a time, and ``{"cancel": number}`` gives one up.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from flotilla.shared.children.confinement import confine
from flotilla.shared.children.processes import die_with_parent, kill, python_module, reap
from flotilla.shared.children.secret_variables import without_secrets
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, InvalidSpec, Unavailable, WorkerDied
from flotilla.shared.host.start_patience import start_timeout
from flotilla.shared.net.absence import absent_or, may_pass

START_SECONDS = 300.0
"""A file may import much."""
END_SECONDS = 5.0
MAX_LINE_BYTES = 64 * 1024 * 1024


class CodeProcess:
    """The service's end; a process that died is started again by the next ``start``.

    Args:
        module: its program, which calls ``serve_code``.
        opening: what it is to load, in JSON.
        what: it runs, for messages, such as ``the custom function``.
    """

    def __init__(self, module: str, opening: object, what: str) -> None:
        self._module, self._opening, self._what = module, opening, what
        self.process: asyncio.subprocess.Process | None = None
        self._about: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Calls under way."""
        return len(self._waiting)

    async def start(self) -> Any:
        """Start the process where there is none, let it load the code, and return what it says of it.

        Raises:
            InvalidSpec: the code cannot be loaded.
            WorkerDied: the process was killed meanwhile: not the code's fault.
            DeadlineExceeded: it took longer than ``START_SECONDS``, as on a busy machine.
            Unavailable: no process can be started now, or what the code needs to be loaded is absent.
        """
        async with self._starting:
            if self.process is not None and self.process.returncode is None:
                return self._about
            await self.aclose()
            environment = without_secrets(os.environ)
            try:
                process = self.process = await asyncio.create_subprocess_exec(
                    *python_module(self._module),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=MAX_LINE_BYTES,
                    env=environment,
                )
            except OSError as error:
                words = f"the process of {self._what} cannot be started: {error}"
                raise absent_or(error, WorkerDied(words)) from error
            try:
                async with start_timeout(START_SECONDS, process.pid):
                    self._about = await self._greet(process)
            except BaseException as error:
                await self.aclose()
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(f"{self._what} was not loaded within {START_SECONDS:g} s") from None
                raise
            self._reading = asyncio.create_task(self._read(process), name=self._what)
            return self._about

    async def _greet(self, process: asyncio.subprocess.Process) -> Any:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(self._opening).encode() + b"\n")
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            # Its output is closed; a process that goes on without it is of no use.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_SECONDS)
            if process.returncode == -signal.SIGKILL:
                raise WorkerDied(f"the process of {self._what} was ended by SIGKILL while it loaded the file")
            raise InvalidSpec(f"{self._what}: its process ended while it loaded the file")
        answer = json.loads(line)
        if "ready" not in answer:
            raise (Unavailable if answer["passes"] else InvalidSpec)(str(answer["error"]))
        return answer["ready"]

    async def call(self, content: object) -> Any:
        """Let the code do something; whoever stops waiting gives it up.

        Raises:
            WorkerDied: the process ended, or what is asked for is too large.
        """
        process, number = self.process, next(self._numbers)
        if process is None or process.stdin is None or process.returncode is not None:
            raise WorkerDied(f"the process of {self._what} has ended")
        line = json.dumps([number, content]).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise WorkerDied(f"what {self._what} is to be given is too large")
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(line)
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
            return await answer
        except asyncio.CancelledError:
            process.stdin.write(json.dumps({"cancel": number}).encode() + b"\n")
            raise
        finally:
            self._waiting.pop(number, None)

    async def aclose(self) -> None:
        """End the process; calls under way fail."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            kill(process)
            await reap(process)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, TypeError):  # what is no answer: it is not trusted to write another
            while line := await process.stdout.readline():
                number, result = json.loads(line)
                if (answer := self._waiting.get(number)) is not None and not answer.done():
                    answer.set_result(result)
        kill(process)
        code = await reap(process)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerDied(f"the process of {self._what} ended with code {code}"))


class Loaded(Protocol):
    """Code that was loaded, in its process."""

    @property
    def about(self) -> object:
        """What the service is told of it, in JSON."""

    def handle(self, content: Any) -> Awaitable[object]:
        """Do what a call asks for, and return the result in JSON; it raises nothing."""


def serve_code(load: Callable[[Any], Loaded]) -> None:
    """Be such a process: confined, and ended with the one that started it.

    Args:
        load: makes it of the opening; raises ``InvalidSpec`` or ``Unavailable``.
    """
    die_with_parent()
    confine()
    asyncio.run(_main(load))


async def _main(load: Callable[[Any], Loaded]) -> None:
    # What the code prints goes to standard error, where the service's log is.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        try:
            loaded = load(json.loads(await lines.readline()))
            greeting = json.dumps({"ready": loaded.about})
        except (FlotillaError, TypeError, ValueError) as error:
            words = getattr(error, "detail", str(error))
            answers.write(json.dumps({"error": words, "passes": may_pass(error)}) + "\n")
            return
        answers.write(greeting + "\n")
        running: dict[int, asyncio.Task[None]] = {}

        async def answer(number: int, content: Any) -> None:
            answers.write(json.dumps([number, await loaded.handle(content)]) + "\n")

        while line := await lines.readline():
            message = json.loads(line)
            if isinstance(message, dict):
                if (task := running.get(message["cancel"])) is not None:
                    task.cancel()
                continue
            number, content = message
            task = running[number] = asyncio.create_task(answer(number, content))
            task.add_done_callback(lambda _, number=number: running.pop(number, None))  # type: ignore[misc]
