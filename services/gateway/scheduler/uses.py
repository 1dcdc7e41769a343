"""Divides the services of a kind among experiments that ask different things of them: an engine, GPUs, live changes.

What suits the more demanding is kept for them as far as they may have it, and is the others' beyond that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.devices import SOMEBODY, Owners, others, reserved_for
from flotilla.shared.schemas.service import ServiceKind as Kind

Use = tuple[int, tuple[str, ...]]
"""GPUs that a service must have, and what it has to be able to (``Demand.abilities_of``)."""
NO_USE: Use = (0, ())
"""Any service will do."""


@dataclass
class Part:
    """Experiments with the same use for services, and the services among which they find theirs."""

    demands: list[Demand] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)


def use_of(demand: Demand, kind: Kind) -> Use:
    """Return what an experiment asks of services of a kind."""
    return demand.need_of(kind).count, demand.abilities_of(kind)


def divided_by_use(
    kind: Kind, demands: Sequence[Demand], candidates: Sequence[Candidate], owners: Owners, waiting: Set[str]
) -> list[Part]:
    """Divide experiments and services of a kind.

    Args:
        kind: of service.
        demands: of the fleet.
        candidates: of the fleet.
        owners: who computes on which device.
        waiting: experiments that cannot start now whatever is kept for them: nothing is.
    """
    users = [demand for demand in demands if demand.uses(kind)]
    services = [candidate for candidate in candidates if candidate.kind is kind]
    held = _held_by(users, services)
    room = {
        demand.experiment_id: 0 if demand.experiment_id in waiting else _room(demand, kind, held, len(services))
        for demand in users
    }
    # With its maximum an experiment has to see what its floor can have in the place of another.
    lacking = _lacking_of_floors(kind, users, held, waiting)
    parts = _apart(users, services, held, room, lacking, owners)
    alone = {demand.experiment_id for part in parts for demand in part.demands}
    free = [each for each in services if each.experiment_id is None and others(each, owners) <= {SOMEBODY}]
    by_use: dict[Use, Part] = {NO_USE: Part()}
    for demand in users:
        if demand.experiment_id not in alone:
            part = by_use.setdefault(use_of(demand, kind), Part())
            part.demands.append(demand)
            part.candidates += held[demand.experiment_id]
    for use in sorted(by_use, reverse=True):
        part = by_use[use]
        able = [each for each in free if len(each.devices) >= use[0] and each.engines.issuperset(use[1])]
        if use != NO_USE:
            names = [demand.experiment_id for demand in part.demands]
            able = sorted(able, key=lambda each: (each.is_leaving, len(each.devices)))
            ready = [each for each in able if not each.is_leaving]
            if any(demand.floor_of(kind) for demand in users):
                able = of_floors_first(ready, sum(lacking[name] for name in names)) + able[len(ready) :]
            beyond = sum(max(0, lacking[name] - room[name]) for name in names)
            most = sum(room[name] for name in names) + min(beyond, sum(not each.is_spot for each in ready))
            able = able[:most]
        taken = {each.service_id for each in able}
        part.candidates += [each for each in free if each.service_id in taken]
        free = [each for each in free if each.service_id not in taken]
        parts.append(part)
    return parts


def of_floors_first(services: Sequence[Candidate], wanted: int) -> list[Candidate]:
    """Sort what is idle: as many as floors want of machines that stay, then those that others' floors leave."""
    stay = [each for each in services if not each.is_spot]
    of_floor = stay[: max(0, wanted)]
    return [*of_floor, *(each for each in services if each.is_spot), *stay[len(of_floor) :]]


def _lacking_of_floors(
    kind: Kind, users: Sequence[Demand], held: Mapping[str, Sequence[Candidate]], waiting: Set[str]
) -> Counter[str]:
    able = [demand for demand in users if demand.experiment_id not in waiting]
    return Counter({each.experiment_id: each.lacking_of_floor(kind, held[each.experiment_id]) for each in able})


def _held_by(users: Sequence[Demand], services: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    held: dict[str, list[Candidate]] = {demand.experiment_id: [] for demand in users}
    for candidate in services:
        if candidate.experiment_id in held:
            held[candidate.experiment_id].append(candidate)
    return held


def reclaimed(
    demands: Sequence[Demand], candidates: Sequence[Candidate], lacking: Mapping[str, Mapping[Kind, int]]
) -> dict[str, list[str]]:
    """Choose surplus of experiments with another use, where somebody's minimum lacks nothing beyond it.

    Returns:
        By experiment that lacks something, the services that others have to give back.
    """
    spare = _surplus(demands, candidates)
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for demand in demands:
        chosen: list[str] = []
        for kind, count in lacking.get(demand.experiment_id, {}).items():
            suitable = [
                service.service_id
                for holder, service in spare
                if service.kind is kind
                and use_of(holder, kind) != use_of(demand, kind)
                and demand.suits(service)
                and service.service_id not in taken
            ]
            if len(suitable) < count:
                break
            chosen += suitable[:count]
        else:
            if chosen:
                found[demand.experiment_id] = chosen
                taken |= set(chosen)
    return found


def _room(demand: Demand, kind: Kind, held: Mapping[str, Sequence[Candidate]], most: int) -> int:
    quota = demand.quotas[kind]
    wanted = quota.min if demand.is_paused else most if quota.max is None else quota.max
    return max(0, wanted - len(held[demand.experiment_id]))


def _apart(
    users: Sequence[Demand],
    services: Sequence[Candidate],
    held: Mapping[str, Sequence[Candidate]],
    room: Mapping[str, int],
    lacking: Mapping[str, int],
    owners: Owners,
) -> list[Part]:
    """Reserve services for the experiments that compute on their devices already: no other can use them."""
    reserved = reserved_for(users, services, owners)
    parts: list[Part] = []
    if not reserved:
        return parts
    for demand in users:
        own = [each for each in services if reserved.get(each.service_id) == demand.experiment_id]
        able = [each for each in own if demand.suits(each)]
        of_floor = sum(not each.is_spot and not each.is_leaving for each in able)
        if able and max(room[demand.experiment_id], min(lacking[demand.experiment_id], of_floor)) > 0:
            parts.append(Part([demand], [*held[demand.experiment_id], *able]))
    return parts


def _surplus(demands: Sequence[Demand], candidates: Sequence[Candidate]) -> list[tuple[Demand, Candidate]]:
    """List what experiments hold beyond their minimums and others could use: leaving ones first, then the newest."""
    computes = Counter(device for each in candidates if each.experiment_id is not None for device in each.devices)
    spare = []
    for demand in demands:
        for kind, quota in demand.quotas.items():
            mine = [each for each in candidates if each.experiment_id == demand.experiment_id and each.kind is kind]
            newest = sorted(enumerate(mine), key=lambda numbered: (not numbered[1].is_leaving, -numbered[0]))
            kept = demand.kept_of(kind, mine)
            beyond = [each for _, each in newest[: max(0, len(mine) - quota.min)] if each.service_id not in kept]
            # A device that another service of the experiment computes on does not fall free with this one.
            spare += [(demand, each) for each in beyond if all(computes[device] == 1 for device in each.devices)]
    return spare
