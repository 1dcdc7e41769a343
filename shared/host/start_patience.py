"""How long a process may take to start: a deadline that progress puts off, and one variable that scales all of them.

On a machine with forty times more work than cores a start takes forty times as long, and nothing is wrong with it. So a
process that computes is given more time, and only one that makes no progress is killed when its time is over.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

from flotilla.shared.errors import InvalidRequest

VARIABLE = "FLOTILLA_START_PATIENCE"
PROGRESS_SECONDS = 0.5
"""Computing for so long is progress: what only waits and looks now and then needs longer for it than its deadline."""
LONGEST = 5
"""No start takes more times its limit than this, however much it computes."""
LOOK_SECONDS = 1.0


def patience_from(values: Mapping[str, str]) -> float:
    """Read ``FLOTILLA_START_PATIENCE``, which every limit of a start is multiplied by; 1 where it is not set.

    Raises:
        InvalidRequest: it is no number above 0.
    """
    text = values.get(VARIABLE) or "1"
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise InvalidRequest(f"{VARIABLE} must be a number above 0, such as 2 for twice as long, got {text!r}")
    return factor


def patient(seconds: float) -> float:
    """Multiply a start's limit by the patience that the environment asks for.

    Raises:
        InvalidRequest: it is no number above 0.
    """
    return seconds * patience_from(os.environ)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Add up what processes and their children have computed so far; of one that has ended nothing."""
    import psutil  # agents read settings too, with an interpreter that may have no more than httpx and pydantic

    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
    return total


class StartDeadline:
    """The end of one start's time, which progress puts off.

    Args:
        seconds: without progress; multiplied by the patience.
        progress: something that grows from 0, by ``PROGRESS_SECONDS`` or more while the start gets on.
        patience: what limits are multiplied by.
        now: seconds of a clock.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], float],
        *,
        patience: float = 1.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds * patience
        self._progress, self._now = progress, now
        self._began = self._extended = now()
        self._reached = 0.0

    def left(self) -> float:
        """Return how many seconds there are from now on, if nothing continues; 0 or less when time is over."""
        now, reached = self._now(), self._progress()
        # A process that was started again has computed less than its predecessor.
        if abs(reached - self._reached) >= PROGRESS_SECONDS:
            self._extended, self._reached = now, reached
        return min(self._extended + self.seconds, self._began + LONGEST * self.seconds) - now


@contextlib.asynccontextmanager
async def start_timeout(seconds: float, pid: int) -> AsyncIterator[None]:
    """Bound what waits for the start of a process, as ``asyncio.timeout`` does.

    Args:
        seconds: without progress.
        pid: of the process whose computing, with its children's, is progress.

    Raises:
        TimeoutError: it stood still for so long, or computed five times as long without an end.
    """
    deadline = StartDeadline(seconds, lambda: cpu_seconds([pid]), patience=patience_from(os.environ))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(deadline.seconds) as bound:
        extending = asyncio.create_task(_extend(bound, deadline, loop), name="deadline of a start")
        try:
            yield
        finally:
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)


async def _extend(bound: asyncio.Timeout, deadline: StartDeadline, loop: asyncio.AbstractEventLoop) -> None:
    left = deadline.seconds
    while left > 0:
        # Before its end at the latest, so that what was done by then counts.
        await asyncio.sleep(min(LOOK_SECONDS, left / 2))
        left = await asyncio.to_thread(deadline.left)
        with contextlib.suppress(RuntimeError):  # it expires just now
            bound.reschedule(loop.time() + left)
