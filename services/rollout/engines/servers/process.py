"""A server that is ours: started, watched, ended with all its processes.

It is a program of another environment. Its process group is ended as a whole; the kernel ends its first process when
ours dies, and that one's children end with it.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from services.rollout.engines.servers.dialect import Launch
from shared.errors import InvalidSpec, WorkerDied
from shared.processes import group_lives, reap, tie_to_parent

log = logging.getLogger(__name__)

LAST_LINES = 20
MAX_LINE = 400
CHUNK_BYTES = 1 << 16
GROUP_POLL_SECONDS = 0.1
USAGE_EXIT_CODE = 2
"""Of a program that refuses its arguments."""


class ServerProcess:
    """One server process with its children.

    Args:
        python: interpreter that has the server.
        launch: how it is started.
        place: directory for its files, which is the caller's to delete.
        name: of this kind of server, for messages.
        variable: that names the interpreter.
    """

    def __init__(self, python: Path, launch: Launch, place: Path, *, name: str, variable: str) -> None:
        self._python = python
        self._launch = launch
        self._place = place
        self._name = name
        self._variable = variable
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def process_id(self) -> int | None:
        """Of its first process, while that runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it; it is not up yet when this returns.

        Raises:
            WorkerDied: the interpreter cannot be started.
        """
        launch = self._launch
        await asyncio.to_thread(write_private, self._place, launch.files)
        # A pipe of our own: asyncio would call the server ended only once its last child has closed one of asyncio's.
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                str(self._python),
                *launch.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                env=launch.environment,
                cwd=self._place,
                start_new_session=True,
                preexec_fn=tie_to_parent(launch.death_signal),
            )
        except OSError as error:
            os.close(reading)
            raise WorkerDied(f"{self._variable} {self._python} cannot be started: {error}") from error
        finally:
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
        last = " | ".join(self._last_lines) or "no output"
        if code == USAGE_EXIT_CODE:
            why = next((line for line in reversed(self._last_lines) if "error" in line.lower()), last)
            return InvalidSpec(f"the {self._name} server refuses rollout.engine.options: {why}")
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return WorkerDied(f"the {self._name} server ended by {how}; last lines: {last}", exit_code=code)

    async def close(self, seconds: float) -> None:
        """End it and its children, by force after some seconds."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
                # What its children tidy up, such as shared memory, nobody else would.
                await self._until_group_ends(process.pid)
        # Also when the first process has ended: a child that stays would keep its memory and its device.
        self._signal(signal.SIGKILL)
        await reap(process)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _until_group_ends(self, group: int) -> None:
        while True:
            if not await asyncio.to_thread(group_lives, group):
                return
            await asyncio.sleep(GROUP_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

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
                    self._last_lines.append(text)
                    log.info("engine output", extra={"line": text})
            rest = rest[:MAX_LINE]


def write_private(place: Path, files: Mapping[str, str]) -> None:
    """Write files that hold a server's secrets, and that nobody else may read."""
    for name, text in files.items():
        descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write(text)
