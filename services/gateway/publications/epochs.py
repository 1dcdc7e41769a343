"""Membership of a weight group: who belongs to an epoch, and when an open epoch may be used again.

Members of a collective have ranks, dense from 1 in the order of service ids; rank 0 is the sending trainer. An engine
that is a member itself has as many as the devices that it divides its model among. Members that map the image have
none, and an epoch of such members alone needs no rendezvous. An epoch's number never returns within an experiment,
whatever restarts.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from flotilla.shared.schemas.publication import Member, Rendezvous, Transport


@dataclass(frozen=True, slots=True)
class Epoch:
    """One membership of the weight group.

    Attributes:
        number: grows with each change of membership; 0 before the first.
        sender: the trainer service that opened it.
        members: receivers with their ranks.
        rendezvous: where they meet; None until the sender has opened it.
        service_ids: members' services in the order of their ranks.
        by_id: members by service.
        collective: services that take part in the broadcast.
    """

    number: int
    sender: str
    members: tuple[Member, ...]
    rendezvous: Rendezvous | None = None
    # Made once: each member asks for its own part of a thousand.
    service_ids: tuple[str, ...] = field(init=False, compare=False, repr=False)
    by_id: Mapping[str, Member] = field(init=False, compare=False, repr=False)
    collective: frozenset[str] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {member.service_id: member for member in self.members}
        object.__setattr__(self, "service_ids", tuple(by_id))
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(
            self, "collective", frozenset(name for name, member in by_id.items() if member.rank is not None)
        )

    @property
    def is_ready(self) -> bool:
        """Whether nothing has to be opened (any more) before its members can begin."""
        return self.rendezvous is not None or not self.collective


def members_of(transports: Mapping[str, Transport], engine_ranks: int = 1) -> tuple[Member, ...]:
    """Assign each service of a collective its ranks.

    Args:
        transports: who shall receive, and how.
        engine_ranks: of each engine, where engines are members.
    """
    members = []
    next_rank = 1
    for service_id, transport in sorted(transports.items()):
        rank = None if transport is Transport.SHARED_MEMORY else next_rank
        num_ranks = engine_ranks if transport is Transport.ENGINE else 1
        next_rank += num_ranks if rank is not None else 0
        members.append(Member(service_id=service_id, rank=rank, num_ranks=num_ranks, transport=transport))
    return tuple(members)


def without(members: Iterable[Member], gone: Collection[str]) -> tuple[Member, ...]:
    """Leave some services out; the ranks of the others become dense again."""
    remain = [each for each in members if each.service_id not in gone]
    engine_ranks = max((each.num_ranks for each in remain), default=1)
    return members_of({each.service_id: each.transport for each in remain}, engine_ranks)


def epoch_for(
    previous: Epoch | None,
    last_number: int,
    sender: str,
    transports: Mapping[str, Transport],
    engine_ranks: int = 1,
) -> Epoch:
    """Reuse the open epoch if sender and membership are the same, else number a new one.

    Args:
        previous: the epoch that is still open and healthy, if any.
        last_number: the highest number used so far.
        sender: the trainer service that will send.
        transports: who shall receive, and how.
        engine_ranks: of each engine, where engines are members.
    """
    members = members_of(transports, engine_ranks)
    if previous is not None and previous.is_ready and (previous.sender, previous.members) == (sender, members):
        return previous
    return Epoch(last_number + 1, sender, members)
