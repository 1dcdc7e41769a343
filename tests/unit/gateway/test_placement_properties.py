"""What a placement guarantees, whatever the fleet and whoever wants a share of it."""

from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.placement import Placement, place
from flotilla.shared.config.sections.resources import QuotaConfig
from flotilla.shared.schemas.service import ServiceKind as Kind

KINDS = (Kind.TRAINER, Kind.ROLLOUT, Kind.REWARD)
ROUNDS = 12


@dataclass
class World:
    """A fleet in which asked services leave after a round, and rest for one before they are idle."""

    demands: list[Demand]
    services: dict[str, Candidate]
    moves: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def count(self, experiment_id: str, kind: Kind) -> int:
        return sum(s.experiment_id == experiment_id and s.kind is kind for s in self.services.values())

    def round(self) -> Placement:
        placement = place(self.demands, list(self.services.values()))
        check_one_step(self, placement)
        for service_id, service in self.services.items():
            if service.experiment_id is None and service.is_leaving:
                self.services[service_id] = replace(service, is_leaving=False)
            elif service.is_leaving and service_id in placement.leaving:
                self.services[service_id] = replace(service, experiment_id=None)
            elif service.experiment_id is not None:
                self.services[service_id] = replace(service, is_leaving=service_id in placement.leaving)
                self.moves[service_id] += service_id in placement.leaving and not service.is_leaving
        for service_id, experiment_id in placement.assigned.items():
            self.services[service_id] = replace(self.services[service_id], experiment_id=experiment_id)
        self.demands = [
            replace(d, is_placed=d.is_placed or self.count(d.experiment_id, Kind.TRAINER) > 0) for d in self.demands
        ]
        self.rounds += 1
        return placement

    def settle(self) -> Placement:
        for _ in range(ROUNDS):
            before = dict(self.services)
            placement = self.round()
            if self.services == before:
                assert not placement.assigned and not placement.leaving
                return placement
        raise AssertionError(f"it never comes to rest: {self.services}")


def check_one_step(world: World, placement: Placement) -> None:
    """What holds in every round, not only in the end."""
    for service_id in placement.assigned:
        service = world.services[service_id]
        assert service.experiment_id is None and not service.is_leaving
    for service_id in placement.leaving:
        assert world.services[service_id].kind is not Kind.TRAINER
    for demand in world.demands:
        complete = []
        for kind, quota in demand.quotas.items():
            had = world.count(demand.experiment_id, kind)
            taken = sum(
                world.services[each].experiment_id == demand.experiment_id and world.services[each].kind is kind
                for each in placement.leaving
            )
            gained = sum(
                taker == demand.experiment_id and world.services[each].kind is kind
                for each, taker in placement.assigned.items()
            )
            assert had - taken >= min(had, quota.min), "below its minimum"
            assert quota.max is None or gained == 0 or had + gained <= quota.max, "above its maximum"
            complete.append(had + gained >= quota.min)
        if not demand.is_placed and demand.experiment_id in placement.assigned.values():
            assert all(complete), "half served"


