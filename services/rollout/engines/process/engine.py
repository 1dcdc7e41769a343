"""The embedded engine in a process of its own: torch lives there alone, and its death is an error, not ours.

This process starts one child and speaks with it over an inherited socket. The child dies with us: the kernel kills it
when the thread that started it ends, and it ends by itself when the socket closes.
"""

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from contextlib import suppress

from flotilla.services.rollout.engines.process.commands import Close, Command, command_to_wire, result_from_wire
from flotilla.services.rollout.engines.process.framing import encode, read_message
from flotilla.services.rollout.engines.process.remote import RemoteEngine
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.shared.children.processes import python_module, reap
from flotilla.shared.errors import DeadlineExceeded, FlotillaError, WorkerDied
from flotilla.shared.host.cores import usable_cores
from flotilla.shared.host.start_patience import start_timeout

log = logging.getLogger(__name__)

LAST_LINES = 20
CHUNK_BYTES = 1 << 16

CHILD = "flotilla.services.rollout.engines.process.child"
SPIN_COUNT = "30000"
"""Turns that a thread waits for the next product before it sleeps, some tens of microseconds: there are five in each
layer, and to wake it costs as much."""


class ProcessEngine(RemoteEngine):
    """An ``Engine`` that runs ``TorchEngine`` in a child process.

    It is started once; after its child's death or a ``close``, make another.

    Args:
        settings: all that the child needs.
    """

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.call_seconds)
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._death: WorkerDied | None = None
        self._is_closing = False
        self._is_closed = False

    @property
    def process_id(self) -> int | None:
        """The child's process id, while it runs."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def start(self) -> None:
        """Start the child and load the model; see ``Engine.start``.

        Raises:
            ModelError: the model cannot be loaded.
            DeadlineExceeded: ``start_seconds`` went by: a cold disk or a crowded machine is no fault of the model.
            WorkerDied: the child ended while it loaded.
        """
        try:
            reader = await self._spawn()
            assert self._process is not None
            async with start_timeout(self._settings.start_seconds, self._process.pid):
                ready = await self._first_reply(reader)
        except TimeoutError:
            await self._end(close_seconds=0)
            seconds = self._settings.start_seconds
            raise DeadlineExceeded(f"the engine did not load {self._settings.model_path} within {seconds} s") from None
        except EOFError:
            raise WorkerDied(f"the engine ended while it loaded: {(await self._cause_of_death()).detail}") from None
        except asyncio.CancelledError:
            await self._end(close_seconds=0)
            raise
        if isinstance(ready, FlotillaError):
            await self._end(close_seconds=self._settings.close_seconds)
            raise ready
        self._tasks.append(asyncio.create_task(self._read(reader), name="engine replies"))

    async def close(self) -> None:
        """Abort what is in flight and end the child, by force after ``close_seconds``; see ``Engine.close``."""
        if self._is_closing:
            return
        self._is_closing = True
        with suppress(FlotillaError):
            self._post(Close())
        await self._end(self._settings.close_seconds)
        self._is_closed = True
        self._fail_all(self._death or WorkerDied("the engine was closed"))

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *python_module(CHILD, "--socket", str(theirs.fileno()), "--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=self._environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._tasks.append(asyncio.create_task(self._keep_lines(self._process), name="engine output"))
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(encode(self._settings.to_wire()))
        return reader

    def _environment(self) -> dict[str, str]:
        # A second thread pool that spins makes both several times slower, so idle threads sleep.
        threads = str(len(usable_cores()) if self._settings.threads == "auto" else self._settings.threads)
        own = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": SPIN_COUNT,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}

    async def _first_reply(self, reader: asyncio.StreamReader) -> FlotillaError | None:
        result = result_from_wire((await read_message(reader))["result"])
        assert result is None or isinstance(result, FlotillaError)
        return result

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await read_message(reader)
                self._replied(message["call"], result_from_wire(message["result"]))
        except EOFError:
            pass
        except (ValueError, KeyError, TypeError):
            log.exception("engine process sent what cannot be read")
        if not self._is_closing:
            self._death = await self._cause_of_death()
            log.error("engine process died", extra={"cause": self._death.detail})
            self._fail_all(self._death)

    async def _keep_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        # By chunks, since a reader of lines gives up on a long one, and then a full pipe would block the child.
        while chunk := await process.stdout.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in (*lines, rest[:CHUNK_BYTES]) if len(rest) > CHUNK_BYTES else lines:
                self._keep_line(line)
            rest = b"" if len(rest) > CHUNK_BYTES else rest
        if rest:
            self._keep_line(rest)

    def _keep_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._last_lines.append(text)
        log.info("engine output", extra={"line": text})

    async def _cause_of_death(self) -> WorkerDied:
        """Collect the exit code and the last lines of a child whose socket has ended."""
        assert self._process is not None
        await self._end(self._settings.close_seconds)
        code = self._process.returncode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        last = " | ".join(self._last_lines) or "no output"
        return WorkerDied(f"the engine's process ended by {how}; last lines: {last}", exit_code=code)

    async def _end(self, close_seconds: float) -> None:
        """Close the socket, wait for the child, kill it if it stays, and end the tasks that read from it."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(close_seconds):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await reap(self._process)
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if others:
            _, stuck = await asyncio.wait(others, timeout=1.0)
            for task in stuck:
                task.cancel()

    def _post(self, command: Command) -> None:
        if self._death is not None:
            raise self._death
        if self._writer is None or self._is_closed:
            raise WorkerDied("the engine does not run")
        # A child that has just died takes nothing, but then its end of the socket is closed and `_read` says so.
        self._writer.write(encode(command_to_wire(command)))
