"""Which services get which devices: declared ones, in memory. None of this was run on a GPU."""

from dataclasses import replace

import pytest

from flotilla.services.gateway.scheduler.demands import Candidate, Demand
from flotilla.services.gateway.scheduler.placement import Placement, WhyLeave, place
from flotilla.services.gateway.scheduler.quota import why_waiting
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.config.rules.devices import DeviceNeed
from flotilla.shared.config.sections.resources import QuotaConfig
from flotilla.shared.schemas.engine import EngineOffer
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import Capabilities, GpuDevice, ServiceKind, WorkState
from flotilla.shared.schemas.service import ServiceKind as Kind
from tests.unit.gateway.builders import a_gateway, a_registration, a_spec, add_experiment, say

ONE = QuotaConfig(min=1, max=1)


def wanting(
    name: str,
    trainer: int | None = 0,
    rollout: int | None = 0,
    *,
    rollouts: int = 1,
    most: int | None = None,
    **more: object,
) -> Demand:
    """None: it computes on the CPU."""
    quotas = {Kind.TRAINER: ONE, Kind.ROLLOUT: QuotaConfig(min=rollouts, max=most)}
    needs = {
        kind: DeviceNeed() if count is None else DeviceNeed(count, is_used=True)
        for kind, count in ((Kind.TRAINER, trainer), (Kind.ROLLOUT, rollout))
    }
    return Demand(name, quotas, bool(more.pop("placed", False)), needs=needs, **more)  # type: ignore[arg-type]


def services(**devices: str) -> list[Candidate]:
    """Make services by name, such as ``t0``, each with its devices: ``ab`` is a and b."""
    kinds = {"t": Kind.TRAINER, "r": Kind.ROLLOUT}
    return [Candidate(name, kinds[name[0]], devices=frozenset(given)) for name, given in devices.items()]


def held(by: str, **devices: str) -> list[Candidate]:
    return [replace(each, experiment_id=by) for each in services(**devices)]


def settled(demands: list[Demand], candidates: list[Candidate]) -> dict[str, set[str]]:
    """Carry placements out until nothing moves; return what each experiment has."""
    for _ in range(12):
        placement = place(demands, candidates)
        check_owners(demands, candidates, placement)
        moved = [
            replace(each, experiment_id=placement.assigned.get(each.service_id, each.experiment_id), is_leaving=False)
            if each.service_id not in placement.leaving
            else replace(each, experiment_id=None)
            for each in candidates
        ]
        if moved == candidates:
            return {
                d.experiment_id: {c.service_id for c in moved if c.experiment_id == d.experiment_id} for d in demands
            }
        candidates = moved
        has = {each.experiment_id for each in candidates}
        demands = [replace(each, is_placed=each.is_placed or each.experiment_id in has) for each in demands]
    raise AssertionError("it never comes to rest")


def check_owners(demands: list[Demand], candidates: list[Candidate], placement: Placement) -> None:
    needs = {demand.experiment_id: demand for demand in demands}
    owners: dict[str, str] = {}
    for each in candidates:
        taker = placement.assigned.get(each.service_id, each.experiment_id)
        if taker is not None and needs[taker].need_of(each.kind).is_used:
            for device in each.devices:
                assert owners.setdefault(device, taker) == taker, f"{device} has two owners"


def test_an_experiment_gets_services_with_as_many_devices_as_it_asks_for() -> None:
    fleet = services(t0="", t1="abcd", t2="ef", r0="", r1="g", r2="hi")

    assert settled([wanting("a", 2, 1, most=1)], fleet) == {"a": {"t2", "r1"}}


def test_what_nobody_asks_a_number_of_goes_where_devices_are_and_a_cpu_s_experiment_where_none_are() -> None:
    fleet = services(t0="", t1="a", r0="", r1="b")

    assert settled([wanting("gpu", most=1)], fleet) == {"gpu": {"t1", "r1"}}
    assert settled([wanting("cpu", None, None, most=1)], services(t1="a", t0="", r1="b", r0="")) == {
        "cpu": {"t0", "r0"}
    }