quota = st.tuples(st.integers(1, 3), st.none() | st.integers(0, 3)).map(
    lambda pair: QuotaConfig(min=pair[0], max=None if pair[1] is None else pair[0] + pair[1])
)


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    made = []
    for number in range(draw(st.integers(1, 4))):
        wanted = {Kind.TRAINER: QuotaConfig(min=1, max=1), Kind.ROLLOUT: draw(quota), Kind.REWARD: draw(quota)}
        weight = draw(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0]))
        made.append(Demand(f"e{number}", wanted, False, weight, draw(st.integers(0, 1)), draw(st.booleans())))
    return made


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A fleet at rest, on which some experiments run; then anything may happen to it."""
    services = {}
    for kind, most in ((Kind.TRAINER, 4), (Kind.ROLLOUT, 9), (Kind.REWARD, 6)):
        for number in range(draw(st.integers(0, most))):
            services[f"{kind}{number}"] = Candidate(f"{kind}{number}", kind)
    world = World(draw(demands()), services)
    world.settle()
    for service_id in draw(st.lists(st.sampled_from(sorted(services)), unique=True)) if services else []:
        del world.services[service_id]
    for number in range(draw(st.integers(0, 3))):
        world.services[f"new{number}"] = Candidate(f"new{number}", draw(st.sampled_from(KINDS)))
    world.demands = [
        replace(each, is_paused=draw(st.booleans()), quotas={**each.quotas, Kind.ROLLOUT: draw(quota)})
        for each in world.demands
    ]
    if draw(st.booleans()):
        ended = world.demands.pop(0).experiment_id
        for service_id, service in world.services.items():
            if service.experiment_id == ended:
                world.services[service_id] = replace(service, experiment_id=None)
    if draw(st.booleans()):
        world.demands.append(replace(draw(demands())[0], experiment_id="late"))
    world.moves.clear()
    return world


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_every_fleet_comes_to_rest_and_no_service_moves_twice(world: World) -> None:
    world.settle()

    assert max(world.moves.values(), default=0) <= 1


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_at_rest_the_surplus_is_within_one_service_of_the_weighted_fair_share(world: World) -> None:
    world.settle()

    for kind in (Kind.ROLLOUT, Kind.REWARD):
        served = [demand for demand in world.demands if demand.is_placed]
        extra = {d.experiment_id: max(0, world.count(d.experiment_id, kind) - d.quotas[kind].min) for d in served}
        # Every priority's share is fair among its peers, with what those above have left.
        for priority in {demand.priority for demand in served}:
            peers = [d for d in served if d.priority == priority and not d.is_paused]
            if any(world.count(d.experiment_id, kind) < d.quotas[kind].min for d in served):
                continue
            fair = poured(sum(extra[d.experiment_id] for d in peers), peers, kind)
            for demand in peers:
                assert abs(extra[demand.experiment_id] - fair[demand.experiment_id]) < 1


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_at_rest_nothing_idles_that_could_be_used_and_nobody_waits_for_what_is_surplus(world: World) -> None:
    placement = world.settle()

    for kind in KINDS:
        idle = sum(s.experiment_id is None and s.kind is kind for s in world.services.values())
        surplus = idle
        for demand in world.demands:
            has, bounds = world.count(demand.experiment_id, kind), demand.quotas[kind]
            if demand.is_placed:
                surplus += max(0, has - bounds.min) if kind is not Kind.TRAINER else 0
                can_take = has < bounds.min or (not demand.is_paused and (bounds.max is None or has < bounds.max))
                assert not (idle and can_take)
                assert bounds.max is None or has <= max(bounds.max, 1)
        for experiment_id, short in placement.lacking.items():
            demand = next(each for each in world.demands if each.experiment_id == experiment_id)
            if kind in short:
                has = world.count(experiment_id, kind)
                assert surplus < demand.quotas[kind].min - has
    assert placement.coming == {}


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_no_more_leave_than_others_get(world: World) -> None:
    placement = world.round()

    for kind in (Kind.ROLLOUT, Kind.REWARD):
        leaving = {each for each in placement.leaving if world.services[each].kind is kind}
        above = needed = 0
        for demand in world.demands:
            held = [s for s in world.services.values() if s.experiment_id == demand.experiment_id and s.kind is kind]
            target = placement.targets.get(demand.experiment_id, {}).get(kind, 0)
            needed += max(0, target - len(held))
            maximum = demand.quotas[kind].max
            above += 0 if maximum is None else max(0, len(held) - maximum)
        assert len(leaving) <= needed + above


def poured(amount: int, peers: list[Demand], kind: Kind) -> dict[str, Fraction]:
    """Share by raising one level until the amount is used up: the definition, by bisection and not by rounds."""
    rooms = {
        d.experiment_id: amount if d.quotas[kind].max is None else d.quotas[kind].max - d.quotas[kind].min
        for d in peers
    }

    def at(level: Fraction) -> dict[str, Fraction]:
        return {d.experiment_id: min(Fraction(rooms[d.experiment_id]), level * Fraction(d.weight)) for d in peers}

    low, high = Fraction(0), Fraction(1000)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle).values()) <= amount else (low, middle)
    return at(low)
