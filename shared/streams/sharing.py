"""Scored groups of one experiment, offered to others that train them, too.

While there is a subscriber, each group that enters the scored stream is appended in the same step to one more stream,
under the number that follows the last one's, whatever became of that. Each subscriber has a consumer group of its own
there, whose position is what it has surely taken; what all of them have taken is deleted. Their slowest holds no more
than the experiment allows its streams: beyond that the oldest groups are trimmed, and since numbers are dense, who
comes for them counts what is missing.
"""

from dataclasses import dataclass, field
from typing import Final, Protocol

from flotilla.shared.streams.codec import EntryHeader

TRIMMED: Final = "trimmed"
"""Why a group is dropped that was no longer there when a subscriber came for it."""


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """A group on offer, as the scored stream has it.

    Attributes:
        number: its place among all that were ever offered, from 1.
    """

    number: int
    header: EntryHeader
    payload: bytes
    grades: bytes


@dataclass(frozen=True, slots=True)
class SharedRead:
    """What is on offer behind a number.

    Attributes:
        groups: the first of them, in order.
        reached: the highest number covered: one up to it, and in no group, was trimmed.
        life: of the server that has the offer, from before it was read; see ``Sharing.life``.
    """

    groups: tuple[SharedGroup, ...]
    reached: int
    life: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of groups on offer.

    Attributes:
        count: how many are in the subscriber's own scored stream now, of these.
        through: the number up to which every group was taken, or counted as trimmed.
        is_full: whether a stream of the subscriber takes more memory than it may.
    """

    count: int
    through: int
    is_full: bool = False


class Sharing(Protocol):
    """Groups of one experiment on offer. Every call may raise ``Unavailable``, and be repeated."""

    async def subscribe(self, name: str) -> int:
        """Keep what comes from now on for a subscriber; return the number up to which it has taken everything.

        Of one that has subscribed this is what it confirmed last.
        """
        ...

    async def life(self) -> str:
        """Name the life of the server that has the offer, which ends with it: the next may begin at an earlier state.

        Numbers are given again then, to other groups. So what was read in one life has an effect in that alone. Two
        experiments may be on two servers of a cluster, with a life each. "" where a server does not name it.
        """
        ...

    async def read(self, after: int, count: int) -> SharedRead:
        """Read groups behind a number, without an effect."""
        ...

    async def confirm(self, name: str, number: int, life: str = "") -> None:
        """Note that a subscriber has everything up to a number, and delete what all have.

        Raises:
            Unavailable: also where the life in which the number was read is over.
        """
        ...

    async def unsubscribe(self, name: str) -> None:
        """Keep nothing for a subscriber any more."""
        ...

    async def subscribers(self) -> dict[str, int]:
        """List the subscribers, and what each has confirmed."""
        ...
