"""A child process that loads something and then answers calls, each within its deadline.

Both sides speak JSON lines of a bounded size on the child's standard input and output. The first is what to load,
answered by ``MARK``, before which the interpreter may have written anything, and by ``{"ready": about, "gives_up":
bool}`` or ``{"error": error}``; then ``[number, content]`` is answered by ``[number, result]`` or by ``[number, null,
error]``, an error being ``[code, detail, errors, context]``. Before its answer ``[number, progress, null]`` tells how
far a call is. What has null as its number is not answered. A child that works on many calls at a time ``gives_up`` one
on ``{"cancel": number}``; one that answers in turn is killed instead. The other side is ``serving``.
"""

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from flotilla.shared.children.serving import MARK
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
        on_line: gets each line that it writes to standard error; None: this process' own standard error does.
        blames_opening: whether its end while it loads is the fault of what it loads; else it is the process's own.
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
        on_line: Callable[[str], None] | None = None,
        blames_opening: bool = True,
    ) -> None:
        self._command, self._opening, self._what = command, opening, what
        self._environment = environment
        self.start_seconds = START_SECONDS if start_seconds is None else start_seconds
        """For a start from now on without progress."""
        self._max_line_bytes, self._on_line, self._blames_opening = max_line_bytes, on_line, blames_opening
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
        self._waiting: dict[int, tuple[Child, asyncio.Future[Any]]] = {}
        self._on_progress: dict[int, Callable[[Any], None]] = {}
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        """Calls under way."""
        return len(self._waiting)

    async def start(self) -> Any:
        """Start the process if there is none, let it load, and return its description of what it loaded.

        Raises:
            InvalidSpec: it ended while it loaded; or whatever error its ``load`` raised.
            WorkerDied: it cannot be started, or was killed meanwhile; or it ended, and nothing that it loads is blamed.
            DeadlineExceeded: it took too long, as on a busy machine.
            Unavailable: no process can be started now, or what is needed to load is absent.
        """
        async with self._starting:
            if self.child is not None and not self._is_over(self.child):
                return self._about
            await self.aclose()
            try:
                child = self.child = await spawn(
                    self._command,
                    environment=self._environment,
                    max_line_bytes=self._max_line_bytes,
                    on_line=self._on_line,
                )
            except OSError as error:
                words = f"the process of {self._what} cannot be started: {error}"
                raise absent_or(error, WorkerDied(words)) from error
            seconds = self.start_seconds
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

    async def call(
        self, content: object, *, seconds: float | None = None, on_progress: Callable[[Any], None] | None = None
    ) -> Any:
        """Call the process; a caller that stops waiting abandons the call.

        Args:
            content: in JSON.
            seconds: longest time; None: the caller bounds it.
            on_progress: gets the child's messages before its answer; see ``serving.progress_of_call``.

        Raises:
            WorkerDied: the process ended, or what is asked is too large.
            DeadlineExceeded: it did not answer in time.
            FlotillaError: what the other side's ``handle`` raised.
        """
        number = next(self._numbers)
        child = self._send(number, content)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = child, answer
        if on_progress is not None:
            self._on_progress[number] = on_progress
        try:
            async with asyncio.timeout(seconds):
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
            self._on_progress.pop(number, None)

    def tell(self, content: object) -> None:
        """Send the process a command, in order with earlier calls; the result is discarded.

        Raises:
            WorkerDied: as of ``call``.
        """
        self._send(None, content)

    def _send(self, number: int | None, content: object) -> Child:
        child = self.child
        if child is None or self._is_over(child):
            how = "has ended" if child is not None and self._described is not child else self.cause
            raise WorkerDied(f"the process of {self._what} {how}")
        line = json.dumps([number, content]).encode() + b"\n"
        if len(line) > self._max_line_bytes:
            raise WorkerDied(f"what {self._what} is to be given is too large")
        child.write(line)
        return child

    async def aclose(self) -> None:
        """End the process; calls under way fail."""
        child, self.child = self.child, None
        reading, self._reading = self._reading, None
        if child is not None:
            await child.end()
            self._fail(child)
        if reading is not None:
            # Not cancelled when this is: it fails the calls of the others.
            await asyncio.wait([reading])

    async def _give_up(self, child: Child, number: int) -> None:
        if self._gives_up:
            child.write(json.dumps({"cancel": number}).encode() + b"\n")
        elif self.child is child:
            await self.aclose()

    async def _greet(self, child: Child) -> Any:
        child.write(json.dumps(self._opening).encode() + b"\n")
        line = b""
        while line != MARK and not child.stdout.at_eof():
            with contextlib.suppress(ValueError):  # too long a line
                line = await child.stdout.readline()
        try:
            line = await child.stdout.readline()
            greeting = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            raise InvalidSpec(f"{self._what}: its process wrote what is no answer while it loaded") from None
        if greeting is None:
            # Its output is closed; a process that continues without it is of no use.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.ended(), END_SECONDS)
            if not self._blames_opening:
                raise WorkerDied(f"the process of {self._what}, while it loaded, {child.cause()}")
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
        self._fail(child, "wrote what is no answer" if is_garbage else None)

    def _is_over(self, child: Child) -> bool:
        """Whether it answers no more, though the kernel may not be able to end it."""
        return child.has_ended or self._described is child

    def _fail(self, child: Child, how: str | None = None) -> None:
        """Fail the calls that an ended child has not answered."""
        self._describe(child, how)
        for its, answer in self._waiting.values():
            if its is child and not answer.done():
                answer.set_exception(WorkerDied(f"the process of {self._what} {self.cause}"))

    def _describe(self, child: Child, how: str | None = None) -> None:
        if self._described is not child:
            self._described = child
            self.cause = child.cause() if how is None else how + child.words.shown()
            self.was_killed = child.exit_code == -signal.SIGKILL and not child.is_killed_here

    async def _read_answers(self, child: Child) -> bool:
        """Read until the end; False after a malformed answer: its writer is not trusted to write another."""
        try:
            while line := await child.stdout.readline():
                number, result, *failed = json.loads(line)
                _, answer = self._waiting.get(number, (child, None))
                if failed == [None]:
                    if (on_progress := self._on_progress.get(number)) is not None:
                        on_progress(result)
                elif answer is not None and not answer.done():
                    if failed:
                        answer.set_exception(_error(failed[0]))
                    else:
                        answer.set_result(result)
        except Exception:
            return False
        return True


def _error(told: Sequence[Any]) -> Exception:
    code, detail, errors, context = told
    return error_for_code(code)(str(detail), errors=errors, **context)


class BlockingCalls:
    """A process that was started; several threads may call at once.

    Attributes:
        about: its description of what it loaded.
    """

    def __init__(self, process: CallProcess, portal: BlockingPortal, about: Any) -> None:
        self._process, self._portal, self.about = process, portal, about

    def call(self, content: object, *, seconds: float | None) -> Any:
        """Start the process where it died, and ask it; see ``CallProcess.call``."""

        async def call() -> Any:
            await self._process.start()
            return await self._process.call(content, seconds=seconds)

        return self._portal.call(call)


@contextmanager
def running(process: CallProcess) -> Iterator[BlockingCalls]:
    """Start a process, and end it afterwards; blocks. Errors are those of ``CallProcess.start``."""
    with start_blocking_portal() as portal:
        try:
            yield BlockingCalls(process, portal, portal.call(process.start))
        finally:
            portal.call(process.aclose)
