"""Which member passes a version on to which, where not every member is in the weight group: pure.

gloo connects every member of a group with every other, so a group has few members, one of each host. The others are
relayed to. A member that has received the whole image, and verified its checksum, passes it on to ``FAN_OUT`` others at
a time, so each connects with a few, and those that have the image multiply. Those of one host map the image of the one
among them that fetches it.

    waiting     no member has a place for it yet
    under way   it is in the group, or was given a source, and has not received the version
    received    it passes the version on, unless it has mapped it

A member whose source breaks off continues with the sender by itself. Where no member is left that could pass it on, the
sender does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from flotilla.shared.schemas.publication import Member, Transport

FAN_OUT = 2
"""How many one passes a version on to at a time: one that is slow does not hold up the other."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Members that get a version beside the collective although they could be in it.

    Attributes:
        relayed: services that are relayed to.
        memories: shared memory of those, in the collective or not, that may map each other's images.
    """

    relayed: Collection[str] = ()
    memories: Mapping[str, str] = field(default_factory=dict)


NOBODY = Beside()


@dataclass(frozen=True, slots=True)
class Relays:
    """The progress of a version from member to member.

    Attributes:
        waiting: those without a source, in the order in which they get one.
        free: members that can pass the version on, once for each free place.
        under_way: see above.
        sources: from whom each gets it, those that have received it included.
        mates: members that map the image of another one, until that one has received it.
        mapping: those that have no image of their own to pass on.
        gone: those that left; the places of their receivers are not used again.
        waves: how often the version is passed on until everybody has it, counted when it was announced, or again when
            fewer are left to pass it on.
    """

    sender: str = ""
    waiting: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    under_way: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    mates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mapping: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    waves: int = 0

    @classmethod
    def of(cls, members: Sequence[Member], sender: str) -> Self:
        """Begin with members none of which has received anything."""
        relayed = [each for each in members if each.is_relayed_to]
        if not relayed:
            return cls()
        receivers: dict[str, str] = {}
        collective = frozenset(each.service_id for each in members if each.rank is not None)
        for member in members:
            if member.rank is not None and member.shared_memory is not None:
                receivers.setdefault(member.shared_memory, member.service_id)
        waiting: list[str] = []
        mates: dict[str, tuple[str, ...]] = {}
        for member in relayed:
            name, memory = member.service_id, member.shared_memory
            receiver = name if memory is None else receivers.setdefault(memory, name)
            if receiver == name:
                waiting.append(name)
            else:
                mates[receiver] = (*mates.get(receiver, ()), name)
        mapping = {name for each in mates.values() for name in each}
        mapping |= {each.service_id for each in members if each.transport is Transport.SHARED_MEMORY}
        begun = cls(
            sender=sender,
            waiting=tuple(waiting),
            under_way=collective,
            mates=mates,
            mapping=frozenset(mapping),
            waves=_waves(len(collective), len(waiting)) + bool(mates),
        )
        return begun._fed()

    @property
    def is_used(self) -> bool:
        """Whether any member receives by relay."""
        return self.waves > 0

    def received(self, name: str) -> Self:
        """Continue when a member has received the version, for the first time."""
        if not self.is_used:
            return self
        source = self.sources.get(name)
        freed = () if name in self.mapping else (name,) * FAN_OUT
        if source is not None and source not in self.gone and name not in self.mapping:
            freed = (source, *freed)
        mates = self.mates.get(name, ())
        return replace(
            self,
            # It may report it without a source here: another gateway gave it one.
            waiting=tuple(each for each in self.waiting if each != name) if name in self.waiting else self.waiting,
            free=self.free + freed,
            under_way=(self.under_way | set(mates)) - {name},
            sources={**self.sources, **dict.fromkeys(mates, name)},
            mates={
                receiver: tuple(each for each in others if each != name) if name in others else others
                for receiver, others in self.mates.items()
                if receiver != name
            },
        )._fed()

    def without(self, gone: Collection[str]) -> Self:
        """Continue without some members; the next of a host fetches the version in the place of the one that did."""
        if not self.is_used or not gone:
            return self
        waiting = tuple(each for each in self.waiting if each not in gone)
        mates: dict[str, tuple[str, ...]] = {}
        for receiver, others in self.mates.items():
            remain = [each for each in others if each not in gone]
            first = receiver
            if receiver in gone and remain:
                first = remain.pop(0)
                waiting = (first, *waiting)
            if remain:
                mates[first] = tuple(remain)
        left = [self.sources[each] for each in gone if each in self.sources and each in self.under_way - self.mapping]
        fetching = self.under_way - set(gone) - self.mapping
        # Who is in the group has no source, and passes the version on once it is there.
        able = {*self.free, *left, *(self.sources.get(each, each) for each in fetching)}
        num_able = len(able - self.gone - {*gone, self.sender})
        num_others = len(waiting) + sum(each in self.sources for each in fetching)
        return replace(
            self,
            waves=max(self.waves, _waves(num_able, num_others) + bool(mates)),
            waiting=waiting,
            free=tuple(each for each in (*left, *self.free) if each not in gone and each not in self.gone),
            under_way=self.under_way - set(gone),
            mates=mates,
            mapping=self.mapping - set(waiting),
            gone=self.gone | set(gone),
        )._fed()

    def _fed(self) -> Self:
        """Give a source to each that waits, as far as there are places."""
        free = self.free
        if self.waiting and not free and not self.under_way:
            free = (self.sender,) * FAN_OUT
        num = min(len(free), len(self.waiting))
        if num == 0:
            return self if free is self.free else replace(self, free=free)
        fed = self.waiting[:num]
        return replace(
            self,
            waiting=self.waiting[num:],
            free=free[num:],
            under_way=self.under_way | set(fed),
            sources={**self.sources, **dict(zip(fed, free, strict=False))},
        )


NO_RELAYS = Relays()


def _waves(num_first: int, num_others: int) -> int:
    """Count how often a version is passed on until all have it, of whom so many get it first."""
    covered, waves, wanted = num_first, 0, num_first + num_others
    while covered < wanted:
        covered += FAN_OUT * max(1, covered)
        waves += 1
    return waves


def relayed_of(
    transports: Mapping[str, Transport],
    able: Collection[str],
    memories: Mapping[str, str],
    group: Collection[str],
    most_in_group: int,
) -> frozenset[str]:
    """Choose those to be relayed to: whom a gloo group has no place for, or whose host has a member in it already.

    Args:
        transports: who shall receive, and how.
        able: those that know how to be relayed to; the others are in the group in any case.
        memories: shared memory of those that may map each other's images.
        group: members of the group that is open, which stay: it need not be formed again.
        most_in_group: how many it may have.
    """
    relayed, hosts, num = set[str](), set[str](), 0
    broadcast = [name for name, transport in transports.items() if transport is Transport.GLOO]
    for name in sorted(broadcast, key=lambda each: (each in able, each not in group, each)):
        memory = memories.get(name)
        if name in able and (num >= most_in_group or (memory is not None and memory in hosts)):
            relayed.add(name)
        else:
            num += 1
            if memory is not None:
                hosts.add(memory)
    return frozenset(relayed)