def test_an_experiment_that_does_not_fit_waits_and_says_what_there_is() -> None:
    demands, fleet = [wanting("a", 8, 2)], services(t0="ab", t1="", r0="c")

    placement = place(demands, fleet)

    assert placement.assigned == {}
    assert placement.lacking == {"a": {Kind.TRAINER: 1, Kind.ROLLOUT: 1}}
    assert why_waiting("a", placement, demands, fleet) == (
        "waiting for 1 trainer with 8 devices and 1 rollout with 2 devices to register; the devices of the fleet's "
        "trainers: 0 and 2; the devices of the fleet's rollouts: 1"
    )
    assert place(demands, [*fleet, *services(t9="ABCDEFGH", r9="xy")]).assigned == {"t9": "a", "r9": "a"}


def test_nothing_is_kept_for_an_experiment_that_no_trainer_fits() -> None:
    demands = [wanting("greedy", 8, 1), wanting("modest")]

    assert settled(demands, services(t0="a", r0="b")) == {"greedy": set(), "modest": {"t0", "r0"}}


def test_a_device_that_two_services_declare_is_one_experiment_s_at_a_time() -> None:
    fleet = services(t0="a", t1="a", r0="b", r1="b")
    demands = [wanting("first", most=1), wanting("second", most=1)]

    assert settled(demands, fleet) == {"first": {"t0", "r0"}, "second": set()}
    running = [replace(demands[0], is_placed=True), demands[1]]
    taken = [*held("first", t0="a", r0="b"), *services(t1="a", r1="b")]
    why = why_waiting("second", place(running, taken), running, taken)
    assert why is not None
    assert "first computes on the devices of t1; first computes on the devices of r1" in why


def test_two_experiments_that_start_at_once_never_get_the_same_device() -> None:
    # By number each could have a trainer and a rollout; but whoever has t0 has the device of r1, too.
    fleet = services(t0="a", t1="b", r0="b", r1="a")
    demands = [wanting("first", most=1), wanting("second", most=1)]

    found = settled(demands, fleet)

    assert found == {"first": {"t0", "r0"}, "second": set()}


def test_trainer_and_rollout_that_take_turns_get_the_same_devices() -> None:
    fleet = services(t0="a", t1="b", r0="b", r1="a")
    demands = [wanting(name, most=1, shares_devices=True) for name in ("first", "second")]

    assert settled(demands, fleet) == {"first": {"t0", "r1"}, "second": {"t1", "r0"}}


def test_a_replacement_on_the_same_device_is_its_experiment_s() -> None:
    demands = [wanting("first", most=1, placed=True), wanting("second", placed=True)]
    fleet = [*held("first", t0="a"), *held("second", t1="c", r1="d"), *services(r0="a")]

    assert settled(demands, fleet) == {"first": {"t0", "r0"}, "second": {"t1", "r1"}}


def test_surplus_of_those_who_ask_for_less_is_given_back_for_a_minimum() -> None:
    demands = [wanting("plain", placed=True), wanting("asking", 1, 1)]
    fleet = [*held("plain", t0="a", r0="b", r1="c"), *services(t1="d")]

    placement = place(demands, fleet)

    assert placement.leaving == {"r1": WhyLeave.MINIMUM}
    assert placement.coming == {"asking": {Kind.ROLLOUT: 1}}
    assert settled(demands, fleet) == {"plain": {"t0", "r0"}, "asking": {"t1", "r1"}}


def test_a_minimum_is_not_given_back() -> None:
    demands = [wanting("plain", placed=True), wanting("asking", 1, 1)]

    placement = place(demands, [*held("plain", t0="a", r0="b"), *services(t1="d")])

    assert (placement.leaving, placement.lacking) == ({}, {"asking": {Kind.ROLLOUT: 1}})


def devices(*numbers: int) -> Capabilities:
    return Capabilities(
        device="cuda" if numbers else "cpu", devices=tuple(GpuDevice(index=n) for n in numbers), transports=("gloo",)
    )


