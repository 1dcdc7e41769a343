"""Repeating a call that is safe to repeat, until it is answered: one loop for every caller.

The caller states what it waits for, which errors are transient, and how long it may last. Without a deadline
it lasts until the answer, or until the caller is cancelled: an infrastructure that is absent costs time, never work.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from flotilla.shared.clock import Pauses
from flotilla.shared.errors import FlotillaError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 1.0
"""Between calls of the fleet's own servers."""
OTHERS_FIRST_PAUSE_SECONDS: Final = 0.5
OTHERS_LONGEST_PAUSE_SECONDS: Final = 30.0
"""Between calls of external servers, such as graders."""
REPORT_SECONDS: Final = 30.0
"""A wait is logged when it begins, and again after so long each time."""

DATA_PLANE: Final = "data plane"
GATEWAY: Final = "gateway"
"""Whom services wait for, in the log."""

Answer = TypeVar("Answer")


class Backoff(Pauses):
    """Pauses between calls, in seconds; of each a random half may be left out, so that callers do not come together.

    Args:
        first_seconds, longest_seconds: of the pauses.
        pause_at_least: seconds that the other side asks for after an error, such as by ``Retry-After``.
    """

    def __init__(
        self,
        first_seconds: float = FIRST_PAUSE_SECONDS,
        longest_seconds: float = LONGEST_PAUSE_SECONDS,
        *,
        pause_at_least: Callable[[Exception], float] = lambda _: 0.0,
    ) -> None:
        super().__init__(first_seconds, longest_seconds)
        self._pause_at_least = pause_at_least

    def after(self, error: Exception) -> float:
        """Return the pause to make after an error."""
        return max(self.failed() * random.uniform(0.5, 1.0), self._pause_at_least(error))


def is_passing(error: Exception) -> bool:
    """Return whether an error is marked as retryable."""
    return isinstance(error, FlotillaError) and error.retryable


async def retry(
    call: Callable[[], Awaitable[Answer]],
    *,
    waiting_for: str,
    deadline_seconds: float | None = None,
    backoff: Backoff | None = None,
    is_retryable: Callable[[Exception], bool] = is_passing,
    now: Callable[[], float] = time.monotonic,
    level: int = logging.WARNING,
) -> Answer:
    """Call until it returns, with growing pauses; an error that is not retryable leaves at once.

    Args:
        call: made again for each attempt; bounds the time of one attempt by itself.
        waiting_for: the awaited server, for the log.
        deadline_seconds: for all attempts; the error of an attempt leaves if the next could not begin before. None to
            continue until cancelled.
        backoff: the pauses.
        is_retryable: chooses the errors after which the call is made again.
        now: a clock in seconds that never goes back.
        level: of what is logged.
    """
    pauses = Backoff() if backoff is None else backoff
    began = now()
    next_report = began
    while True:
        try:
            answer = await call()
        except Exception as error:
            if not is_retryable(error):
                raise
            pause = pauses.after(error)
            waited = now() - began
            if deadline_seconds is not None and waited + pause >= deadline_seconds:
                raise
            if began + waited >= next_report:
                next_report = began + waited + REPORT_SECONDS
                facts = {"waiting_for": waiting_for, "seconds": round(waited, 3), "error": _sentence(error)}
                log.log(level, "waiting for an answer", extra=facts)
            await asyncio.sleep(pause)
            continue
        if next_report > began:
            log.log(level, "answered again", extra={"waiting_for": waiting_for, "seconds": round(now() - began, 3)})
        return answer


def _sentence(error: Exception) -> str:
    return error.detail if isinstance(error, FlotillaError) else repr(error)
