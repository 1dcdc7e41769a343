"""The worker as a child process: started with its launch on standard input, watched until it ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from flotilla.services.trainer.wire import FROM_WORKER, FromWorker, Launch, Line
from flotilla.shared.children.processes import python_module
from flotilla.shared.children.secret_variables import without_secrets
from flotilla.shared.config.base.model import Threads
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.host.control_groups import count_memory_kills
from flotilla.shared.host.cores import usable_cores
from flotilla.shared.schemas.service import JobNode

MODULE, JOB_MODULE = "flotilla.services.trainer.worker", "flotilla.services.trainer.job"
READ_BYTES = 1 << 16
TAIL_LINES = 40
SHOWN_LINES = 4
MAX_LINE_CHARACTERS = 400
KILL_SECONDS = 5.0


@dataclass(frozen=True)
class ExitStatus:
    """How a worker ended.

    Attributes:
        code: exit code; negative for the signal that ended it.
        cause: one sentence, with the last lines that it wrote.
    """

    code: int
    cause: str


class WorkerHandle:
    """One worker process. Made by :meth:`start`.

    Args:
        process: that was started.
        on_message: told what it says.
        is_led: whether it is a node without the leader: nobody there reads what the supervisor says.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, on_message: Callable[[FromWorker], None], *, is_led: bool = False
    ) -> None:
        self._process = process
        self._is_led = is_led
        self._on_message = on_message
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._memory_kills = count_memory_kills()
        self._is_killed = False
        self._readers = [
            asyncio.create_task(self._read_messages(), name="worker messages"),
            asyncio.create_task(self._read_errors(), name="worker errors"),
        ]

    @classmethod
    async def start(
        cls,
        launch: Launch,
        parallelism: ParallelismConfig,
        on_message: Callable[[FromWorker], None],
    ) -> Self:
        """Start the process and tell it what to train. Call it on the thread that outlives the worker."""
        node = launch.assignment.node
        process = await asyncio.create_subprocess_exec(
            *command_of(parallelism, node, launch.host),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment_of(os.environ, parallelism.threads),
        )
        worker = cls(process, on_message, is_led=node is not None and node.rank > 0)
        worker._write(launch.line())
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def tell(self, line: Line) -> None:
        """Send it a message; nothing happens where it has ended."""
        self._write(line.line())

    async def ended(self) -> ExitStatus:
        """Wait for its end, and say how it came about."""
        code = await self._process.wait()
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()
        return ExitStatus(code, self._describe(code))

    async def stop(self, wait_seconds: float) -> None:
        """Wait for an end that was ordered; kill what does not come to it."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it now."""
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        async with asyncio.timeout(KILL_SECONDS):
            await self._process.wait()

    def _write(self, line: bytes) -> None:
        if self._is_led:
            return
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    async def _read_messages(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    message = FROM_WORKER.validate_json(line)
                except ValidationError:
                    self._tail.append(line.decode("utf-8", "replace"))
                    continue
                self._on_message(message)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        while data := await self._process.stderr.read(READ_BYTES):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            *lines, rest = (rest + data).split(b"\n")
            self._tail.extend(line.decode("utf-8", "replace") for line in lines if line.strip())

    def _describe(self, code: int) -> str:
        last = " | ".join(line[-MAX_LINE_CHARACTERS:] for line in list(self._tail)[-SHOWN_LINES:])
        shown = f"; its last lines: {last}" if last else ""
        if code >= 0:
            return f"the training process ended with exit code {code}{shown}"
        name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else str(-code)
        if -code == signal.SIGKILL and not self._is_killed:
            if count_memory_kills() > self._memory_kills:
                return f"the training process was killed by the kernel because memory ran out (SIGKILL){shown}"
            return f"the training process was killed by SIGKILL, by hand or because memory ran out{shown}"
        return f"the training process was ended by {name}{shown}"


def command_of(parallelism: ParallelismConfig, node: JobNode | None, host: str) -> list[str]:
    """Make the command of a worker: one process, or the agent of this host's ranks.

    Args:
        parallelism: the spec's section.
        node: this host's place in a job on several; None where there is one host.
        host: address of this host.
    """
    if parallelism.ranks == 1:
        return python_module(MODULE)
    count = str(parallelism.ranks // parallelism.nodes)
    if node is None:
        return python_module(JOB_MODULE, count)
    place = (str(node.rank), str(node.count), host)
    reached = () if node.rank == 0 else (str(node.host), str(node.port))
    return python_module(JOB_MODULE, count, *place, *reached)


def environment_of(inherited: "os._Environ[str] | dict[str, str]", threads: Threads) -> dict[str, str]:
    """Make the worker's environment: compute threads as the spec says, no secrets of the fleet."""
    kept = without_secrets(inherited)
    count = str(len(usable_cores()) if threads == "auto" else threads)
    return kept | {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        # Two spinning thread pools on few cores are several times slower than one.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
