"""Membership of a weight group: who belongs to an epoch, and when an open epoch may be used again.

Ranks are dense from 1 in the order of service ids; rank 0 is the sending trainer. An epoch's number never returns
within an experiment, whatever restarts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.schemas.publication import Member, Rendezvous


@dataclass(frozen=True, slots=True)
class Epoch:
    """One membership of the weight group.

    Attributes:
        number: grows with each change of membership; 0 before the first.
        sender: the trainer service that opened it.
        members: receivers with their ranks.
        rendezvous: where they meet; None until the sender has opened it.
    """

    number: int
    sender: str
    members: tuple[Member, ...]
    rendezvous: Rendezvous | None = None

    @property
    def service_ids(self) -> tuple[str, ...]:
        """Members' services in the order of their ranks."""
        return tuple(member.service_id for member in self.members)


def members_of(service_ids: Iterable[str]) -> tuple[Member, ...]:
    """Give each service its rank."""
    return tuple(Member(service_id=each, rank=rank) for rank, each in enumerate(sorted(set(service_ids)), start=1))


def epoch_for(previous: Epoch | None, last_number: int, sender: str, service_ids: Iterable[str]) -> Epoch:
    """Reuse the open epoch if sender and membership are the same, else number a new one.

    Args:
        previous: the epoch that is still open and healthy, if any.
        last_number: the highest number used so far.
        sender: the trainer service that will send.
        service_ids: who shall receive.
    """
    members = members_of(service_ids)
    is_open = previous is not None and previous.rendezvous is not None
    if previous is not None and is_open and (previous.sender, previous.members) == (sender, members):
        return previous
    return Epoch(last_number + 1, sender, members)
