"""The process in which several experiments train: each as if it were a worker of its own, on bases that all have.

Lines on standard input are ``[number, line]``, a worker's number and a message of its supervisor; null instead of
the line closes that channel. Lines on standard output are ``[number, line]`` likewise, and ``[number, null,
exit code]`` once it has ended. An error of one ends it alone; the end of the input ends all.
"""

import asyncio
import gc
import json
import logging
from functools import partial
from typing import IO, cast

from flotilla.services.trainer.models.shared_bases import SharedBases
from flotilla.services.trainer.parallel.turns import ComputeTurns
from flotilla.services.trainer.worker.compute import Company
from flotilla.services.trainer.worker.run import Orphaned, WorkerProcess, sweep_images
from flotilla.services.trainer.worker.session import SessionDeps

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_ORPHANED = 3
MAX_LINE_BYTES = 1 << 24
END_SECONDS = 20.0
"""How long workers may take to end when their supervisors are gone."""


class Answers:
    """What one worker writes to: lines of its own among those of all.

    Args:
        number: of the worker.
        out: where lines of all go.
    """

    def __init__(self, number: int, out: IO[bytes]) -> None:
        self._number, self._out = number, out
        self._rest = b""

    def write(self, data: bytes) -> int:
        """Send whole lines on."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._send([self._number, line.decode()])
        return len(data)

    def flush(self) -> None:
        """See ``IO.flush``."""
        self._out.flush()

    def end(self, code: int) -> None:
        """Report that the worker has ended."""
        self._send([self._number, None, code])
        self.flush()

    def _send(self, content: list[object]) -> None:
        self._out.write(json.dumps(content).encode() + b"\n")


class Workers:
    """All workers of this process.

    Args:
        out: where their lines go.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._make_deps = partial(SessionDeps, company=Company(SharedBases(), ComputeTurns()))
        self._orders: dict[int, asyncio.StreamReader] = {}
        self._newest = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Forward supervisors' messages until all channels are closed."""
        sweep_images()
        while line := await lines.readline():
            number, said = json.loads(line)
            self._hear(number, said)
        for orders in self._orders.values():
            orders.feed_eof()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_SECONDS)

    def _hear(self, number: int, said: str | None) -> None:
        orders = self._orders.get(number)
        if said is None:
            if orders is not None:
                orders.feed_eof()
            return
        if orders is None:
            if number <= self._newest:
                return  # A worker that receives a message late has ended: it is no new one.
            self._newest = number
            orders = self._orders[number] = asyncio.StreamReader(limit=MAX_LINE_BYTES)
            task = asyncio.create_task(self._run(number, orders), name=f"worker {number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        orders.feed_data(said.encode() + b"\n")

    async def _run(self, number: int, orders: asyncio.StreamReader) -> None:
        answers = Answers(number, self._out)
        code = EXIT_FAILED
        try:
            code = await WorkerProcess(orders, cast(IO[bytes], answers), None, self._make_deps, sweeps=False).run()
        except Orphaned:
            code = EXIT_ORPHANED
        except Exception:
            log.exception("a worker ended, others go on")
        finally:
            del self._orders[number]
            # Layers and adapters refer to each other.
            gc.collect()
            answers.end(code)
