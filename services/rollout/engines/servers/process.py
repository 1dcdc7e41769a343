"""A server that is ours: started, watched, ended with all its processes.

It is a program of another environment. Between it and us is a keeper (``keeper.py``), which ends when nothing of the
server is left, ends everything when we die, and ends as the server did.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from flotilla.services.rollout.engines.servers import keeper, leftovers
from flotilla.services.rollout.engines.servers.dialect import Launch
from flotilla.shared.children.processes import reap
from flotilla.shared.errors import InvalidSpec, WorkerDied

log = logging.getLogger(__name__)

LAST_LINES = 20
ERROR_LINES = 200
"""Of the last lines, in how many the error is looked for that ended a server: tracebacks are long."""
MAX_LINE = 400
CHUNK_BYTES = 1 << 16
USAGE_EXIT_CODE = 2
"""Of a program that refuses its arguments."""
KEEPER = Path(keeper.__file__)
ERROR = re.compile(r"\b(?:\w+(?:Error|Exception): |Value error, )(?!.*(?:root cause above|for the root cause\.)).+")
"""In a line; vLLM's front ends with some that only refer to another, pydantic's is told a line after its name."""
MISSING = re.compile(r"No module named '?([\w.]+)")
CHILDREN_SECONDS = 3.0
"""What its children have to tidy up when its first process has ended by itself."""


class ServerProcess:
    """One server process with its children.

    Args:
        python: interpreter that has the server.
        launch: how it is started.
        place: directory for its files, which is the caller's to delete.
        name: of this kind of server, for messages.
        variable: that names the interpreter.

    Attributes:
        was_up: whether it has answered: its end is no refusal of its arguments or of its environment then.
    """

    def __init__(self, python: Path, launch: Launch, place: Path, *, name: str, variable: str) -> None:
        self._python = python
        self._launch = launch
        self._place = place
        self._name = name
        self._variable = variable
        self.was_up = False
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=ERROR_LINES)

    @property
    def process_id(self) -> int | None:
        """Of its keeper, while that runs: the server is its first child."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def last_lines(self) -> str:
        """What it wrote last."""
        return " | ".join(list(self._lines)[-LAST_LINES:]) or "no output"

    async def start(self) -> None:
        """Start it; it is not up yet when this returns."""
        launch = self._launch
        await asyncio.to_thread(write_private, self._place, launch.files)
        # A pipe of our own: asyncio would call the server ended only once its last child has closed one of asyncio's.
        reading, writing = os.pipe()
        lifeline, self._lifeline = os.pipe()
        command = (str(self._python), *launch.arguments)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(KEEPER), str(CHILDREN_SECONDS), *command),
                stdin=lifeline,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                env=launch.environment,
                cwd=self._place,
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(lifeline)
            os.close(writing)
        self._reading = asyncio.create_task(self._read(os.fdopen(reading, "rb", buffering=0)), name="server output")

    async def ended(self) -> WorkerDied | InvalidSpec:
        """Wait until it has ended by itself, and return the cause."""
        assert self._process is not None and self._reading is not None
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            # Its children may hold the pipe open for a moment.
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._reading)
        last = self.last_lines
        if code == keeper.CANNOT_START:
            return WorkerDied(f"{self._variable} {self._python} cannot be started: {last}")
        if not self.was_up and self._lines and (missing := MISSING.search(self._lines[-1])):
            return InvalidSpec(
                f"{self._variable} {self._python} cannot run {self._name}, it has no module {missing[1]}: set it to "
                f"the interpreter of an environment in which {self._name} is installed (docs/engines.md), or set "
                "rollout.engine.url to the address of a server"
            )
        if not self.was_up and code == USAGE_EXIT_CODE:
            why = next((line for line in reversed(self._lines) if "error" in line.lower()), last)
            return InvalidSpec(f"the {self._name} server refuses rollout.engine.options: {why}")
        errors = [found[0] for line in self._lines if " WARNING " not in line and (found := ERROR.search(line))]
        if code >= 0 and errors:
            cause = f"the {self._name} server ended by exit code {code}: {errors[-1]} (more is in the rollout's log)"
            return WorkerDied(cause, exit_code=code)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return WorkerDied(f"the {self._name} server ended by {how}; last lines: {last}", exit_code=code)

    async def note_leftovers(self) -> None:
        """Note what it would leave behind if it were killed, or we; see ``servers.leftovers``."""
        if self._process is not None:
            facts = (self._place, self._process.pid, self._launch.shared_memory)
            # Where the disk is full nothing is noted; the server is watched and ended all the same.
            with contextlib.suppress(OSError):
                await asyncio.to_thread(leftovers.note, *facts)

    async def close(self, seconds: float) -> None:
        """End it and its children, by force after some seconds, and remove what they left behind."""
        process = self._process
        if process is None:
            self._let_go()
            return
        await self.note_leftovers()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
        self._let_go()
        await reap(process)
        # Somebody may have killed the keeper: a child that stays would keep its memory and its device.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(leftovers.remove, self._place)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def _let_go(self) -> None:
        """Have the keeper kill whatever is left."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _read(self, pipe: FileIO) -> None:
        reader = asyncio.StreamReader()
        with pipe:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            try:
                await self._keep_lines(reader)
            finally:
                transport.close()

    async def _keep_lines(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        # By chunks, since a reader of lines gives up on a long one, and then a full pipe would block the server.
        while chunk := await reader.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                text = line[:MAX_LINE].decode(errors="replace").rstrip()
                if text:
                    self._lines.append(text)
                    log.info("engine output", extra={"line": text})
            rest = rest[:MAX_LINE]


def write_private(place: Path, files: Mapping[str, str]) -> None:
    """Write files that hold a server's secrets, and that nobody else may read."""
    for name, text in files.items():
        descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write(text)
