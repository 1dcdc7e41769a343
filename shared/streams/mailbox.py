"""Answers that come later than they were asked for: a grader's callback, an agent's reward.

A waiter registers first, with a deadline; then one answer is accepted. The wait survives the waiters and
the senders, because both ends are kept in the data plane. Times are the server's, in seconds since the epoch.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from flotilla.shared.clock import Pauses
from flotilla.shared.net.retry import DATA_PLANE, Backoff, retry

KEPT_SECONDS = 3600.0
"""How long after its deadline an expectation is remembered, so that late answers get a clear refusal."""
FIRST_POLL_SECONDS = 0.05
LONGEST_POLL_SECONDS = 1.0


class Delivery(StrEnum):
    """What became of an answer."""

    TAKEN = "taken"
    AGAIN = "again"
    """The same answer was taken before."""
    OTHER = "other"
    """Another answer was taken before; this one was not."""
    LATE = "late"
    UNKNOWN = "unknown"
    """It is not expected, or its deadline passed long ago."""


@dataclass(frozen=True, slots=True)
class Expected:
    """An awaited answer.

    Attributes:
        key: with which its sender must sign; empty: no signature.
        seconds_left: until the deadline; 0 after it.
        is_accepted: the other side has announced an answer.
        answer: None until it came.
    """

    key: str
    seconds_left: float
    is_accepted: bool = False
    answer: bytes | None = None


class Mailbox(Protocol):
    """What is expected in one experiment. Every call may raise ``Unavailable``, and may be repeated."""

    async def expect(self, name: str, *, key: str = "", seconds: float) -> Expected:
        """Register an expected answer; one that is registered already keeps its key and its deadline."""
        ...

    async def accept(self, name: str) -> None:
        """Record that the other side has announced an answer."""
        ...

    async def find(self, name: str) -> Expected | None:
        """Return its state; None if it was never expected, or its deadline passed long ago."""
        ...

    async def deliver(self, name: str, answer: bytes) -> Delivery:
        """Bring the answer; the first counts."""
        ...


async def wait_for_answer(mailbox: Mailbox, name: str) -> bytes | None:
    """Wait until the answer has come, or its deadline is over; None then, and if it is not expected (any more).

    While the data plane is absent it keeps waiting: the deadline is then checked afterwards.
    """
    pauses = Pauses(FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS)
    while True:
        found = await retry(lambda: mailbox.find(name), waiting_for=DATA_PLANE, backoff=Backoff(longest_seconds=5.0))
        if found is None or found.answer is not None:
            return None if found is None else found.answer
        if found.seconds_left <= 0:
            return None
        await asyncio.sleep(min(pauses.failed(), found.seconds_left + FIRST_POLL_SECONDS))
