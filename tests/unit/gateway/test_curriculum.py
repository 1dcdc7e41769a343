"""Rows are drawn from pools by how well they were answered: the same again after a restart, others once grades come."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from flotilla.services.gateway.datasets.curriculum import Curriculum, Snapshot
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.opening import RowSources, open_feeder
from flotilla.services.gateway.feeder.rows import PoolOrder
from flotilla.services.gateway.lifecycle.rules import Rules
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import CURRICULUM, PutWindow
from flotilla.shared.config.sections.curriculum import CurriculumConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.experiment import MetricPoint
from flotilla.shared.schemas.health import GradingReport, RowOutcome
from flotilla.shared.schemas.live_changes import AdoptAnswer, ChangedKey, CurriculumState, Effect, LiveChange
from flotilla.shared.streams.hop import HopName, Resolution
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, a_spec, add_experiment

POOLS: list[dict[str, Any]] = [
    {"name": "easy", "at_least": 0.7, "weight": 4.0},
    {"name": "middle", "at_least": 0.2, "below": 0.7, "weight": 1.0},
    {"name": "hard", "below": 0.2, "weight": 0.0},
]
CONFIG = CurriculumConfig.model_validate({"pools": POOLS, "unseen": 1.0})
NUM_ROWS = 12


def a_curriculum(snapshot: Snapshot | None = None, weights: Sequence[float] = (1, 4, 1, 0)) -> Curriculum:
    return Curriculum(CONFIG, NUM_ROWS, 7, snapshot or Snapshot(), [(0, tuple(map(float, weights)))])


def graded(rewards: dict[int, float], session: str = "s", first: int = 1) -> list[tuple[str, RowOutcome]]:
    pairs = enumerate(rewards.items(), start=first)
    return [(session, RowOutcome(number=number, row=row, reward=reward)) for number, (row, reward) in pairs]


def test_rows_of_a_pool_are_asked_as_often_as_each_other_and_pools_by_their_weights() -> None:
    fresh = a_curriculum()
    assert sorted(fresh.row(group_id) for group_id in range(NUM_ROWS)) == list(range(NUM_ROWS))

    snapshot = fresh.advanced(NUM_ROWS, graded({row: (0.9, 0.5, 0.0)[row % 3] for row in range(NUM_ROWS)}))
    known = a_curriculum(snapshot)
    drawn = Counter(known.row(NUM_ROWS + number) % 3 for number in range(1000))

    assert known.sizes == {"unseen": 0, "easy": 4, "middle": 4, "hard": 4}
    assert drawn[2] == 0 and 3.0 < drawn[0] / drawn[1] < 5.2, drawn


def test_a_curriculum_that_comes_back_draws_bit_equal_rows_wherever_it_was_cut_off() -> None:
    whole = a_curriculum()
    order = [whole.row(group_id) for group_id in range(20)]
    snapshot = whole.advanced(20, graded({row: row / NUM_ROWS for row in range(NUM_ROWS)}))
    kept = Snapshot.of(snapshot.to_json())
    after = a_curriculum(snapshot)
    order += [after.row(group_id) for group_id in range(20, 200)]

    assert kept == snapshot
    for cut in (20, 21, 77, 199):
        again = a_curriculum(Snapshot.of(kept.to_json()))
        assert [again.row(group_id) for group_id in range(cut, 200)] == order[cut:]


def test_what_was_drawn_and_not_issued_is_drawn_again_by_what_was_graded_since() -> None:
    one, other = a_curriculum(), a_curriculum()
    for group_id in range(9):
        one.row(group_id)
    for group_id in range(5):
        other.row(group_id)
    news = graded({3: 1.0})

    assert one.advanced(5, news) == other.advanced(5, news)


@pytest.mark.parametrize("keeps_rows", [True, False])
def test_a_group_that_is_issued_again_from_before_the_snapshot_moves_no_other(*, keeps_rows: bool) -> None:
    whole = a_curriculum()
    order = [whole.row(group_id) for group_id in range(NUM_ROWS)]
    kept = whole.advanced(NUM_ROWS, graded({row: (0.9, 0.5, 0.0)[row % 3] for row in range(NUM_ROWS)})).to_json()
    if not keeps_rows:
        del kept["drawn"]  # as a checkpoint has it, and a gateway of an earlier release
    twin, asked, again = (a_curriculum(Snapshot.of(kept)) for _ in range(3))
    expected = [twin.row(group_id) for group_id in range(NUM_ROWS, 99)]

    before = [asked.row(group_id) for group_id in (10, 3, 10)]
    assert before == [again.row(group_id) for group_id in (10, 3, 10)]
    assert [asked.row(group_id) for group_id in range(NUM_ROWS, 99)] == expected
    assert [asked.row(group_id) for group_id in (10, 3, 10)] == before
    assert asked.advanced(50, []).asked == twin.advanced(50, []).asked
    if keeps_rows:
        assert before == [order[10], order[3], order[10]]


def test_a_fork_asks_in_groups_that_are_issued_again_what_its_parent_asked() -> None:
    parent = a_curriculum()
    order = [parent.row(group_id) for group_id in range(20)]
    snapshot = parent.advanced(20, graded({row: row / NUM_ROWS for row in range(NUM_ROWS)}))
    later = a_curriculum(snapshot)

    # By the answer to the trainer, whose last group was 12, and the checkpoint's file.
    answer = AdoptAnswer(changes=(), curriculum=CurriculumState.model_validate(snapshot.to_json()))
    told = AdoptAnswer.model_validate_json(answer.model_dump_json()).curriculum
    assert told is not None
    stored = told.issued_again_from(13)
    fork = a_curriculum(Snapshot.of(stored.model_dump(mode="json")))

    assert [group_id for group_id, _ in stored.drawn] == list(range(13, 20))
    assert [fork.row(group_id) for group_id in range(13, 20)] == order[13:]
    assert [fork.row(group_id) for group_id in range(20, 40)] == [later.row(group_id) for group_id in range(20, 40)]


def test_an_outcome_counts_once_and_newer_ones_weigh_more() -> None:
    first = a_curriculum().advanced(0, graded({3: 1.0}))
    second = a_curriculum(first).advanced(0, [*graded({3: 1.0}), *graded({3: 0.0}, first=2), *graded({4: 0.0}, "t")])

    assert (first.means, second.means) == ({3: 1.0}, {3: 0.5, 4: 0.0})
    assert second.seen == {"s": 2, "t": 1}
    assert a_curriculum(second).sizes == {"unseen": 10, "easy": 0, "middle": 1, "hard": 1}


def test_where_only_empty_pools_have_weight_any_row_is_better_than_none() -> None:
    known = a_curriculum(weights=(0, 1, 0, 0))

    assert sorted(known.row(group_id) for group_id in range(NUM_ROWS)) == list(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ([{"name": "a", "below": 0.5}, {"name": "b", "at_least": 0.6}], "bands have to meet"),
        ([{"name": "a", "below": 0.5}], "bands have to meet"),
        ([{"name": "a", "below": 0.5}, {"name": "a", "at_least": 0.5}], "a name of its own"),
        ([{"name": "unseen"}], "none is called unseen"),
    ],
)
def test_bands_that_leave_a_gap_are_refused(pools: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CurriculumConfig.model_validate({"pools": pools})


async def add_running(gateway: GatewayState, **spec: Any) -> Experiment:
    document = a_spec(optimisation={"steps": 90, "groups_per_mini_batch": 4}, **spec).model_dump(mode="json")
    document["data"] |= {"curriculum": CONFIG.model_dump(mode="json")}
    return await add_experiment(gateway, spec=document, policy_version=4, published_step=4, step=4)


def a_feeder(gateway: GatewayState, experiment: Experiment) -> Feeder:
    rows = [{"prompt": f"p{n}", "label": str(n)} for n in range(NUM_ROWS)]
    outcomes = gateway.measurements.of(experiment).outcomes
    sources = RowSources(Dataset(rows, experiment.spec.data, 7), gateway.commands.live.place, outcomes)
    status = gateway.feeder_status.of(experiment)
    return open_feeder(experiment, sources, gateway.store, gateway.clock, status)


async def issued(feeder: Feeder, experiment: Experiment, batches: int = 4) -> dict[int, int]:
    found: dict[int, int] = {}
    for _ in range(batches):
        await feeder.feed()
        hop = experiment.train.hop(HopName.TASKS, "rollout")
        claims = await hop.claim(99, wait_seconds=0)
        found |= {claim.task().group_id: claim.task().row for claim in claims}
        await hop.resolve_many(claims, Resolution.FILTERED, "test")
    return found


def answer(gateway: GatewayState, experiment: Experiment, rewards: dict[int, float]) -> None:
    outcomes = tuple(outcome for _, outcome in graded(rewards))
    gateway.measurements.of(experiment).outcomes.add(GradingReport(session="s", outcomes=outcomes))


async def test_pools_change_with_the_next_version_and_a_killed_gateway_goes_on_bit_equal() -> None:
    found = []
    for is_killed in (False, True):
        store, planes = MemoryStore(), MemoryPlanes()
        gateway = a_gateway(store, planes=planes)
        experiment = await add_running(gateway)
        feeder = a_feeder(gateway, experiment)
        order = await issued(feeder, experiment)
        answer(gateway, experiment, {row: 0.9 if row < 6 else 0.0 for row in range(NUM_ROWS)})
        order |= await issued(feeder, experiment, 1)
        await gateway.repository.update(experiment, policy_version=5, published_step=5)
        order |= await issued(feeder, experiment)
        if is_killed:
            gateway = a_gateway(store, planes=planes)
            await gateway.load()
            experiment = gateway.repository.get(experiment.id)
            feeder = a_feeder(gateway, experiment)
        order |= await issued(feeder, experiment)
        found.append(order)
        rows = await store.metrics(experiment.id, names=["curriculum/easy/rows"], after=0, limit=9)
        assert [(row.version, row.value) for _, row in rows] == [(4, 0), (5, 6)]

    assert found[0] == found[1]
    later = [row for _, row in sorted(found[0].items())][-12:]
    assert all(row < 6 for row in later), "hard rows have no weight, and none is unseen"


async def test_weights_choose_the_groups_that_were_drawn_ahead_as_they_do_in_a_gateway_that_comes_back() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    rows = [{"prompt": f"p{n}", "label": str(n)} for n in range(NUM_ROWS)]
    dataset = Dataset(rows, experiment.spec.data, 7)
    known = graded({row: (0.9, 0.5, 0.0)[row % 3] for row in range(NUM_ROWS)})
    snapshot = Snapshot.of(a_curriculum().advanced(0, known).to_json() | {"seen": {}})
    async with gateway.store.transaction() as change:
        change.write(PutWindow(experiment.id, CURRICULUM, snapshot.to_json()))
    keys = tuple(
        ChangedKey(path=f"data.curriculum.pools.{number}.weight", before=before, after=after)
        for number, (before, after) in enumerate([(4.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
    )
    placed = LiveChange(id="a", at="", actor="", effect=Effect.GROUP, keys=keys, version=4, step=4, group_id=5)

    def an_order() -> PoolOrder:
        outcomes = gateway.measurements.of(experiment).outcomes
        return PoolOrder(experiment, gateway.store, gateway.clock, outcomes)

    order = an_order()
    curriculum = await order.at(0, (), dataset)
    issued_rows = [curriculum.row(group_id) for group_id in range(20)][:5]  # and 15 that are not issued
    later = await order.at(5, (placed,), dataset)
    found = [later.row(group_id) for group_id in range(5, 20)]
    again = await an_order().at(5, (placed,), dataset)

    assert found == [again.row(group_id) for group_id in range(5, 20)]
    assert {row % 3 for row in issued_rows} <= {0, 1} and {row % 3 for row in found} == {2}
    assert await order.at(5, (placed,), dataset) is later, "nothing has changed"


async def test_a_rule_goes_on_to_the_next_pool() -> None:
    gateway = a_gateway()
    rule = {"name": "harder", "metric": "reward/mean", "when": {"kind": "above", "bound": 0.8}, "times": 3}
    experiment = await add_running(gateway)
    document = experiment.record.spec | {"rules": [rule | {"then": {"kind": "next_pool"}}]}
    experiment = await add_experiment(gateway, spec=document, id="e2", policy_version=4, published_step=4, step=4)
    points = gateway.measurements.of(experiment).rule_points
    rules = Rules(
        experiment, gateway.repository, gateway.commands, gateway.events, gateway.store, gateway.clock, points
    )
    feeder = a_feeder(gateway, experiment)
    answer(gateway, experiment, {row: (0.9, 0.5, 0.0)[row % 3] for row in range(NUM_ROWS)})
    before = await issued(feeder, experiment)

    weights = []
    for step in (5, 6, 7):
        await gateway.store.put_metrics(
            experiment.id, [MetricPoint(name="reward/mean", step=step, version=4, value=0.9)]
        )
        await rules.look()
        assert experiment.spec.data.curriculum is not None
        weights.append([pool.weight for pool in experiment.spec.data.curriculum.pools])
        await issued(feeder, experiment, 1)

    assert weights == [[1, 4, 0], [1, 0, 4], [1, 0, 4]], "after the last there is none"
    changes = experiment.steering.changes
    assert next(each.group_id for each in changes) == max(before) + 1 and all(e.is_settled for e in changes)
    assert {row % 3 for row in (await issued(feeder, experiment, 6)).values()} <= {0, 2}


def test_a_rule_without_a_next_pool_is_refused() -> None:
    gateway = a_gateway()
    rule = {
        "name": "r",
        "metric": "reward/mean",
        "when": {"kind": "above", "bound": 0.8},
        "then": {"kind": "next_pool"},
    }
    with pytest.raises(InvalidSpec, match=r"the spec has no data\.curriculum"):
        gateway.commands.live.check(a_spec(rules=[rule]))
    for weights, words in (((1, 1, 1), "give one pool the largest weight"), ((0, 0, 2), "none after hard")):
        pools = [pool | {"weight": weight} for pool, weight in zip(POOLS, weights, strict=True)]
        data = a_spec().model_dump(mode="json")["data"] | {"curriculum": {"pools": pools}}
        with pytest.raises(InvalidSpec, match=words):
            gateway.commands.live.check(a_spec(rules=[rule], data=data))