async def add_service(
    gateway: GatewayState, kind: ServiceKind, name: str, *numbers: int, engines: tuple[EngineOffer, ...] = ()
) -> str:
    has = devices(*numbers).model_copy(update={"engines": engines})
    registered = await gateway.fleet.register(a_registration(kind, name, capabilities=has))
    return registered.service_id


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [(((), ()), ("cpu", "cpu", "float32")), (((0,), (1,)), ("cuda:0", "cuda:0", "bfloat16"))],
)
async def test_what_is_left_to_auto_is_decided_by_the_first_services_and_kept(
    numbers: tuple[tuple[int, ...], tuple[int, ...]], expected: tuple[str, str, str]
) -> None:
    gateway = a_gateway()
    for kind, mine in ((Kind.TRAINER, numbers[0]), (Kind.ROLLOUT, numbers[1]), (Kind.REWARD, ())):
        await add_service(gateway, kind, kind.value, *mine)
    spec = a_spec().model_dump(mode="json")
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING, spec=spec)

    await gateway.scheduler.reconcile()

    decided = experiment.spec
    assert (decided.parallelism.device, decided.rollout.engine.device, decided.model.dtype) == expected
    assert experiment.record.spec == decided.model_dump(mode="json")
    trainer = gateway.registry.trainer_of(experiment.id)
    assert trainer is not None
    told = gateway.fleet.desired(trainer)
    assert told.assignment is not None and told.state is WorkState.RUNNING
    assert told.assignment.spec["parallelism"]["device"] == expected[0]
    types = [event.type for event in await gateway.store.events(experiment.id, after=0, limit=100)]
    assert types.index("devices_decided") < types.index("service_assigned")
    # A rollout that joins later has to have what was decided.
    late = await add_service(gateway, Kind.ROLLOUT, "late")
    await gateway.scheduler.reconcile()
    assert (gateway.registry.get(late).experiment_id == experiment.id) is (expected[0] == "cpu")


OLD = EngineOffer(kind="torch")
NEW = EngineOffer(kind="torch", takes_adapters=True)


@pytest.mark.parametrize(
    ("first", "decided", "takes_old"),
    [((NEW,), "adapters", False), ((NEW, OLD), "merged", True)],
)
async def test_adapters_travel_alone_where_the_first_rollouts_take_them_and_later_ones_have_to(
    first: tuple[EngineOffer, ...], decided: str, takes_old: bool
) -> None:
    gateway = a_gateway()
    for kind in (Kind.TRAINER, Kind.REWARD):
        await add_service(gateway, kind, kind.value)
    names = [await add_service(gateway, Kind.ROLLOUT, str(n), engines=(offer,)) for n, offer in enumerate(first)]
    spec = a_spec(model={"path": "m", "lora": {"rank": 4}}, resources={"rollouts": {"min": len(first), "max": 4}})
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING, spec=spec.model_dump(mode="json"))

    await gateway.scheduler.reconcile()
    late = await add_service(gateway, Kind.ROLLOUT, "late", engines=(OLD,))
    await gateway.scheduler.reconcile()

    assert experiment.spec.asynchrony.publication.lora == decided
    told = await gateway.store.events(experiment.id, after=0, limit=100)
    facts = next(each.data for each in told if each.type == "publication_decided")
    reason = None if decided == "adapters" else f"the engine of {names[1]} takes whole weights"
    assert (facts["lora"], facts.get("reason")) == (decided, reason)
    assert (gateway.registry.get(late).experiment_id == experiment.id) is takes_old


async def test_an_experiment_waits_for_devices_and_starts_when_there_are_some() -> None:
    gateway = a_gateway()
    for kind in (Kind.TRAINER, Kind.ROLLOUT, Kind.REWARD):
        await add_service(gateway, kind, kind.value, *((0,) if kind is not Kind.REWARD else ()))
    spec = a_spec(resources={"trainer": {"devices": 2}}).model_dump(mode="json")
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING, spec=spec)

    await gateway.scheduler.reconcile()

    assert gateway.registry.of(experiment.id) == []
    assert gateway.commands.view(experiment).problem.cause == (  # type: ignore[union-attr]
        "waiting for 1 trainer with 2 devices to register; the devices of the fleet's trainers: 1"
    )
    large = await add_service(gateway, Kind.TRAINER, "large", 1, 2)
    await gateway.scheduler.reconcile()
    assert gateway.registry.get(large).experiment_id == experiment.id
    assert gateway.commands.view(experiment).problem is None
    assert experiment.spec.parallelism.device == "cuda"
    await say(gateway, large, gateway.registry.get(large).observed)
