"""Limits reads of samples: few at a time, a rate per token, and none for clients that have disconnected.

Reading a page takes a thread, and much of it the interpreter's lock, which everything else of the gateway waits for.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from flotilla.shared.errors import TooManyRequests

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

    async def read(self, caller: str, read: Callable[[], Result]) -> Result:
        """Read when it is one's turn; a call that is cancelled before is never read.

        Raises:
            TooManyRequests: the caller has as many others open as it may.
        """
        if self._open[caller] >= self._max_of_one:
            raise TooManyRequests(
                f"a token may have {self._max_of_one} requests for samples open: wait for their answers"
            )
        self._open[caller] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    def close(self) -> None:
        """Read no more; what is under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
