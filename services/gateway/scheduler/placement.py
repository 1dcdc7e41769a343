"""Which services serve which experiment: a pure function of what is there.

An experiment starts only when it gets everything it needs, so two half-served experiments never wait for each other.
Beyond the minimums, rollouts, rewards and sandboxes are shared by weight. A service is asked to leave only when
another experiment will have it, or when its own has more than its maximum; a trainer, and what an experiment needs
for its minimum, never is. The same facts give the same answer, and a placement that is as it should be moves nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.gateway.scheduler.sharing import Share, divide
from shared.config.engine import SglangEngineConfig
from shared.config.resources import QuotaConfig
from shared.config.spec import ExperimentSpec
from shared.schemas.service import ServiceKind as Kind

TRAINER = QuotaConfig(min=1, max=1)
KINDS = (Kind.TRAINER, Kind.ROLLOUT, Kind.REWARD, Kind.SANDBOX)


class WhyLeave(StrEnum):
    """Why a service is taken from an experiment."""

    MINIMUM = "another experiment needs it for its minimum"
    SHARE = "it is more than the experiment's fair share of the surplus"
    MAXIMUM = "the experiment has more than its maximum"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live service that may be given work.

    Attributes:
        experiment_id: what it is assigned to; None while it is idle.
        is_leaving: it was asked to leave its experiment, or has left it and is not yet idle.
        engines: kinds of engine that a rollout can start.
    """

    service_id: str
    kind: Kind
    experiment_id: str | None = None
    is_leaving: bool = False
    engines: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Demand:
    """What an active experiment needs to run, and what it may have.

    Attributes:
        quotas: bounds by kind; a kind that is not here it does not use.
        is_placed: it had all that it needs at one time, so it gets replacements one by one.
        is_paused: it takes no surplus, and lends what it has to those who can use it.
        engine: the kind of engine that its rollouts have to start; None if every rollout can.
    """

    experiment_id: str
    quotas: Mapping[Kind, QuotaConfig]
    is_placed: bool
    weight: float = 1.0
    priority: int = 0
    is_paused: bool = False
    engine: str | None = None

    def uses(self, kind: Kind) -> bool:
        """Whether services of this kind work for it."""
        return kind in self.quotas


@dataclass(frozen=True, slots=True)
class Placement:
    """What to change, and where it leads.

    Attributes:
        assigned: service id to experiment id.
        leaving: services that should be on their way out of their experiment, and why.
        lacking: by experiment, what it still misses by kind and nobody can give; without an entry it misses nothing.
        coming: by experiment, what it waits for by kind that others are giving back.
        targets: by experiment, how many of each kind it should have.
    """

    assigned: Mapping[str, str] = field(default_factory=dict)
    leaving: Mapping[str, WhyLeave] = field(default_factory=dict)
    lacking: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)
    coming: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)
    targets: Mapping[str, Mapping[Kind, int]] = field(default_factory=dict)


def quotas_of(spec: ExperimentSpec) -> dict[Kind, QuotaConfig]:
    """Read the bounds of what an experiment needs and may have."""
    resources = spec.resources
    quotas = {Kind.TRAINER: TRAINER} if spec.trains else {}
    if spec.samples_answers:
        quotas |= {Kind.ROLLOUT: resources.rollouts, Kind.REWARD: resources.rewards}
    if spec.runs_code:
        quotas[Kind.SANDBOX] = resources.sandboxes or QuotaConfig(min=1, max=1)
    return quotas


def engine_to_start(spec: ExperimentSpec) -> str | None:
    """Name the engine that an experiment's rollouts must be able to start; None where any rollout will do."""
    engine = spec.rollout.engine
    return engine.kind if isinstance(engine, SglangEngineConfig) and engine.url is None else None


def place(demands: Sequence[Demand], candidates: Sequence[Candidate]) -> Placement:
    """Assign idle services to experiments, and say which services should leave theirs.

    Args:
        demands: active experiments, the earliest started first; a higher priority is served before a lower one.
        candidates: live services in the order in which they registered, without those that an operator drains.
    """
    # Those that run come first whatever their priority: nobody starts at their minimums' cost.
    demands = sorted(demands, key=lambda demand: (not demand.is_placed, -demand.priority))
    pools = _pools(demands, candidates)
    lacking: dict[str, dict[Kind, int]] = {}
    admitted = []
    for demand in demands:
        short = {pool.kind: count for pool in pools if (count := pool.short_of(demand)) > 0}
        if short:
            lacking[demand.experiment_id] = short
        if demand.is_placed or not short:
            admitted.append(demand)
            for pool in pools:
                pool.secure(demand)
    for pool in pools:
        pool.share_surplus(admitted)
    coming: dict[str, dict[Kind, int]] = {}
    for demand in admitted:
        awaited = {pool.kind: count for pool in pools if (count := pool.awaited_by(demand)) > 0}
        if awaited:
            coming[demand.experiment_id] = awaited
        for pool in pools:
            # What is idle already is kept for an experiment that waits for the rest, and given when all is there.
            pool.give_minimum(demand, is_kept=bool(awaited) and not demand.is_placed)
    for pool in pools:
        pool.give_surplus([d for d in admitted if d.is_placed or d.experiment_id not in coming])
    return Placement(
        assigned={service_id: taker for pool in pools for service_id, taker in pool.assigned.items()},
        leaving={service_id: why for pool in pools for service_id, why in pool.leaving(admitted).items()},
        lacking=lacking,
        coming=coming,
        targets={d.experiment_id: {p.kind: p.targets[d.experiment_id] for p in pools if p.serves(d)} for d in admitted},
    )


