"""The processes of a local fleet: each owned by this one, restarted when it dies, ended in order.

A child lives in a session of its own, so that Ctrl-C in the terminal reaches this process alone, which then ends the
children in order; and the kernel ends them if this process is killed.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.cli.log_rotation import USUAL_MEBIBYTES, USUAL_OLDER, older_log, rotate
from flotilla.shared.children.processes import tie_to_parent
from flotilla.shared.children.restarts import Restarts
from flotilla.shared.errors import WorkerDied

TERM_SECONDS = 8.0
KILL_SECONDS = 3.0
MAX_RESTARTS = 5
RESTART_WINDOW_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0
TAIL_BYTES = 4000
LOG_LOOK_SECONDS = 2.0
MEBIBYTE = 2**20


def restarts_of_fleet() -> Restarts:
    """Make the rule by which a local fleet starts a process again."""
    return Restarts(
        MAX_RESTARTS,
        window_seconds=RESTART_WINDOW_SECONDS,
        first_pause_seconds=FIRST_PAUSE_SECONDS,
        longest_pause_seconds=LONGEST_PAUSE_SECONDS,
    )


@dataclass(frozen=True, slots=True)
class LogBounds:
    """How much of the log of one process is kept.

    Attributes:
        max_bytes: of one file; it is a little longer where much is written between two looks.
        num_older: files kept beside the one that is written, at least 1.
    """

    max_bytes: int = USUAL_MEBIBYTES * MEBIBYTE
    num_older: int = USUAL_OLDER


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process.

    Attributes:
        name: unique in the fleet; names its log file.
        command: program and arguments.
        environment: the whole environment.
        is_restarted: start it again when it dies, but not when it exits by itself with a refusal (code 2).
        is_optional: the fleet continues without it if it fails for good.
        may_leave: when it exits in order (code 0), it was asked to leave: it is not started again, and not missed.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    is_restarted: bool = True
    is_optional: bool = False
    may_leave: bool = False


class OwnedProcess:
    """One child, kept alive until ``stop``.

    Args:
        spec: how to start it.
        log_path: where its output goes, appended.
        on_death: called with a sentence whenever it died.
        bounds: of its log.
    """

    def __init__(
        self, spec: ProcessSpec, log_path: Path, on_death: Callable[[str], None], bounds: LogBounds | None = None
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self._bounds = bounds or LogBounds()
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._rotating: asyncio.Task[None] | None = None
        self._restarts = restarts_of_fleet()
        self.restarts = 0
        self.gave_up: str | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it lives."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def start(self) -> None:
        """Start it, and watch over it."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")
        self._rotating = asyncio.create_task(self._rotate(), name=f"rotate the log of {self.spec.name}")

    def let_go(self) -> None:
        """Watch over it no longer: its end is no death."""
        for task in (self._keeper, self._rotating):
            if task is not None:
                task.cancel()

    async def stop(self) -> None:
        """End it: SIGTERM, then SIGKILL to its whole session."""
        self.let_go()
        await asyncio.gather(*filter(None, (self._keeper, self._rotating)), return_exceptions=True)
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TERM_SECONDS):
                    await process.wait()
        # Whatever it left in its session goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await process.wait()

    def last_words(self) -> str:
        """Read the end of its log, or of the newest older one while nothing was written since it was put aside."""
        for path in (self.log_path, older_log(self.log_path, 1)):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                if lines := file.read().decode("utf-8", "replace").strip().splitlines():
                    return lines[-1]
        return ""

    async def _spawn(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.spec.environment),
                start_new_session=True,
                preexec_fn=tie_to_parent(),
            )

    async def _rotate(self) -> None:
        failed: str | None = None
        while True:
            await asyncio.sleep(LOG_LOOK_SECONDS)
            try:
                await asyncio.to_thread(rotate, self.log_path, self._bounds.max_bytes, self._bounds.num_older)
                failed = None
            except OSError as error:
                cause = error.strerror or str(error)
                if cause != failed:  # a full disk is named once, and checked again
                    self._on_death(f"the log of {self.spec.name} cannot be rotated: {cause}")
                failed = cause

    async def _keep(self) -> None:
        while True:
            assert self._process is not None
            code = await self._process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if code == 0 and self.spec.may_leave:
                self._on_death(f"{self.spec.name} has left")
                return
            cause = describe_exit(code)
            pause = self._restarts.died()
            if code == 2 or pause is None or not self.spec.is_restarted:
                self.gave_up = f"{self.spec.name} {cause}: {self.last_words()}"
                self._on_death(f"{self.gave_up} (log: {self.log_path})")
                return
            self._on_death(f"{self.spec.name} {cause}; it is started again")
            self.restarts += 1
            await asyncio.sleep(pause)
            await self._spawn()


def describe_exit(code: int) -> str:
    """Return how a process ended."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def check_alive(processes: Sequence[OwnedProcess]) -> None:
    """Check that no process failed for good.

    Raises:
        WorkerDied: one was; the detail has its last words.
    """
    for process in processes:
        if process.gave_up is not None and not process.spec.is_optional:
            raise WorkerDied(process.gave_up)
