"""What an experiment took of each pool: from the events of its services, however often they came and went."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.services.gateway.lifecycle.origins import find, take
from flotilla.services.gateway.monitoring import usage
from flotilla.services.gateway.monitoring.usage import _Span, machine_of, usage_of, uses_of
from flotilla.services.gateway.routes import facts as routes
from flotilla.services.gateway.store.writes import PointRecord
from flotilla.shared.clock import ManualClock, rfc3339
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.costs import PoolUse, Prices, Usage, priced, read_prices
from flotilla.shared.schemas.experiment import Event, ExperimentState
from flotilla.shared.schemas.service import Capabilities, GpuDevice, ServiceKind
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.testing.builders import a_group, a_task
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, add_service, spec_document, stop
from tests.unit.gateway.stored import store_checkpoint

HOUR = 3600.0
H100 = {"GPU-1": "NVIDIA H100"}


def assigned(hour: float, name: str, kind: str = "rollout", **facts: object) -> Event:
    return Event(
        id=1, type="service_assigned", at=rfc3339(hour * HOUR), data={"service_id": name, "service_kind": kind, **facts}
    )


def left(hour: float, name: str) -> Event:
    data = {"service_id": name, "service_kind": "rollout", "tokens_handed_over": 5.0}
    return Event(id=1, type="service_left", at=rfc3339(hour * HOUR), data=data)


def hours(*events: Event, until: float = 10.0) -> dict[tuple[str, str, str], float]:
    return {(use.pool, use.kind, use.device): round(use.hours, 6) for use in uses_of(events, until * HOUR)}


def test_services_count_from_their_assignment_to_their_departure_or_until_now() -> None:
    events = (
        assigned(1, "t", "trainer"),
        assigned(1, "a", pool="spot"),
        left(3, "a"),
        assigned(4, "a", pool="spot", returns=True),
        assigned(5, "a", pool="spot", returns=True),
        left(6, "nobody"),
    )

    assert hours(*events) == {("on-demand", "trainer", "cpu"): 9.0, ("spot", "rollout", "cpu"): 2.0 + 6.0}


def test_devices_count_each_and_one_of_two_services_half() -> None:
    two = {"GPU-2": "NVIDIA A100", "GPU-3": "NVIDIA A100"}
    events = (
        assigned(0, "t", "trainer", devices=H100),
        assigned(2, "a", devices=H100),
        assigned(0, "b", pool="spot", devices=two),
        left(6, "a"),
    )

    assert hours(*events, until=8.0) == {
        ("on-demand", "trainer", "NVIDIA H100"): 2.0 + 4.0 / 2 + 2.0,
        ("on-demand", "rollout", "NVIDIA H100"): 4.0 / 2,
        ("spot", "rollout", "NVIDIA A100"): 16.0,
    }


@pytest.mark.parametrize("device", ["cuda", "cpu"])
async def test_devices_are_taken_by_who_computes_on_them_alone(device: str) -> None:
    gateway = a_gateway()
    spec = a_spec(
        model={"path": "/nowhere/model", "dtype": "float32"},
        rollout=spec_document()["rollout"] | {"engine": {"kind": "torch", "device": device}},
        parallelism={"device": device},
    )
    capabilities = Capabilities(pool="spot", devices=(GpuDevice(uuid="GPU-1", name="NVIDIA H100"),))

    took = {}
    for kind in ServiceKind:
        name = await add_service(gateway, kind, kind.value, capabilities=capabilities)
        took[kind] = machine_of(gateway.registry.get(name), spec)

    computes = {"pool": "spot"} | ({"devices": H100} if device == "cuda" else {})
    assert took.pop(ServiceKind.TRAINER) == took.pop(ServiceKind.ROLLOUT) == computes
    assert list(took.values()) == [{"pool": "spot"}] * len(took) and took
    await stop(gateway)


def test_many_who_overlap_on_one_device_are_each_met_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    met = 0

    class Counted(_Span):
        def __getattribute__(self, name: str) -> object:
            nonlocal met
            met += name in ("begin", "end")
            return super().__getattribute__(name)

    monkeypatch.setattr(usage, "_Span", Counted)
    num_short = 300
    events = [assigned(0, "t", "trainer", devices=H100)]
    for each in range(num_short):
        events += [assigned(1 + each / num_short, f"r{each}", devices=H100), left(3, f"r{each}")]

    found = hours(*events, until=4.0)

    assert sum(found.values()) == pytest.approx(4.0)
    # Alone for an hour at first and for one at last; between, one of up to three hundred.
    assert 2.0 < found["on-demand", "trainer", "NVIDIA H100"] < 2.05
    assert met < 10 * num_short


async def test_hours_are_added_up_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    where = []
    monkeypatch.setattr(usage, "uses_of", lambda *_: where.append(threading.get_ident()) or [])

    assert (await usage_of(gateway.store, experiment, 0.0)).uses == ()

    assert len(where) == 1 and where[0] != threading.get_ident()
    await stop(gateway)


async def test_tokens_come_from_the_series_and_hours_end_with_the_experiment() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    spec = a_spec(rollout=spec_document()["rollout"] | {"engine": {"kind": "vllm"}}).model_dump(mode="json")
    experiment = await add_experiment(gateway, spec=spec)
    capabilities = Capabilities(pool="spot", devices=(GpuDevice(uuid="GPU-1", name="NVIDIA H100"),))
    name = await add_service(gateway, ServiceKind.ROLLOUT, "one", capabilities=capabilities)
    service = gateway.registry.get(name)
    facts = {"service_id": name, "service_kind": "rollout", **machine_of(service, experiment.spec)}
    await gateway.events.append(experiment.id, "service_assigned", **facts)
    for step, (spot, trained, saved) in enumerate([(0, 10, 0), (20, 30, 4)], start=1):
        values = {
            "tokens/generated": 60.0 * step,
            "tokens/trained_in_step": trained,
            "tokens/resumed_in_step": saved,
        } | ({"tokens/trained_in_step/spot": spot} if spot else {})
        points = [PointRecord(name=key, step=step, version=step, value=each, at="") for key, each in values.items()]
        await gateway.store.put_metrics(experiment.id, points)
    clock.advance(HOUR)
    running = await usage_of(gateway.store, experiment, clock.now())
    await gateway.repository.update(experiment, state=ExperimentState.STOPPED)
    clock.advance(HOUR)

    ended = await usage_of(gateway.store, experiment, clock.now())

    assert ended == running
    assert (ended.generated_tokens, ended.trained_tokens, ended.saved_tokens) == (120, 40, 4)
    # The first step's rollouts named no pool.
    assert ended.trained_by_pool == {"spot": 20, "on-demand": 16}
    assert [(use.pool, use.device, round(use.hours, 3)) for use in ended.uses] == [("spot", "NVIDIA H100", 1.0)]
    await stop(gateway)


async def test_a_step_that_is_trained_again_counts_for_the_pools_that_it_names_then() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    trained = "tokens/trained_in_step"
    for step, at, values in [
        (8, "1", {"": 10, "/spot-a": 10}),
        (9, "2", {"": 10, "/spot-a": 10}),
        (10, "3", {"": 12, "/spot-a": 12}),
        (9, "4", {"": 14, "/spot-b": 14}),
        (10, "5", {"": 11, "/spot-a": 5, "/spot-b": 6}),
    ]:
        points = [PointRecord(trained + name, step, step, float(value), at) for name, value in values.items()]
        await gateway.store.put_metrics(experiment.id, points)

    found = await usage_of(gateway.store, experiment, 0.0)

    assert found.trained_tokens == 10 + 14 + 11
    assert found.trained_by_pool == {"spot-a": 10 + 5, "spot-b": 14 + 6}
    await stop(gateway)


async def test_a_fork_generated_what_came_after_its_origin(tmp_path: Path) -> None:
    gateway = a_gateway()
    store_checkpoint(tmp_path / "tiny-1", 4, spec_document(), totals={"trained_tokens": 300, "generated_tokens": 400})
    origin = take(find(tmp_path / "tiny-1", None), a_spec(), "fork-1", tmp_path / "fork-1")
    experiment = await add_experiment(gateway, "fork-1", origin=origin.model_dump(mode="json"))
    assert (await usage_of(gateway.store, experiment, 0.0)).generated_tokens == 0

    for step, total in [(5, 450.0), (6, 520.0)]:
        values = {"tokens/generated": total, "tokens/trained_in_step": 40.0}
        points = [PointRecord(name, step, step, value, "1") for name, value in values.items()]
        await gateway.store.put_metrics(experiment.id, points)

    found = await usage_of(gateway.store, experiment, 0.0)
    assert (found.generated_tokens, found.trained_tokens) == (120, 80)
    await stop(gateway)


async def test_a_pool_without_a_price_takes_the_costs_alone() -> None:
    prices = Prices.model_validate({"hourly": [{"pool": "spot", "price": 1}]})
    gateway = a_gateway(prices=prices)
    experiment = await add_experiment(gateway)
    await gateway.events.append(experiment.id, "service_assigned", service_id="a", service_kind="rollout", pool="spot")
    answered = await routes.usage(experiment.id, gateway)
    assert answered.costs is not None and answered.costs_problem is None

    await gateway.events.append(experiment.id, "service_assigned", service_id="b", service_kind="rollout", pool="new")
    answered = await routes.usage(experiment.id, gateway)

    assert [use.pool for use in answered.uses] == ["new", "spot"] and answered.costs is None
    assert (answered.costs_problem or "").startswith("no price fits cpu in the pool new")
    await stop(gateway)


A_USAGE = Usage(
    experiment_id="sum-1",
    uses=(
        PoolUse(pool="on-demand", kind="trainer", device="NVIDIA H100", hours=2.0),
        PoolUse(pool="spot-1", kind="rollout", device="NVIDIA H100", hours=4.0),
        PoolUse(pool="on-demand", kind="reward", device="cpu", hours=2.0),
    ),
    generated_tokens=4_000_000,
    trained_tokens=2_000_000,
    saved_tokens=500_000,
    trained_by_pool={"spot-1": 1_000_000, "on-demand": 500_000},
)
PRICES = """
currency: EUR
hourly:
  - {pool: "spot*", device: "*H100*", price: 1.5}
  - {device: "*H100*", price: 3}
  - {device: cpu, price: 0.5}
