"""Which services try to reach which: pure, and bounded whatever the size of the fleet.

On each host one service of each kind stands for all of that kind. Of a kind that few hosts have, every host tries all;
of others each tries a few, chosen so that each is tried by as many. What is tried grows with hosts, not with pairs.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
    """A service: its id, where others reach it, and what it is."""

    id: str
    host: str
    kind: ServiceKind


@dataclass(frozen=True, slots=True)
class Pairs:
    """Who tries to reach whom.

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
    found: dict[tuple[str, ServiceKind], Member] = {}
    for each in sorted(members):
        found.setdefault((each.host, each.kind), each)
    return list(found.values())


def choose_pairs(members: Sequence[Member], *, seed: str = "", most: int = MOST_OF_A_KIND) -> Pairs:
    """Choose what is tried.

    Args:
        members: one of each kind on each host.
        seed: another one tries other pairs, where not all are tried.
        most: hosts with a kind that one host tries to reach.
    """
    by_kind: dict[ServiceKind, dict[str, Member]] = {kind: {} for kind in ServiceKind}
    for each in members:
        by_kind[each.kind][each.host] = each
    order = random.Random(seed)
    rings = {kind: _shuffled(by_kind[kind], order) for kind in ServiceKind}
    targets: dict[str, list[str]] = {}
    tried: set[tuple[str, str]] = set()
    asked: set[tuple[str, ServiceKind]] = set()
    for caller in sorted(members):
        for kind in NEEDS[caller.kind]:
            others = by_kind[kind]
            # What another service of this host tries already: the way is the same.
            if (caller.host, kind) in asked:
                continue
            asked.add((caller.host, kind))
            for host in _neighbours(rings[kind], caller.host, most):
                targets.setdefault(caller.id, []).append(others[host].id)
                tried.add((caller.host, host))
    return Pairs({name: tuple(ids) for name, ids in targets.items()}, _count_needed(members, by_kind), len(tried))


def _count_needed(members: Iterable[Member], by_kind: Mapping[ServiceKind, Mapping[str, Member]]) -> int:
    needs: dict[str, frozenset[ServiceKind]] = {}
    for each in members:
        needs[each.host] = needs.get(each.host, frozenset()) | frozenset(NEEDS[each.kind])
    # Hosts of the same kinds need the same: there may be a million pairs.
    hosts = {kinds: {host for kind in kinds for host in by_kind[kind]} for kinds in set(needs.values())}
    return sum(len(hosts[kinds]) - (host in hosts[kinds]) for host, kinds in needs.items())


def _shuffled(hosts: Iterable[str], order: random.Random) -> list[str]:
    ring = sorted(hosts)
    order.shuffle(ring)
    return ring


def _neighbours(ring: Sequence[str], host: str, most: int) -> list[str]:
    """Choose hosts of a ring: those behind a host's own place, so that nobody is tried by more than others.

    One that is not in the ring has a place by its name.
    """
    others = [each for each in ring if each != host]
    if len(others) <= most:
        return others
    place = ring.index(host) if host in ring else random.Random(host).randrange(len(others))
    return [others[(place + step) % len(others)] for step in range(most)]
