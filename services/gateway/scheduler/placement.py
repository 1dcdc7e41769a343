"""Which services serve which experiment: a pure function of what is there.

An experiment starts only when it gets everything it needs, so two half-served experiments never wait for each other.
Beyond the minimums, rollouts, rewards and sandboxes are shared by weight. A service is asked to leave only when
another experiment will have it, or when its own has more than its maximum; a trainer, and what an experiment needs
for its minimum, never is. The same facts give the same answer, and a placement that is as it should be moves nothing.

How services of one kind are divided among experiments: minimums first, then the surplus, by priority and weight.

Whole services are dealt by the largest remainders of the weighted fair share, so no experiment is a whole service off
it. What one experiment cannot use, because it has its maximum, goes to the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from itertools import groupby

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.devices import COMPUTING, Owners, in_order_of_use, may_use, owners_of
from flotilla.services.gateway.scheduler.uses import divided_by_use, of_floors_first, reclaimed
from flotilla.shared.schemas.service import ServiceKind as Kind

KINDS = (Kind.TRAINER, Kind.ROLLOUT, Kind.REWARD, Kind.SANDBOX)


@dataclass(frozen=True, slots=True)
class Share:
    """One experiment's claim on the surplus of one kind.

    Attributes:
        key: whose it is.
        rank: all that a lower rank can use goes to it before a higher one gets any.
        weight: share among those of the same rank, above 0.
        room: how many services it can still take.
        held: how many it has of the surplus now; where the division is a tie, those who have keep.
    """

    key: str
    rank: tuple[int, ...]
    weight: float
    room: int
    held: int = 0


def divide(surplus: int, shares: Sequence[Share]) -> dict[str, int]:
    """Divide services among experiments.

    Args:
        surplus: how many there are to give.
        shares: who may take some.

    Returns:
        How many each gets; their sum is ``surplus``, or the sum of all rooms if that is less.
    """
    given: dict[str, int] = {}
    for _, ranked in groupby(sorted(shares, key=lambda share: share.rank), key=lambda share: share.rank):
        peers = list(ranked)
        portion = min(surplus, sum(share.room for share in peers))
        given |= _round(portion, peers, fair_shares(portion, peers))
        surplus -= portion
    return given


def fair_shares(amount: int, shares: Sequence[Share]) -> dict[str, Fraction]:
    """Divide an amount by weight, exactly; who has no room for its share takes its room, and the rest is divided again.

    Args:
        amount: not more than all rooms together.
    """
    fair: dict[str, Fraction] = {}
    left, open_shares = Fraction(amount), list(shares)
    while open_shares:
        total = sum((Fraction(share.weight) for share in open_shares), Fraction())
        full = [share for share in open_shares if left * Fraction(share.weight) / total >= share.room]
        if not full:
            return fair | {share.key: left * Fraction(share.weight) / total for share in open_shares}
        fair |= {share.key: Fraction(share.room) for share in full}
        left -= sum(share.room for share in full)
        open_shares = [share for share in open_shares if share.key not in fair]
    return fair


def _round(amount: int, shares: Sequence[Share], fair: Mapping[str, Fraction]) -> dict[str, int]:
    whole = {share.key: int(fair[share.key]) for share in shares}
    remainder = amount - sum(whole.values())
    # Largest remainder first; among equals, who has more than the whole part keeps it, then who came first.
    order = sorted(shares, key=lambda share: (whole[share.key] - fair[share.key], share.held <= whole[share.key]))
    for share in order[:remainder]:
        whole[share.key] += 1
    return whole


class WhyLeave(StrEnum):
    """Why a service is taken from an experiment."""

    MINIMUM = "another experiment needs it for its minimum"
    SHARE = "it is more than the experiment's fair share of the surplus"
    MAXIMUM = "the experiment has more than its maximum"
    FLOOR = "a rollout whose machine is not taken away can have its place"
    TRAINER = "the trainer whose devices it is lent is on another host now"


@dataclass(frozen=True, slots=True)
class Placement:
    """What to change, and where it leads.

    Attributes:
        assigned: service id to experiment id.
        leaving: services that should be on their way out of their experiment, and why.
        lacking: by experiment and kind, services that it lacks and no other can release; no entry: none is lacking.
        coming: by experiment, what it waits for by kind that others are giving back.
        targets: by experiment, how many of each kind it should have.
    """

    assigned: Mapping[str, str] = field(default_factory=dict)
    leaving: Mapping[str, WhyLeave] = field(default_factory=dict)
    lacking: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)
    coming: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)
    targets: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)


def place(demands: Sequence[Demand], candidates: Sequence[Candidate]) -> Placement:
    """Assign idle services to experiments, and say which services should leave theirs.

    Args:
        demands: active experiments, the earliest started first; a higher priority is served before a lower one.
        candidates: live services in the order in which they registered, without those that an operator drains.
    """
    # Running experiments come first whatever their priority: none starts at the cost of their minimums.
    demands = sorted(demands, key=lambda demand: (not demand.is_placed, -demand.priority))
    owners = owners_of(demands, candidates)
    pools = _pools(demands, candidates, owners, frozenset())
    admitted, lacking = _admit(demands, pools)
    taken_back = reclaimed(demands, candidates, lacking)
    waiting = {d.experiment_id for d in demands if not d.is_placed} & lacking.keys() - taken_back.keys()
    if waiting and len(pools) > len(KINDS):
        # Services that do not let an experiment start now are not kept from others who could.
        pools = _pools(demands, candidates, owners, waiting)
        admitted, still = _admit(demands, pools)
        lacking = {experiment_id: lacking.get(experiment_id, short) for experiment_id, short in still.items()}
    for pool in pools:
        pool.share_surplus(admitted)
    coming = _give(pools, admitted)
    half_served = _half_served(pools, [d for d in admitted if not d.is_placed and d.experiment_id not in coming])
    leaving = {service_id: why for pool in pools for service_id, why in pool.leaving(admitted).items()}
    for experiment_id, services in taken_back.items():
        leaving |= dict.fromkeys(services, WhyLeave.MINIMUM)
        coming[experiment_id] = lacking.pop(experiment_id, {})
    assigned = {service_id: taker for pool in pools for service_id, taker in pool.assigned.items()}
    served = [demand for demand in admitted if demand.experiment_id not in half_served]
    return Placement(
        assigned={service_id: taker for service_id, taker in assigned.items() if taker not in half_served},
        leaving=leaving,
        lacking=lacking | half_served,
        coming=coming,
        targets={d.experiment_id: {p.kind: p.targets[d.experiment_id] for p in pools if p.serves(d)} for d in served},
    )


def _pools(
    demands: Sequence[Demand], candidates: Sequence[Candidate], owners: Owners, waiting: Set[str]
) -> "list[_Pool]":
    """Divide demands and candidates: one pool for each kind, and for each use of trainers, rollouts and rewards."""
    owners = dict(owners)
    pools = []
    for kind in KINDS:
        if kind is Kind.SANDBOX:
            pools.append(_Pool(kind, demands, candidates, owners))
            continue
        # The devices of a reward service are not given with it.
        parts = divided_by_use(kind, demands, candidates, owners if kind in COMPUTING else {}, waiting)
        pools += [_Pool(kind, part.demands, part.candidates, owners) for part in parts]
    return pools


def _admit(demands: Sequence[Demand], pools: "Sequence[_Pool]") -> tuple[list[Demand], dict[str, Mapping[Kind, int]]]:
    """Set minimums aside; return who has, or can have, what it needs, and what the others lack."""
    admitted: list[Demand] = []
    lacking: dict[str, Mapping[Kind, int]] = {}
    # What runs has its floors before others start.
    for _, peers in groupby(demands, key=lambda demand: demand.is_placed):
        allowed: list[Demand] = []
        for demand in peers:
            short = {pool.kind: count for pool in pools if (count := pool.short_of(demand)) > 0}
            if short:
                lacking[demand.experiment_id] = short
            if demand.is_placed or not short:
                allowed.append(demand)
                for pool in pools:
                    pool.secure(demand)
        for demand in allowed:
            for pool in pools:
                pool.secure_floor(demand)
        admitted += allowed
    return admitted, lacking


def _give(pools: "Sequence[_Pool]", admitted: Sequence[Demand]) -> dict[str, Mapping[Kind, int]]:
    """Assign what is idle; return what minimums wait for until others have given it back."""
    coming: dict[str, Mapping[Kind, int]] = {}
    for demand in admitted:
        for pool in pools:
            pool.give_floor(demand)
    for demand in admitted:
        awaited = {pool.kind: count for pool in pools if (count := pool.awaited_by(demand)) > 0}
        if awaited:
            coming[demand.experiment_id] = awaited
        for pool in pools:
            # What is idle already is kept for an experiment that waits for the rest, and given when all is there.
            pool.give_minimum(demand, is_kept=bool(awaited) and not demand.is_placed)
    for pool in pools:
        pool.give_surplus([d for d in admitted if d.is_placed or d.experiment_id not in coming])
    return coming


def _half_served(pools: "Sequence[_Pool]", starting: Sequence[Demand]) -> dict[str, Mapping[Kind, int]]:
    """Find who got less than it needs, since another was given the same devices just now: it waits, with nothing."""
    given = Counter((taker, pool.kind) for pool in pools for taker in pool.assigned.values())
    given.update((holder, pool.kind) for pool in pools for holder, services in pool.held.items() for _ in services)
    found: dict[str, Mapping[Kind, int]] = {}
    for demand in starting:
        short = {
            kind: missing
            for kind, quota in demand.quotas.items()
            if (missing := quota.min - given[demand.experiment_id, kind]) > 0
        }
        if short:
            found[demand.experiment_id] = short
    return found


class _Pool:
    """The services of one kind: who has them, how many each experiment should have, and what is given to whom."""

    def __init__(self, kind: Kind, demands: Sequence[Demand], candidates: Sequence[Candidate], owners: Owners) -> None:
        self.kind = kind
        self._owners = owners
        mine = [candidate for candidate in candidates if candidate.kind is kind]
        self.held: dict[str, list[Candidate]] = {demand.experiment_id: [] for demand in demands if demand.uses(kind)}
        for candidate in mine:
            if candidate.experiment_id in self.held:
                self.held[candidate.experiment_id].append(candidate)
        self.targets: Counter[str] = Counter()
        for demand in demands:
            if demand.is_placed and demand.uses(kind):
                # Services of its minimum and of its floor are not given to others, and a trainer is never surplus.
                held = self.held[demand.experiment_id]
                kept = demand.kept_of(kind, held)
                self.targets[demand.experiment_id] = max(len(kept), min(len(held), demand.quotas[kind].min))
        self.assigned: dict[str, str] = {}
        self._idle = [c for c in mine if c.experiment_id is None and not c.is_leaving]
        self._has_devices = any(each.devices for each in self._idle)
        self._has_floors = any(demand.floor_of(kind) for demand in demands)
        self._staying = sum(not each.is_spot for each in self._idle)
        self._on_their_way = sum(c.experiment_id is None and c.is_leaving for c in mine)
        self._left = len(self._idle) + self._on_their_way
        if kind is not Kind.TRAINER:
            self._left += sum(map(len, self.held.values())) - self.targets.total()
        self._secured_of_floor: Counter[str] = Counter()
        self._given_of_floor: Counter[str] = Counter()
        self._in_the_way: Counter[str] = Counter()
        self._needed = self._hungry = 0

    def serves(self, demand: Demand) -> bool:
        """Whether these services may work for an experiment."""
        return demand.experiment_id in self.held

    def short_of(self, demand: Demand) -> int:
        """Count what an experiment would lack of its minimum if it got all that there is left."""
        return self._minimum(demand) - self.targets[demand.experiment_id] - self._left

    def secure(self, demand: Demand) -> None:
        """Set as much aside for an experiment as its minimum needs and there is."""
        added = max(0, min(self._minimum(demand) - self.targets[demand.experiment_id], self._left))
        self.targets[demand.experiment_id] += added
        self._left -= added

    def secure_floor(self, demand: Demand) -> None:
        """Set aside what an experiment can have of its floor, beyond its minimum or in the place of others it has."""
        wanted = min(self._staying, self._wants_of_floor(demand))
        if wanted <= 0 or demand.is_paused or not self.serves(demand):
            return
        name = demand.experiment_id
        kept = len(demand.kept_of(self.kind, self.held[name]))
        added = max(0, min(kept + wanted - self.targets[name], self._left))
        self.targets[name] += added
        self._left -= added
        self._secured_of_floor[name] = max(0, min(wanted, self.targets[name] - kept))
        self._staying -= self._secured_of_floor[name]

    def share_surplus(self, takers: Sequence[Demand]) -> None:
        """Divide what is left."""
        shares = []
        for demand in takers:
            if not self.serves(demand):
                continue
            target, quota = self.targets[demand.experiment_id], demand.quotas[self.kind]
            extra = max(0, len(self.held[demand.experiment_id]) - target)
            room = self._left if quota.max is None else max(0, quota.max - target)
            if demand.is_paused:
                room = min(room, extra)
            rank = (int(demand.is_paused), -demand.priority)
            shares.append(Share(demand.experiment_id, rank, demand.weight, room, extra))
        for experiment_id, count in divide(self._left, shares).items():
            self.targets[experiment_id] += count
            self._left -= count

    def awaited_by(self, demand: Demand) -> int:
        """Count what of an experiment's minimum others have to give back first."""
        return max(0, self._wanted(demand) - len(self._idle))

    def give_floor(self, demand: Demand) -> None:
        """Assign what was set aside for a floor, or keep it until those in its way have left."""
        wanted = self._secured_of_floor[demand.experiment_id]
        if wanted <= 0 or not demand.is_placed:
            return
        quota, held = demand.quotas[self.kind], self.held[demand.experiment_id]
        able = sum(not each.is_spot and may_use(demand, each, self._owners) for each in self._idle)
        taken = self._take(demand, min(wanted, able))
        room = len(taken) if quota.max is None else max(0, quota.max - len(held))
        self.assigned |= dict.fromkeys(taken[:room], demand.experiment_id)
        self._in_the_way[demand.experiment_id] = 0 if room else len(taken)

    def give_minimum(self, demand: Demand, *, is_kept: bool) -> None:
        """Assign what is idle, as far as the minimum needs it, or keep it aside."""
        wanted = self._wanted(demand)
        self._needed += max(0, wanted - len(self._idle))
        taken = self._take(demand, wanted)
        if not is_kept:
            self.assigned |= dict.fromkeys(taken, demand.experiment_id)

    def give_surplus(self, takers: Sequence[Demand]) -> None:
        """Assign what is idle, up to the targets."""
        given = Counter(self.assigned.values())
        for demand in takers:
            held = len(self.held.get(demand.experiment_id, ())) + given[demand.experiment_id]
            below_minimum = max(0, min(self._minimum(demand), self.targets[demand.experiment_id]) - held)
            wanted = max(0, self.targets[demand.experiment_id] - held - below_minimum)
            self._hungry += max(0, wanted - len(self._idle))
            taken = self._take(demand, wanted)
            self.assigned |= dict.fromkeys(taken, demand.experiment_id)

    def leaving(self, demands: Sequence[Demand]) -> dict[str, WhyLeave]:
        """Choose who leaves: no more than others will have, besides what is above a maximum."""
        if self.kind is Kind.TRAINER:
            return {}
        served = [demand for demand in demands if self.serves(demand)]
        maximums = {demand.experiment_id: demand.quotas[self.kind].max for demand in served}
        kept = frozenset[str]().union(*(each.kept_of(self.kind, self.held[each.experiment_id]) for each in served))
        chosen = {each: WhyLeave.FLOOR for demand in served for each in self._given_up_by(demand)}
        offered: list[str] = []
        # The last served give first; of each, those that are leaving already, then the newest.
        for experiment_id in reversed(self.held):
            services = self.held[experiment_id]
            above_target = max(0, len(services) - self.targets[experiment_id])
            newest_first = sorted(
                enumerate(services),
                key=lambda numbered: (not numbered[1].is_leaving, numbered[1].service_id in kept, -numbered[0]),
            )
            excess = [service.service_id for _, service in newest_first[:above_target]]
            maximum = maximums.get(experiment_id)
            above = 0 if maximum is None else max(0, len(services) - maximum)
            chosen |= dict.fromkeys(excess[:above], WhyLeave.MAXIMUM)
            offered += excess[above:]
        arriving = self._on_their_way + len(chosen)
        needed = max(0, self._needed - arriving)
        hungry = max(0, self._hungry - max(0, arriving - self._needed))
        chosen |= dict.fromkeys(offered[:needed], WhyLeave.MINIMUM)
        return chosen | dict.fromkeys(offered[needed : needed + hungry], WhyLeave.SHARE)

    def _minimum(self, demand: Demand) -> int:
        return demand.quotas[self.kind].min if self.serves(demand) else 0

    def _wanted(self, demand: Demand) -> int:
        secured = min(self._minimum(demand), self.targets[demand.experiment_id])
        given = sum(taker == demand.experiment_id for taker in self.assigned.values())
        return max(0, secured - given - len(self.held.get(demand.experiment_id, ())))

    def _take(self, demand: Demand, count: int) -> list[str]:
        """Take what is idle for an experiment; with devices one by one, since each changes what suits it next."""
        wanted = self._wants_of_floor(demand)
        if not self._has_devices:
            first = self._in_order(self._idle, wanted)[:count]
            self._taken(demand, first)
            return [each.service_id for each in first]
        taken: list[str] = []
        while len(taken) < count:
            able = [each for each in self._idle if may_use(demand, each, self._owners)]
            if not able:
                break
            able = in_order_of_use(demand, able, self._owners)
            best = self._in_order(able, wanted)[0]
            wanted -= not best.is_spot
            self._taken(demand, [best])
            taken.append(best.service_id)
            if demand.need_of(self.kind).is_used:
                self._owners.update(dict.fromkeys(best.devices, demand.experiment_id))
        return taken

    def _taken(self, demand: Demand, services: Sequence[Candidate]) -> None:
        taken = {each.service_id for each in services}
        self._idle = [each for each in self._idle if each.service_id not in taken]
        self._given_of_floor[demand.experiment_id] += sum(not each.is_spot for each in services)

    def _given_up_by(self, demand: Demand) -> list[str]:
        """Name what an experiment gives up, since with its maximum it could not take what is kept for its floor."""
        held = self.held[demand.experiment_id]
        spots = sorted((each for each in reversed(held) if each.is_spot), key=lambda each: not each.is_leaving)
        # One after the other where it has no more than its minimum.
        most = max(1, len(held) - self._minimum(demand))
        return [each.service_id for each in spots[: min(most, self._in_the_way[demand.experiment_id])]]

    def _wants_of_floor(self, demand: Demand) -> int:
        """Count what an experiment lacks of its floor."""
        has = len(demand.kept_of(self.kind, self.held.get(demand.experiment_id, ())))
        return demand.floor_of(self.kind) - has - self._given_of_floor[demand.experiment_id]

    def _in_order(self, services: Sequence[Candidate], wanted: int) -> Sequence[Candidate]:
        return of_floors_first(services, wanted) if self._has_floors else services