def _pools(demands: Sequence[Demand], candidates: Sequence[Candidate]) -> "list[_Pool]":
    """Divide demands and candidates: one pool for each kind, and one for the rollouts of each engine that is asked for.

    What can start an engine that an active experiment asks for is kept for such experiments, unless it has work.
    """
    pools = [_Pool(kind, demands, candidates) for kind in KINDS if kind is not Kind.ROLLOUT]
    rollouts = [candidate for candidate in candidates if candidate.kind is Kind.ROLLOUT]
    engine_of = {demand.experiment_id: demand.engine for demand in demands}
    asked = sorted({engine for engine in engine_of.values() if engine is not None})

    def belongs_to(candidate: Candidate) -> str | None:
        if candidate.experiment_id in engine_of:
            return engine_of[candidate.experiment_id]
        return next((engine for engine in asked if engine in candidate.engines), None)

    for engine in (None, *asked):
        mine = [candidate for candidate in rollouts if belongs_to(candidate) == engine]
        pools.append(_Pool(Kind.ROLLOUT, [demand for demand in demands if demand.engine == engine], mine))
    return sorted(pools, key=lambda pool: KINDS.index(pool.kind))


class _Pool:
    """The services of one kind: who has them, how many each experiment should have, and what is given to whom."""

    def __init__(self, kind: Kind, demands: Sequence[Demand], candidates: Sequence[Candidate]) -> None:
        self.kind = kind
        mine = [candidate for candidate in candidates if candidate.kind is kind]
        self.held: dict[str, list[Candidate]] = {demand.experiment_id: [] for demand in demands if demand.uses(kind)}
        for candidate in mine:
            if candidate.experiment_id in self.held:
                self.held[candidate.experiment_id].append(candidate)
        self.targets: Counter[str] = Counter()
        for demand in demands:
            if demand.is_placed and demand.uses(kind):
                # What it has for its minimum is nobody else's; and a trainer is never surplus.
                held = len(self.held[demand.experiment_id])
                self.targets[demand.experiment_id] = min(held, demand.quotas[kind].min)
        self.assigned: dict[str, str] = {}
        self._idle = [c.service_id for c in mine if c.experiment_id is None and not c.is_leaving]
        self._on_their_way = sum(c.experiment_id is None and c.is_leaving for c in mine)
        self._left = len(self._idle) + self._on_their_way
        if kind is not Kind.TRAINER:
            self._left += sum(map(len, self.held.values())) - self.targets.total()
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

    def give_minimum(self, demand: Demand, *, is_kept: bool) -> None:
        """Assign what is idle, as far as the minimum needs it, or keep it aside."""
        wanted = self._wanted(demand)
        taken = self._take(wanted)
        self._needed += wanted - len(taken)
        if not is_kept:
            self.assigned |= dict.fromkeys(taken, demand.experiment_id)

    def give_surplus(self, takers: Sequence[Demand]) -> None:
        """Assign what is idle, up to the targets."""
        given = Counter(self.assigned.values())
        for demand in takers:
            held = len(self.held.get(demand.experiment_id, ())) + given[demand.experiment_id]
            below_minimum = max(0, min(self._minimum(demand), self.targets[demand.experiment_id]) - held)
            wanted = max(0, self.targets[demand.experiment_id] - held - below_minimum)
            taken = self._take(wanted)
            self._hungry += wanted - len(taken)
            self.assigned |= dict.fromkeys(taken, demand.experiment_id)

    def leaving(self, demands: Sequence[Demand]) -> dict[str, WhyLeave]:
        """Choose who leaves: no more than others will have, besides what is above a maximum."""
        if self.kind is Kind.TRAINER:
            return {}
        maximums = {d.experiment_id: d.quotas[self.kind].max for d in demands if self.serves(d)}
        chosen: dict[str, WhyLeave] = {}
        offered: list[str] = []
        # The last served give first; of each, those that are leaving already, then the newest.
        for experiment_id in reversed(self.held):
            services = self.held[experiment_id]
            above_target = max(0, len(services) - self.targets[experiment_id])
            newest_first = sorted(enumerate(services), key=lambda numbered: (not numbered[1].is_leaving, -numbered[0]))
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
        return max(0, secured - len(self.held.get(demand.experiment_id, ())))

    def _take(self, count: int) -> list[str]:
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken
