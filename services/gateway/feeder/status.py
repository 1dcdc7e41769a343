"""What the feeder of one experiment knows at any time. In memory: a restarted task continues with it."""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from flotilla.services.gateway.feeder.admission import AdmissionWait
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.redis.connection import COMPONENT

MIB = 1024**2
STREAMS = "streams"
"""Component of a stream that has all the memory that it may."""
HINTS = {
    HopName.SCORED: "; groups that are planned leave it with the next checkpoint, which the trainer then makes early: "
    "raise the bound if those of one step do not fit"
}


@dataclass(frozen=True, slots=True)
class FullStream:
    """A stream that takes as much of the server's memory as it may, in bytes."""

    hop: HopName
    bound: int

    @property
    def cause(self) -> str:
        """What this means for the experiment, in one sentence."""
        return (
            f"stream {self.hop.value} has reached resources.stream_bytes ({self.bound / MIB:g} MiB): nothing is "
            f"issued, and nothing that would go there is claimed, until it is emptied{HINTS.get(self.hop, '')}"
        )


class Blockage(NamedTuple):
    """What takes no task in, and why."""

    component: str
    cause: str


class IssueTimes:
    """When this gateway issued which groups; of those before the newest 4,096 batches it knows nothing."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=4096)

    def add(self, first_group: int, at: float) -> None:
        """Record a batch that begins with a group; ids go back where Redis did."""
        while self._batches and self._batches[-1][0] >= first_group:
            self._batches.pop()
        self._batches.append((first_group, at))

    def age(self, group: int, now: float) -> float | None:
        """Return how long ago a group was issued, in seconds; None where that is not known."""
        at = bisect_right(self._batches, group, key=itemgetter(0)) - 1
        return None if at < 0 else max(0.0, now - self._batches[at][1])


@dataclass(slots=True)
class FeederStatus:
    """What the feeder saw last, and how long it waited.

    Attributes:
        ledger: the train lane as last read; None until it was.
        full_stream: the first stream of the train lane that has reached its bound, if any.
        refusal: why the data plane took nothing in when it was last asked, if so.
        wait: how long the admission budget held the feeder.
        issued: when groups were issued, in seconds of the monotonic clock.
    """

    ledger: Ledger | None = None
    full_stream: FullStream | None = None
    refusal: str | None = None
    wait: AdmissionWait = field(default_factory=AdmissionWait)
    issued: IssueTimes = field(default_factory=IssueTimes)

    def why_blocked(self) -> Blockage | None:
        """Return what takes no more, the server or one of the streams, or None if all of them do."""
        if self.refusal is not None:
            return Blockage(COMPONENT, self.refusal)
        return None if self.full_stream is None else Blockage(STREAMS, self.full_stream.cause)
