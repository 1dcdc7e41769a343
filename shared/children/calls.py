"""A child process that loads something and then answers calls, each within its deadline.

Both sides speak JSON lines of a bounded size on the child's standard input and output. The first is what to load,
answered by ``{"ready": about, "gives_up": bool}`` or by ``{"error": [code, detail]}``; then ``[number, content]`` is
answered by ``[number, result]`` or by ``[number, null, [code, detail]]``. A child that works on many calls at a time
``gives_up`` one on ``{"cancel": number}``; one that answers in turn is killed instead. The other side is ``serving``.
"""

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.shared.children.spawning import Child, spawn
from flotilla.shared.errors import DeadlineExceeded, InvalidSpec, WorkerDied, error_for_code
from flotilla.shared.host.start_patience import start_timeout
from flotilla.shared.net.absence import absent_or

START_SECONDS = 300.0
"""A file may import much."""
END_SECONDS = 5.0
LINGER_SECONDS = 1.0
MAX_LINE_BYTES = 64 * 1024 * 1024


class CallProcess:
    """The owner's side; a process that died is started again by the next ``start``.

    Args:
        command: the program, which calls ``serving.serve``.
        opening: what it is to load, in JSON.
        what: it runs, for messages, such as ``the custom function``.
        environment: all of its variables; None: this process's without secrets.
        start_seconds: for the start without progress; None: ``START_SECONDS``.
        max_line_bytes: of a message, either way.
        is_quiet: whether what it writes to standard error is kept for its last words only.
    """

    def __init__(
        self,
        command: Sequence[str],
        opening: object,
        what: str,
        *,
        environment: Mapping[str, str] | None = None,
        start_seconds: float | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        is_quiet: bool = False,
    ) -> None:
        self._command, self._opening, self._what = command, opening, what
        self._environment, self._start_seconds = environment, start_seconds
        self._max_line_bytes, self._is_quiet = max_line_bytes, is_quiet
        self.child: Child | None = None
        self.cause = "was not started"
        """How the last process ended, as what follows its name in a sentence."""
        self.was_killed = False
        """Whether SIGKILL ended the last process, and not this owner's, such as for memory: that may pass."""
        self._described: Child | None = None
        self._about: Any = None
        self._gives_up = False
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Calls under way."""
        return len(self._waiting)

    async def start(self) -> Any:
        """Start the process where there is none, let it load, and return what it says of what it loaded.

        Raises:
            InvalidSpec: it ended while it loaded; or whatever error its ``load`` raised.
            WorkerDied: it cannot be started, or was killed meanwhile: not the fault of what it loads.
            DeadlineExceeded: it took too long, as on a busy machine.
            Unavailable: no process can be started now, or what is needed to load is absent.
        """
        async with self._starting:
            if self.child is not None and not self.child.has_ended:
                return self._about
            await self.aclose()
            try:
                child = self.child = await spawn(
                    self._command,
                    environment=self._environment,
                    max_line_bytes=self._max_line_bytes,
                    is_quiet=self._is_quiet,
                )
            except OSError as error:
                words = f"the process of {self._what} cannot be started: {error}"
                raise absent_or(error, WorkerDied(words)) from error
            seconds = START_SECONDS if self._start_seconds is None else self._start_seconds
            try:
                async with start_timeout(seconds, child.process.pid):
                    self._about = await self._greet(child)
            except BaseException as error:
                await self.aclose()
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(f"{self._what} was not loaded within {seconds:g} s") from None
                raise
            self._reading = asyncio.create_task(self._read(child), name=self._what)
            return self._about

    async def call(self, content: object, *, seconds: float | None = None) -> Any:
        """Ask the process; whoever stops waiting gives the call up.

        Args:
            content: in JSON.
            seconds: longest time; None: the caller bounds it.

        Raises:
            WorkerDied: the process ended, or what is asked is too large.
            DeadlineExceeded: it did not answer in time.
            FlotillaError: what the other side's ``handle`` raised.
        """
        child, number = self.child, next(self._numbers)
        if child is None or child.has_ended:
            raise WorkerDied(f"the process of {self._what} has ended")
        line = json.dumps([number, content]).encode() + b"\n"
        if len(line) > self._max_line_bytes:
            raise WorkerDied(f"what {self._what} is to be given is too large")
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                child.stdin.write(line)
                with contextlib.suppress(ConnectionError):
                    await child.stdin.drain()
                return await answer
        except TimeoutError:
            await self._give_up(child, number)
            raise DeadlineExceeded(f"{self._what} did not answer within {seconds:g} s") from None
        except asyncio.CancelledError:
            await self._give_up(child, number)
            raise
        finally:
            self._waiting.pop(number, None)

    async def aclose(self) -> None:
        """End the process; calls under way fail."""
        child, self.child = self.child, None
        if child is not None:
            await child.end()
            self._describe(child)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None

    async def _give_up(self, child: Child, number: int) -> None:
        if self._gives_up:
            child.stdin.write(json.dumps({"cancel": number}).encode() + b"\n")
        elif self.child is child:
            await self.aclose()

    async def _greet(self, child: Child) -> Any:
        child.stdin.write(json.dumps(self._opening).encode() + b"\n")
        try:
            line = await child.stdout.readline()
            greeting = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            raise InvalidSpec(f"{self._what}: its process wrote what is no answer while it loaded") from None
        if greeting is None:
            # Its output is closed; a process that goes on without it is of no use.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.ended(), END_SECONDS)
            if child.exit_code == -signal.SIGKILL:
                raise WorkerDied(f"the process of {self._what} was ended by SIGKILL while it loaded the file")
            raise InvalidSpec(f"{self._what}: its process ended while it loaded the file{child.words.shown()}")
        if not isinstance(greeting, dict) or not greeting.keys() & {"ready", "error"}:
            raise InvalidSpec(f"{self._what}: its process wrote what is no answer while it loaded")
        if "error" in greeting:
            raise _error(greeting["error"])
        self._gives_up = bool(greeting.get("gives_up"))
        return greeting["ready"]

    async def _read(self, child: Child) -> None:
        reading = asyncio.create_task(self._read_answers(child))
        ending = asyncio.create_task(child.ended())
        await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
        if not (is_garbage := reading.done() and not reading.result()):
            # The one follows the other at once, unless its own children hold its output open, or it has closed it.
            await asyncio.wait([reading, ending], timeout=LINGER_SECONDS)
        for task in (reading, ending):
            task.cancel()
        await asyncio.gather(reading, ending, return_exceptions=True)
        await child.end()
        self._describe(child, "wrote what is no answer" if is_garbage else None)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(WorkerDied(f"the process of {self._what} {self.cause}"))

    def _describe(self, child: Child, how: str | None = None) -> None:
        if self._described is not child:
            self._described = child
            self.cause = child.cause() if how is None else how + child.words.shown()
            self.was_killed = child.exit_code == -signal.SIGKILL and not child.is_killed_here

    async def _read_answers(self, child: Child) -> bool:
        """Read until the end; False after what is no answer: who wrote it is not trusted to write another."""
        try:
            while line := await child.stdout.readline():
                number, result, *failed = json.loads(line)
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():
                    if failed:
                        answer.set_exception(_error(failed[0]))
                    else:
                        answer.set_result(result)
        except (ValueError, TypeError):
            return False
        return True


def _error(told: Sequence[str]) -> Exception:
    code, detail = told
    return error_for_code(code)(str(detail))
