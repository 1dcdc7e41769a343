"""Weights of data sources change while an experiment runs: recorded with the first group whose row they choose."""

from typing import Any

from flotilla.services.gateway.datasets.dataset import Dataset, Part
from flotilla.services.gateway.datasets.mixture import Mixture
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.lifecycle.rules import Rules
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.records.steering import weights_by_group
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.schemas.experiment import ExperimentState, MetricPoint
from flotilla.shared.schemas.live_changes import WeightsFrom
from flotilla.shared.streams.hop import HopName, Resolution
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, a_spec, add_experiment

SOURCES = [{"path": "/easy.jsonl", "weight": 1.0}, {"path": "/hard.jsonl", "weight": 0.0}]
NUM_EASY = 5
HARDER = '{"data": {"sources": {"0": {"weight": 1}, "1": {"weight": 3}}}}'


async def add_running(gateway: GatewayState, **spec: Any) -> Experiment:
    document = a_spec(optimisation={"steps": 40, "groups_per_mini_batch": 2}, **spec).model_dump(mode="json")
    document["data"] |= {"path": None, "sources": SOURCES, "shuffle": False}
    facts: dict[str, Any] = {"state": ExperimentState.RUNNING, "policy_version": 4, "published_step": 4, "step": 4}
    return await add_experiment(gateway, spec=document, **facts)


def a_feeder(gateway: GatewayState, experiment: Experiment) -> Feeder:
    rows = [{"prompt": f"p{n}", "label": str(n)} for n in range(2 * NUM_EASY)]
    parts = (Part(0, NUM_EASY), Part(NUM_EASY, NUM_EASY))
    dataset = Dataset(rows, experiment.spec.data, 0, parts, Mixture([each["weight"] for each in SOURCES]))  # type: ignore[misc]
    status = gateway.feeder_status.of(experiment)
    order = RowOrder(experiment, dataset, gateway.commands.live.place)
    return Feeder(experiment, order, gateway.store, gateway.clock, status)


async def issued(feeder: Feeder, experiment: Experiment, batches: int = 4) -> dict[int, int]:
    found = {}
    for _ in range(batches):
        await feeder.feed()
        hop = experiment.train.hop(HopName.TASKS, "rollout")
        claims = await hop.claim(99, wait_seconds=0)
        found |= {claim.task().group_id: claim.task().row for claim in claims}
        await hop.resolve_many(claims, Resolution.FILTERED, "test")
    return found


async def test_groups_issued_from_then_on_come_from_the_sources_as_they_are_weighed_now() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    feeder = a_feeder(gateway, experiment)
    before = await issued(feeder, experiment)

    await gateway.commands.change(experiment.id, HARDER)
    [change] = experiment.steering.changes
    assert (change.version, change.group_id) == (4, None), "no group was issued by it"
    after = await issued(feeder, experiment)

    [change] = experiment.steering.changes
    assert {key.path: (key.before, key.after) for key in change.keys} == {"data.sources.1.weight": (0.0, 3.0)}
    assert change.group_id == min(after) == max(before) + 1
    assert all(row < NUM_EASY for row in before.values()), "the other source had no weight"
    hard = [row for row in after.values() if row >= NUM_EASY]
    assert len(hard) >= 2 * (len(after) - len(hard))
    easy = [row for row in [*before.values(), *after.values()] if row < NUM_EASY]
    assert easy == [n % NUM_EASY for n in range(len(easy))], "each source goes on with its next row"


async def test_a_gateway_killed_between_record_and_effect_issues_what_it_would_have() -> None:
    rows = []
    for is_killed, is_placed in ((False, False), (True, False), (True, True)):
        store, planes = MemoryStore(), MemoryPlanes()
        gateway = a_gateway(store, planes=planes)
        experiment = await add_running(gateway)
        feeder = a_feeder(gateway, experiment)
        before = await issued(feeder, experiment)
        await gateway.commands.change(experiment.id, HARDER)
        if is_placed:
            await gateway.commands.live.place(experiment.id, max(before) + 1)
        if is_killed:
            gateway = a_gateway(store, planes=planes)
            await gateway.load()
            experiment = gateway.repository.get(experiment.id)
            feeder = a_feeder(gateway, experiment)
        after = await issued(feeder, experiment)
        await gateway.commands.live.place(experiment.id, 999)
        assert experiment.steering.changes[0].group_id == max(before) + 1, "it is said once"
        rows.append(list((before | after).items())[: len(before) + 6])

    assert rows[0] == rows[1] == rows[2]


async def test_a_rule_goes_on_to_the_next_data_set() -> None:
    gateway = a_gateway()
    harder = {"kind": "set", "values": {"data.sources.0.weight": 0, "data.sources.1.weight": 1}}
    when = {"kind": "above", "bound": 0.9}
    experiment = await add_running(gateway)
    document = experiment.record.spec | {
        "rules": [{"name": "next", "metric": "reward/mean", "when": when, "then": harder}]
    }
    experiment = await add_experiment(gateway, spec=document, id="e2", policy_version=4, step=4)
    feeder = a_feeder(gateway, experiment)
    points = gateway.measurements.of(experiment).rule_points
    rules = Rules(
        experiment, gateway.repository, gateway.commands, gateway.events, gateway.store, gateway.clock, points
    )
    before = await issued(feeder, experiment)
    await gateway.store.put_metrics(experiment.id, [MetricPoint(name="reward/mean", step=5, version=5, value=0.95)])

    await rules.look()
    after = await issued(feeder, experiment)

    assert max(before.values()) < NUM_EASY <= min(after.values())
    assert experiment.steering.changes[0].actor == "rule next"


def test_a_fork_goes_on_with_the_turns_of_the_experiment_that_it_begins_from() -> None:
    base = {"data": {"sources": SOURCES}}
    first, second = WeightsFrom(group_id=0, weights=(1.0, 0.0)), WeightsFrom(group_id=7, weights=(1.0, 3.0))
    weighed = {"data": {"sources": [SOURCES[0], SOURCES[1] | {"weight": 3.0}]}}

    assert weights_by_group(base, ()) == (first,)
    assert weights_by_group(weighed, (), (first, second), 9) == (first, second)
    assert weights_by_group(base, (), (first, second), 9)[-1] == WeightsFrom(group_id=9, weights=(1.0, 0.0))
    assert weights_by_group(base, (), (first, second), 5)[1:] == (WeightsFrom(group_id=5, weights=(1.0, 0.0)),)
    assert weights_by_group({"data": {"path": "x"}}, (), (first,)) == ()