"""


def test_the_first_price_that_fits_holds(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)

    costs = priced(A_USAGE, read_prices(tmp_path / "prices.yaml"))

    assert (costs.currency, costs.cost, costs.per_million) == ("EUR", 6.0 + 6.0 + 1.0, 6.5)
    kept, spot = costs.pools
    assert (kept.pool, kept.cost, kept.sampling_cost, kept.per_million) == ("on-demand", 7.0, 0.0, 0.0)
    assert (spot.pool, spot.cost, spot.sampling_cost, spot.per_million) == ("spot-1", 6.0, 6.0, 6.0)


def test_what_has_no_price_is_named() -> None:
    with pytest.raises(InvalidRequest, match="no price fits cpu in the pool on-demand"):
        priced(A_USAGE, Prices.model_validate({"hourly": [{"device": "*H100*", "price": 1}]}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hourly: []", "hourly: Tuple should have at least 1 item"),
        ("hourly: [{price: -1}]", "hourly.0.price: Input should be greater than or equal to 0"),
        ("hourly: [{price: .inf}]", "hourly.0.price: Input should be a finite number"),
        ("hourly: [{prize: 1}]", "hourly.0.price: Field required"),
        ("[1]", "the file: Input should be"),
        ("a: [", "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "prices.yaml").write_text(text)

    with pytest.raises(InvalidRequest, match=said):
        read_prices(tmp_path / "prices.yaml")


def test_a_group_says_of_which_pool_it_is_on_its_way_too() -> None:
    group = a_group(a_task(0))
    first, *others = group.trajectories
    begun = Group(group.task, (replace(first, resumed_tokens=1), *others)).sampled_by("r-1", "spot")

    assert [each.pool for each in begun.trajectories] == ["spot"] * len(begun.trajectories)
    assert begun.trajectories[0].rollout is None
    read = Group.from_wire(begun.body_to_wire(), begun.grades_to_wire())
    assert [each.pool for each in read.trajectories] == [each.pool for each in begun.trajectories]
    assert "pool" not in group.trajectories[0].sampled_to_wire()
