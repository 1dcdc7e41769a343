"""Membership of a weight group: who belongs to an epoch, and when an open epoch may be used again.

Members of a collective have ranks, dense from 1 in the order of service ids; rank 0 is the sending trainer. Members
that map the image have none, and an epoch of such members alone needs no rendezvous. An epoch's number never returns
within an experiment, whatever restarts.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shared.schemas.publication import Member, Rendezvous, Transport


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

    @property
    def collective(self) -> frozenset[str]:
        """Services that take part in the broadcast."""
        return frozenset(member.service_id for member in self.members if member.rank is not None)

    @property
    def is_ready(self) -> bool:
        """Whether nothing has to be opened (any more) before its members can begin."""
        return self.rendezvous is not None or not self.collective


def members_of(transports: Mapping[str, Transport]) -> tuple[Member, ...]:
    """Assign each service of a collective its rank."""
    members = []
    last_rank = 0
    for service_id, transport in sorted(transports.items()):
        is_mapped = transport is Transport.SHARED_MEMORY
        last_rank += 0 if is_mapped else 1
        members.append(Member(service_id=service_id, rank=None if is_mapped else last_rank, transport=transport))
    return tuple(members)


def without(members: Iterable[Member], gone: Collection[str]) -> tuple[Member, ...]:
    """Leave some services out; the ranks of the others become dense again."""
    return members_of({each.service_id: each.transport for each in members if each.service_id not in gone})


def epoch_for(previous: Epoch | None, last_number: int, sender: str, transports: Mapping[str, Transport]) -> Epoch:
    """Reuse the open epoch if sender and membership are the same, else number a new one.

    Args:
        previous: the epoch that is still open and healthy, if any.
        last_number: the highest number used so far.
        sender: the trainer service that will send.
        transports: who shall receive, and how.
    """
    members = members_of(transports)
    if previous is not None and previous.is_ready and (previous.sender, previous.members) == (sender, members):
        return previous
    return Epoch(last_number + 1, sender, members)
