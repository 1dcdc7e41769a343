"""What the feeder of one experiment knows at any time. In memory: a restarted task goes on with it."""

from dataclasses import dataclass, field

from services.gateway.feeder.admission_wait import AdmissionWait
from shared.streams.keys import HopName
from shared.streams.ledger import Ledger

MIB = 1024**2
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


@dataclass(slots=True)
class FeederStatus:
    """What the feeder saw last, and how long it waited.

    Attributes:
        ledger: the train lane as last read; None until it was.
        full_stream: the first stream of the train lane that has reached its bound, if any.
        wait: how long the admission budget held the feeder.
    """

    ledger: Ledger | None = None
    full_stream: FullStream | None = None
    wait: AdmissionWait = field(default_factory=AdmissionWait)

    def why_blocked(self) -> str | None:
        """Return why no stream takes more, or None if all of them do."""
        return None if self.full_stream is None else self.full_stream.cause
