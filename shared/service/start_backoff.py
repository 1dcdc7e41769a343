"""When a start that failed for a passing reason is tried again."""

import asyncio

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


class StartBackoff:
    """Pauses between starts: each twice as long as the one before, up to a bound, without an end.

    An endpoint that took too long to start, a server that does not answer: such reasons pass, and nobody but the
    service itself would try again. What does not pass (a model that cannot be loaded) is for its owner to report.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._due: float | None = None
        self.is_due = False
        """Whether a start was postponed and its pause is over."""

    def postpone(self, pause_seconds: float | None = None) -> float:
        """Count a failed start; return the seconds until the next one is due.

        Args:
            pause_seconds: instead of the pause that grows.
        """
        pause = pause_seconds
        if pause is None:
            pause = min(FIRST_PAUSE_SECONDS * 2.0**self._failures, LONGEST_PAUSE_SECONDS)
        self._failures = min(self._failures + 1, 30)
        self._due, self.is_due = asyncio.get_running_loop().time() + pause, False
        return pause

    @property
    def is_pending(self) -> bool:
        """Whether a start was postponed and its pause is not over."""
        return self._due is not None

    def reset(self) -> None:
        """Forget the failures: a start has succeeded, or is no longer wanted."""
        self._failures, self._due, self.is_due = 0, None, False

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait for news, or for the end of the pause if a start was postponed; the news is taken."""
        try:
            async with asyncio.timeout_at(self._due):
                await changed.wait()
        except TimeoutError:
            # Once: what is due but not wanted now must not be waited for without a pause.
            self._due, self.is_due = None, True
        changed.clear()
