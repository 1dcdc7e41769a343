"""Reads the samples of experiments for those who look at them, and brings the index of them up to date meanwhile."""

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from flotilla.services.gateway.records.repository import Experiment, PerExperiment
from flotilla.shared.errors import TooManyRequests
from flotilla.shared.samples.index import SampleIndex

log = logging.getLogger(__name__)

READ_SECONDS = 0.5
"""At a stretch: a query takes its turn in between."""
PAUSE_SECONDS = 0.1


Result = TypeVar("Result")

AT_ONCE: Final = 2
MAX_OF_ONE: Final = 8
"""Requests of one token that are read or wait for it. Pages are read one after another."""


class SampleReads:
    """Reads in threads of its own.

    Args:
        at_once: threads.
        max_of_one: open requests of one caller.
    """

    def __init__(self, at_once: int = AT_ONCE, max_of_one: int = MAX_OF_ONE) -> None:
        self._max_of_one = max_of_one
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="samples")
        self._open: Counter[str] = Counter()
        self._turns = asyncio.Semaphore(at_once)

    async def read(self, caller: str, read: Callable[[], Result]) -> Result:
        """Read when it is one's turn; a call that is cancelled before is never read.

        Raises:
            TooManyRequests: the caller has as many others open as it may.
        """
        with self._counted(caller):
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for one's turn to read from a store: as many have one at once as there are threads.

        Raises:
            TooManyRequests: the caller has as many others open as it may.
        """
        with self._counted(caller):
            async with self._turns:
                yield

    @contextmanager
    def _counted(self, caller: str) -> Iterator[None]:
        if self._open[caller] >= self._max_of_one:
            raise TooManyRequests(
                f"a token may have {self._max_of_one} requests for samples and series open: wait for their answers"
            )
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    def close(self) -> None:
        """Read no more; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class SampleIndexes:
    """The index of each experiment, opened when it is first asked for, and those who read what it finds.

    Files are read for whoever looks: nobody may ever, and a run writes one in each step.
    """

    def __init__(self) -> None:
        self.reads = SampleReads()
        self._opened: PerExperiment[list[SampleIndex]] = PerExperiment(list)
        self._behind: PerExperiment[list[asyncio.Task[None]]] = PerExperiment(list)
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, experiment: Experiment) -> SampleIndex:
        """Find the index of an experiment."""
        opened = self._opened.of(experiment)
        if not opened:
            opened.append(SampleIndex(Path(experiment.record.directory)))
        return opened[0]

    def forget(self, experiment: Experiment) -> None:
        """Close the index of an experiment whose samples were deleted; blocks while one is read."""
        opened = self._opened.of(experiment)
        while opened:
            opened.pop().close()

    def read_on(self, experiment: Experiment) -> None:
        """Read in the background what a look has left unread: who looks again finds more."""
        behind = self._behind.of(experiment)
        if behind and not behind[0].done():
            return
        reading = asyncio.create_task(self._read_all(experiment), name="sample index")
        behind[:] = [reading]
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)

    async def _read_all(self, experiment: Experiment) -> None:
        opened = self._opened.of(experiment)
        try:
            while opened:
                _, num_unread = await asyncio.to_thread(opened[0].refresh, seconds=READ_SECONDS)
                if num_unread == 0:
                    return
                await asyncio.sleep(PAUSE_SECONDS)
        except (OSError, sqlite3.Error) as error:
            # The next look tries again.
            facts = {"experiment_id": experiment.id, "error": repr(error)}
            log.warning("samples cannot be indexed", extra=facts)

    def close(self) -> None:
        """Read no more; what is under way ends by itself."""
        for each in self._tasks:
            each.cancel()
        self.reads.close()
