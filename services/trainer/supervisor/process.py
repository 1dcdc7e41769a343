"""The worker as a child process: started with its launch on standard input, watched until it ends."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from flotilla.services.trainer.wire import FROM_WORKER, FromWorker, Launch, Line
from flotilla.shared.children.processes import READ_BYTES, python_module
from flotilla.shared.children.spawning import Child, spawn
from flotilla.shared.config.base.model import Threads
from flotilla.shared.config.sections.parallelism import ParallelismConfig
from flotilla.shared.environment.secret_variables import without_secrets
from flotilla.shared.host.cores import usable_cores
from flotilla.shared.schemas.service import JobNode

MODULE, JOB_MODULE = "flotilla.services.trainer.worker", "flotilla.services.trainer.job"
KILL_SECONDS = 5.0
LAST_MESSAGES_SECONDS = 1.0


@dataclass(frozen=True)
class ExitStatus:
    """How a worker ended.

    Attributes:
        code: exit code; negative for the signal that ended it.
        cause: one sentence, with the last lines that it wrote.
        is_with_others: whether its process trained several experiments and ended with all of them: whose doing that
            was is not known.
    """

    code: int
    cause: str
    is_with_others: bool = False


class WorkerHandle:
    """One worker process. Made by :meth:`start`.

    Args:
        child: that was started.
        on_message: called with its messages.
        is_led: whether it is a node without the leader: its ranks do not read the supervisor's messages.
    """

    def __init__(self, child: Child, on_message: Callable[[FromWorker], None], *, is_led: bool = False) -> None:
        self._child, self._on_message, self._is_led = child, on_message, is_led
        self._reading = asyncio.create_task(self._read_messages(), name="worker messages")

    @classmethod
    async def start(
        cls,
        launch: Launch,
        parallelism: ParallelismConfig,
        on_message: Callable[[FromWorker], None],
    ) -> Self:
        """Start the process and send it its launch. Call it on the thread that outlives the worker."""
        node = launch.assignment.node
        child = await spawn(
            command_of(parallelism, node, launch.host),
            environment=environment_of(os.environ, parallelism.threads),
            max_line_bytes=READ_BYTES,
            leads_session=False,  # A kill of the service's process group ends the worker, too.
        )
        worker = cls(child, on_message, is_led=node is not None and node.rank > 0)
        worker.tell(launch)
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.process.pid

    def tell(self, line: Line) -> None:
        """Send it a message; nothing happens where it has ended."""
        if not self._is_led and not self._child.stdin.is_closing():
            self._child.stdin.write(line.line())

    async def ended(self) -> ExitStatus:
        """Wait for its end, and return its cause."""
        code = await self._child.ended()
        await asyncio.wait([self._reading], timeout=LAST_MESSAGES_SECONDS)
        self._reading.cancel()
        await self._child.end()
        return ExitStatus(code, f"the training process {self._child.cause()}")

    async def stop(self, wait_seconds: float) -> None:
        """Wait for an end that was ordered; kill what does not come to it."""
        try:
            async with asyncio.timeout(wait_seconds):
                await self._child.process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it now."""
        async with asyncio.timeout(KILL_SECONDS):
            await self._child.end()

    async def _read_messages(self) -> None:
        rest = b""
        while data := await self._child.stdout.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    message = FROM_WORKER.validate_json(line)
                except ValidationError:
                    self._child.words.add(line)
                    continue
                self._on_message(message)


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
