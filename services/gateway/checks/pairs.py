"""Which services try to reach which: pure, and bounded whatever the size of the fleet.

A host is an address on a machine: a service that registers with another's address is not on it.
On each host one service of each kind represents all of that kind. Of a kind that few hosts have, every host tries all;
of others each tries a few, chosen so that each is tried by as many. What is tried grows with hosts, not with pairs.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flotilla.shared.checks.addresses import is_of_each_machine
from flotilla.shared.schemas.service import ServiceKind

MOST_OF_A_KIND: Final = 8
"""Hosts with a kind of service that one host tries to reach."""
NEEDS: Final[Mapping[ServiceKind, tuple[ServiceKind, ...]]] = {
    ServiceKind.ROLLOUT: (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.SANDBOX),
    ServiceKind.TRAINER: (ServiceKind.TRAINER, ServiceKind.ROLLOUT),
    ServiceKind.REWARD: (ServiceKind.SANDBOX,),
    ServiceKind.SANDBOX: (),
}
"""Weights are pulled and broadcast among trainers and rollouts; programs are run by sandboxes."""


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A service.

    Attributes:
        host: where others reach it.
        machine: identity of its machine; empty where it does not say.
    """

    id: str
    host: str
    kind: ServiceKind
    machine: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """The host, and the machine that it is on."""
        return self.host, self.machine


_Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Which service tries to reach which.

    Attributes:
        targets: ids of the services that one should reach, by its own.
        num_hosts: pairs of hosts, in one direction each, of which the first needs the second.
        num_tried: those of them that are tried.
    """

    targets: Mapping[str, tuple[str, ...]]
    num_hosts: int
    num_tried: int


def representatives(members: Iterable[Member]) -> list[Member]:
    """Choose one service of each kind on each host, the first by its id."""
    found: dict[tuple[_Place, ServiceKind], Member] = {}
    for each in sorted(members):
        found.setdefault((each.place, each.kind), each)
    return list(found.values())


def choose_pairs(members: Sequence[Member], *, seed: str = "", most: int = MOST_OF_A_KIND) -> Pairs:
    """Choose what is tried.

    Args:
        members: one of each kind on each host.
        seed: another one tries other pairs, where not all are tried.
        most: hosts with a kind that one host tries to reach.
    """
    by_kind: dict[ServiceKind, dict[_Place, Member]] = {kind: {} for kind in ServiceKind}
    for each in members:
        by_kind[each.kind][each.place] = each
    order = random.Random(seed)
    rings = {kind: _shuffled(by_kind[kind], order) for kind in ServiceKind}
    targets: dict[str, list[str]] = {}
    tried: set[tuple[_Place, _Place]] = set()
    asked: set[tuple[_Place, ServiceKind]] = set()
    for caller in sorted(members):
        for kind in NEEDS[caller.kind]:
            others = by_kind[kind]
            # What another service of this host tries already: the way is the same.
            if (caller.place, kind) in asked:
                continue
            asked.add((caller.place, kind))
            for place in _neighbours(rings[kind], caller.place, most):
                if not is_elsewhere(others[place], caller.machine):
                    targets.setdefault(caller.id, []).append(others[place].id)
                    tried.add((caller.place, place))
    return Pairs({name: tuple(ids) for name, ids in targets.items()}, _count_needed(members, by_kind), len(tried))


def is_elsewhere(target: Member, machine: str) -> bool:
    """Whether its address would lead callers on a machine to that machine itself, and not to the service."""
    return target.machine != machine and is_of_each_machine(target.host)


def _count_needed(members: Iterable[Member], by_kind: Mapping[ServiceKind, Mapping[_Place, Member]]) -> int:
    needs: dict[_Place, frozenset[ServiceKind]] = {}
    for each in members:
        needs[each.place] = needs.get(each.place, frozenset()) | frozenset(NEEDS[each.kind])
    # Hosts of the same kinds need the same: there may be a million pairs.
    hosts = {kinds: {place for kind in kinds for place in by_kind[kind]} for kinds in set(needs.values())}
    return sum(len(hosts[kinds]) - (place in hosts[kinds]) for place, kinds in needs.items())


def _shuffled(hosts: Iterable[_Place], order: random.Random) -> list[_Place]:
    ring = sorted(hosts)
    order.shuffle(ring)
    return ring


def _neighbours(ring: Sequence[_Place], host: _Place, most: int) -> list[_Place]:
    """Choose hosts of a ring: those behind a host's own place, so that all are tried equally often.

    One that is not in the ring has a place by its name.
    """
    others = [each for each in ring if each != host]
    if len(others) <= most:
        return others
    place = ring.index(host) if host in ring else random.Random(" ".join(host)).randrange(len(others))
    return [others[(place + step) % len(others)] for step in range(most)]
