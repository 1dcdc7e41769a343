"""Answers that come later than they were asked for: a grader's callback, an agent's reward.

Who waits for an answer says so first, and until when; then one answer is taken. The wait survives those who wait and
those who deliver, because both ends are kept in the data plane. Times are the server's, in seconds since the epoch.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from flotilla.shared.clock import Pauses
from flotilla.shared.net.retry import DATA_PLANE, Backoff, retry

KEPT_SECONDS = 3600.0
"""How long after its deadline it is remembered that something was expected, so that late ones are told so."""
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
    """An answer that somebody waits for.

    Attributes:
        key: with which who delivers it must sign; empty if they need not.
        seconds_left: until the deadline; 0 after it.
        is_accepted: the other side said that it will answer.
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
        """Note that the other side has said that it will answer."""
        ...

    async def find(self, name: str) -> Expected | None:
        """Return its state; None if it was never expected, or its deadline passed long ago."""
        ...

    async def deliver(self, name: str, answer: bytes) -> Delivery:
        """Bring the answer; the first counts."""
        ...


async def wait_for_answer(mailbox: Mailbox, name: str) -> bytes | None:
    """Wait until the answer has come, or its deadline is over; None then, and if it is not expected (any more).

    While the data plane is absent it keeps waiting: the deadline is then looked at afterwards.
    """
    pauses = Pauses(FIRST_POLL_SECONDS, LONGEST_POLL_SECONDS)
    while True:
        found = await retry(lambda: mailbox.find(name), waiting_for=DATA_PLANE, backoff=Backoff(longest_seconds=5.0))
        if found is None or found.answer is not None:
            return None if found is None else found.answer
        if found.seconds_left <= 0:
            return None
        await asyncio.sleep(min(pauses.failed(), found.seconds_left + FIRST_POLL_SECONDS))
