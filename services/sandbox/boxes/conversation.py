"""A session in a box: its cells are commands, or go to an interpreter that stays there."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from flotilla.services.sandbox.boxes import interpreter
from flotilla.services.sandbox.boxes.work import TOLD, Done, Work, do, told
from flotilla.services.sandbox.fork_servers import SandboxFailed
from flotilla.services.sandbox.guard.job import (
    EXITED,
    OVER_LIMIT,
    TIMED_OUT,
    Cell,
    CellResult,
    JobResult,
    Phase,
    PhaseResult,
)
from flotilla.services.sandbox.guard.process import why_ended
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.providers.base import Box, Provider
from flotilla.shared.host.start_patience import patient

HOME: Final = ".."
"""Of the interpreter, as seen from the directory of programs."""
END_SECONDS: Final = 5.0
"""For the interpreter to be interrupted or ended, beyond the time of a cell."""
CODES: Final = range(-64, 256)
"""How an interpreter may end: by an exit code, or by a signal."""
SHELL: Final = 'if command -v bash >/dev/null 2>&1; then exec bash "$0"; fi; exec sh "$0"'


class BoxConversation:
    """One session.

    Args:
        provider: of its box.
        box: where it is.
        limits: of a cell.
        is_shell: whether cells are commands of a shell; otherwise they are Python.
    """

    def __init__(self, provider: Provider, box: Box, limits: Limits, *, is_shell: bool) -> None:
        self._provider, self._box, self._limits, self._is_shell = provider, box, limits, is_shell
        self._source = b"" if is_shell else Path(interpreter.__file__).read_bytes()

    async def begin(self, files: dict[str, str], cpu_seconds: float) -> None:
        """Put its files there, and start the interpreter if it has one.

        Raises:
            SandboxFailed: it does not start.
        """
        work = Work((), self._limits, files, is_first=True)
        if self._is_shell:
            argv: tuple[str, ...] = ("true",)
        else:
            argv = ("python3", f"{HOME}/{work.name}/interpreter.py", "start", HOME, str(max(1, int(cpu_seconds))))
        phase = Phase("run", argv, patient(interpreter.START_SECONDS) + END_SECONDS)
        done = await self._do(work, phase, {"interpreter.py": self._source})
        last = done.phases[-1]
        if last.outcome != EXITED or last.return_code != 0:
            said = " ".join(" ".join(last.output()).split())[-300:]
            raise SandboxFailed(f"the session did not start: {last.detail or said or last.outcome}")

    async def run(self, cell: Cell) -> CellResult:
        """Run a cell.

        Raises:
            SandboxFailed: the sandbox failed; the session is over.
        """
        work = Work((), self._limits, cell.files, fetch=cell.fetch)
        here = f"{HOME}/{work.name}"
        code = cell.code.encode("utf-8", "surrogateescape")
        if self._is_shell:
            phase = Phase("run", ("sh", "-c", SHELL, f"{here}/cell"), cell.timeout_seconds)
            done = await self._do(work, phase, {"cell": code})
            return CellResult(JobResult(done.phases, done.files, done.notes), is_alive=True)
        argv = ("python3", f"{here}/interpreter.py", "ask", HOME, f"{here}/cell", f"{cell.timeout_seconds:g}")
        phase = Phase("run", (*argv, f"{here}/{TOLD}"), cell.timeout_seconds + END_SECONDS)
        done = await self._do(work, phase, {"interpreter.py": self._source, "cell": code})
        return _of_interpreter(done, cell)

    async def _do(self, work: Work, phase: Phase, beside: dict[str, bytes]) -> Done:
        made = replace(work, phases=(phase,), beside=beside)
        return await do(self._provider, self._box, made)


def _of_interpreter(done: Done, cell: Cell) -> CellResult:
    """Make the result of a cell of what ``ask`` has told: the cell may have written it, and says nothing else by it."""
    asked = done.phases[-1]
    said = told(done)
    outcome, code, is_alive = said.get("outcome"), said.get("code"), said.get("is_alive") is True
    code = code if type(code) is int and code in CODES else None
    detail = ""
    if outcome not in (EXITED, TIMED_OUT) or (outcome == EXITED and code is None):
        is_alive = False
    if outcome == TIMED_OUT:
        detail = why_ended(TIMED_OUT, cell.timeout_seconds) + ("" if is_alive else "; it could not be interrupted")
    elif not is_alive:
        outcome = EXITED if code is not None else OVER_LIMIT
        how = "" if code is None else f" with exit code {code}" if code >= 0 else f" by signal {-code}"
        detail = f"the interpreter ended{how}"
    code = None if outcome == TIMED_OUT else code
    phase = PhaseResult("run", str(outcome), code, asked.seconds, asked.stdout, asked.stderr, detail)
    return CellResult(JobResult((phase,), done.files, done.notes), is_alive)
