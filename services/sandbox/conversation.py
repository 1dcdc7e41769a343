"""The service's side of a session: cells are given to its guard, one at a time, and their results are read."""

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from signal import SIGKILL
from typing import Protocol

from flotilla.services.sandbox.fork_servers import ForkServer, SandboxFailed
from flotilla.services.sandbox.guard.job import EXITED, OVER_LIMIT, Cell, CellResult, JobResult, PhaseResult
from flotilla.services.sandbox.guard.messages import LENGTH_BYTES, framed
from flotilla.services.sandbox.limits import Limits, longest_seconds
from flotilla.shared.host.start_patience import patient

START_SECONDS = 20.0
CELL_SECONDS = 35.0
"""Beyond the time of a cell: for the guard to interrupt it, to stop the session and to answer."""


WRITE_SECONDS = 30.0
"""For the files of a cell to be written."""

GUARD_KILLED = "the guard was killed"

WRITE = """
import base64, os
for path, content in files.items():
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(content))
"""
STATUS = ".flotilla-status"
SHELL = """
import shutil, subprocess
child = subprocess.Popen([shutil.which("bash") or "sh", "-c", command], stdin=subprocess.DEVNULL)
try:
    code = child.wait()
except KeyboardInterrupt:
    child.kill()
    child.wait()
else:
    with open(status, "w") as file:
        file.write(str(code))
"""


class Talk(Protocol):
    """A session that is at work."""

    async def run(self, cell: Cell) -> CellResult:
        """Run a cell.

        Raises:
            SandboxFailed: the sandbox failed; the session is over.
            TimeoutError: likewise.
        """


def calling(source: str, names: Mapping[str, object]) -> str:
    """Make a cell of some Python that leaves no names behind."""
    return f"exec({source!r}, {dict(names)!r})"


def writing(files: Mapping[str, str]) -> str:
    """Make a cell that writes files, base64 by path."""
    return calling(WRITE, {"files": dict(files)})


class Conversation:
    """One session's interpreter.

    Args:
        server: which runs its guard.
        reader, writer: the guard's stream.
        limits: of the session.
        caller: whose it is.
    """

    def __init__(
        self,
        server: ForkServer,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        limits: Limits,
        caller: str,
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._caller = caller

    async def begun(self) -> None:
        """Wait until the interpreter is up.

        Raises:
            SandboxFailed: it does not start.
            TimeoutError: likewise.
        """
        async with asyncio.timeout(patient(START_SECONDS)):
            answer = await self._answer()
        if answer is None or not answer.is_alive:
            why = answer.result.error if answer is not None else GUARD_KILLED
            raise SandboxFailed(f"the interpreter did not start: {why}")

    async def run(self, cell: Cell) -> CellResult:
        """Run a cell.

        Raises:
            SandboxFailed: the sandbox failed; the session is over.
            TimeoutError: likewise.
        """
        if cell.files:
            written = await self.run(Cell(writing(cell.files), WRITE_SECONDS))
            if not written.is_alive or written.result.phases[-1].return_code != 0:
                return written
        with self._server.used_by(self._caller):
            async with asyncio.timeout(longest_seconds(cell.timeout_seconds) + CELL_SECONDS):
                self._writer.write(framed(json.dumps(cell.to_wire()).encode()))
                answer = await self._answer()
        if answer is None:
            # As of a program: breaking the sandbox must not be a way to avoid a verdict.
            detail = f"{GUARD_KILLED} while the cell ran"
            answer = CellResult(JobResult((PhaseResult("run", OVER_LIMIT, -int(SIGKILL), 0.0, detail=detail),)), False)
        if answer.result.error:
            raise SandboxFailed(f"the guard failed: {answer.result.error}")
        if self._server.has_used_up_memory():
            return CellResult(blame_memory(answer.result, self._limits), answer.is_alive)
        return answer

    async def _answer(self) -> CellResult | None:
        """Read a result; None if the guard has ended.

        Raises:
            SandboxFailed: it is longer than any right one, or cannot be read.
        """
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if length > answer_bytes(self._limits):
                raise SandboxFailed("the guard's answer is too long")
            return CellResult.from_wire(json.loads(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxFailed(f"the guard's answer cannot be read: {error!r}") from error


class ShellConversation:
    """A session whose cells are commands of a shell, which an interpreter starts.

    Args:
        inner: that interpreter.
    """

    def __init__(self, inner: Talk) -> None:
        self._inner = inner

    async def run(self, cell: Cell) -> CellResult:
        """Run a command; see ``Talk.run``."""
        code = calling(SHELL, {"command": cell.code, "status": STATUS})
        found = await self._inner.run(Cell(code, cell.timeout_seconds, (*cell.fetch, STATUS), cell.files))
        files = dict(found.result.files)
        told = base64.b64decode(files.pop(STATUS, "")).decode("ascii", "replace")
        last = found.result.phases[-1]
        if last.outcome == EXITED and last.return_code == 0 and told.removeprefix("-").isdigit():
            last = replace(last, return_code=int(told))
        return CellResult(JobResult((last,), files, found.result.notes), found.is_alive)


def answer_bytes(limits: Limits) -> int:
    """Return how long the longest right answer of a guard is."""
    # Two phases with two streams each and the files, in base64; and some room for the rest.
    return (4 * limits.output_bytes + limits.fetch_bytes) * 3 // 2 + 65536


def blame_memory(result: JobResult, limits: Limits) -> JobResult:
    """Return of a result that the kernel ended a process because the memory was used up."""
    detail = f"memory limit exceeded: the kernel ended a process, allowed {limits.memory_bytes} bytes"
    last = result.phases[-1]
    if last.detail and not last.detail.startswith(("the interpreter ended", GUARD_KILLED)):
        return result
    blamed = PhaseResult(last.name, last.outcome, last.return_code, last.seconds, last.stdout, last.stderr, detail)
    return JobResult((*result.phases[:-1], blamed), result.files, result.notes)
