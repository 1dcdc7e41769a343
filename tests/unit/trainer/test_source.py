"""Which groups reach a step, and how the others end."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from flotilla.services.trainer.data import source as source_module
from flotilla.services.trainer.data.group_metrics import Totals
from flotilla.services.trainer.data.plan import StepPlanner
from flotilla.services.trainer.data.source import GroupSource, Requirements, find_problem
from flotilla.shared.checkpoints.lineage import INITIAL, ROOT, VersionLine
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import Conflict
from flotilla.shared.net.retry import retry
from flotilla.shared.schemas.routing import Ids, RoutedExperts, RoutingSizes
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import GradeStatus, Group, Trajectory
from flotilla.shared.streams.hop import REDUNDANT, HopName
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.streams.plans import ENDED_BEFORE
from flotilla.shared.testing.absence import make_absent
from flotilla.shared.testing.kept import KeptInMemory
from tests.unit.trainer.builders import VOCABULARY, a_group, a_spec, a_trajectory, no_changes

STRICT = Requirements(vocabulary=VOCABULARY, min_scored=2, components=(), max_lag=1)
LINE = VersionLine.of([INITIAL], steps_per_version=1, total_steps=100)


async def never() -> None:
    raise AssertionError("no group came again")


async def issue(plane: MemoryDataPlane, *versions: int) -> list[Task]:
    """Issue one task for each version."""
    start = await plane.admission.next_group_id()
    tasks = [
        Task(group_id=start + number, row=0, messages=(), group_size=2, seed=1, min_version=version)
        for number, version in enumerate(versions)
    ]
    await plane.admission.issue_many(tasks, limit=1000)
    return tasks


async def answer(plane: MemoryDataPlane, group: Group) -> None:
    """Bring a group to the scored stream."""
    hop = plane.hop(HopName.TASKS, "rollout")
    held = []
    while True:
        [claim] = await hop.claim(1, wait_seconds=0.0)
        if claim.header.group_id == group.task.group_id:
            break
        held.append(claim)
    await hop.forward(claim, group)
    for other in held:
        await hop.hand_back(other)
    reward = plane.hop(HopName.GENERATED, "reward")
    [claim] = await reward.claim(1, wait_seconds=0.0)
    await reward.forward(claim, group)


@asynccontextmanager
async def a_source(
    plane: MemoryDataPlane,
    requirements: Requirements = STRICT,
    trained: IntervalSet | None = None,
    kept: KeptInMemory | None = None,
) -> AsyncIterator[GroupSource]:
    queue = plane.trainer("trainer")
    await queue.take_over()
    trained = IntervalSet() if trained is None else trained
    async with a_running(GroupSource(queue, requirements, trained, Totals(), LINE, kept)) as source:
        yield source


@asynccontextmanager
async def a_running(source: GroupSource) -> AsyncIterator[GroupSource]:
    running = asyncio.create_task(source.run())
    yield source
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def planner(spec: ExperimentSpec, plane: MemoryDataPlane, source: GroupSource) -> StepPlanner:
    return StepPlanner(spec, source._queue, plane.admission, source, LINE, no_changes(spec))


async def settled(plane: MemoryDataPlane) -> None:
    """Let the source take in what is there."""
    while (await plane.ledger()).waiting.scored:
        await asyncio.sleep(0.005)
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_step_takes_the_oldest_groups_in_order() -> None:
    plane = MemoryDataPlane()
    tasks = await issue(plane, 0, 0, 0)
    spec = a_spec(optimisation={"steps": 5, "groups_per_mini_batch": 2})

    async with a_source(plane) as source:
        for task in reversed(tasks):
            await answer(plane, a_group([1.0, 0.0], task))
        await settled(plane)
        planned = await planner(spec, plane, source).groups_of(1, ROOT, never)

    assert [group.task.group_id for group in planned.groups] == [0, 1]
    assert not planned.is_replay
    assert (await plane.ledger()).planned == 2


@pytest.mark.parametrize("is_awaited", [False, True])
async def test_groups_are_claimed_together_while_nobody_waits_for_them(
    is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "GATHER_SECONDS", 60.0)
    plane = MemoryDataPlane()
    tasks = await issue(plane, *[0] * 4)
    async with a_source(plane) as source:
        waiting = asyncio.create_task(source.until(lambda ids: len(ids) == 4, wait_seconds=10)) if is_awaited else None
        ready = []
        for task in tasks:
            await answer(plane, a_group([1.0, 0.0], task))
            for _ in range(100):
                await asyncio.sleep(0)
            ready.append(source.num_ready)

        assert ready == ([1, 2, 3, 4] if is_awaited else [1, 1, 1, 1])
        assert await (waiting or source.until(lambda ids: len(ids) == 4, wait_seconds=10))


async def test_a_standing_plan_is_replayed_in_its_order() -> None:
    plane = MemoryDataPlane()
    tasks = await issue(plane, 0, 0)
    spec = a_spec(optimisation={"steps": 5, "groups_per_mini_batch": 2})
    async with a_source(plane) as source:
        for task in tasks:
            await answer(plane, a_group([1.0, 0.0], task))
        await planner(spec, plane, source).groups_of(1, ROOT, never)

    async with a_source(plane) as later:
        replayed = await planner(spec, plane, later).groups_of(1, ROOT, never)

    assert replayed.is_replay
    assert [group.task.group_id for group in replayed.groups] == [0, 1]


async def test_a_group_that_is_too_old_is_dropped_and_counted() -> None:
    plane = MemoryDataPlane()
    old, new = await issue(plane, 0, 2)
    spec = a_spec(
        optimisation={"steps": 5, "groups_per_mini_batch": 1},
        asynchrony={"staleness_threshold": 1.0, "max_lag": 1, "on_max_lag": "drop"},
    )

    kept = KeptInMemory()
    async with a_source(plane, kept=kept) as source:
        await answer(plane, a_group([1.0, 0.0], old, version=0))
        await answer(plane, a_group([1.0, 0.0], new, version=2))
        await settled(plane)
        planned = await planner(spec, plane, source).groups_of(3, ROOT, never)

    assert [group.task.group_id for group in planned.groups] == [new.group_id]
    ledger = await plane.ledger()
    assert ledger.dropped == {"stale": 1}
    assert kept.groups == [(old.group_id, SampleKind.DROPPED, "stale")]
    assert ledger.balanced


async def test_what_is_finished_after_its_step_is_dropped_as_redundant_where_more_is_issued() -> None:
    plane = MemoryDataPlane()
    late, new = await issue(plane, 0, 2)
    spec = a_spec(
        optimisation={"steps": 5, "groups_per_mini_batch": 1},
        asynchrony={"redundant_groups": 2, "staleness_threshold": 1.0, "max_lag": 1, "on_max_lag": "drop"},
    )

    async with a_source(plane, replace(STRICT, too_old=REDUNDANT)) as source:
        await answer(plane, a_group([1.0, 0.0], late, version=0))
        await answer(plane, a_group([1.0, 0.0], new, version=2))
        await settled(plane)
        planned = await planner(spec, plane, source).groups_of(3, ROOT, never)

    assert [group.task.group_id for group in planned.groups] == [new.group_id]
    ledger = await plane.ledger()
    assert ledger.dropped == {"redundant": 1} and ledger.balanced


async def test_pace_waits_for_the_group_that_the_next_version_would_find_too_old() -> None:
    plane = MemoryDataPlane()
    old, *young = await issue(plane, 0, 1, 1)
    spec = a_spec(
        optimisation={"steps": 5, "groups_per_mini_batch": 1},
        asynchrony={"staleness_threshold": 1.0, "max_lag": 1},
    )

    async with a_source(plane) as source:
        for task in young:
            await answer(plane, a_group([1.0, 0.0], task, version=1))
        await settled(plane)
        waiting = asyncio.create_task(planner(spec, plane, source).groups_of(2, ROOT, never))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done, "the old group is outstanding and would be too old for version 2"
        await answer(plane, a_group([1.0, 0.0], old, version=0))
        planned = await waiting

    assert [group.task.group_id for group in planned.groups] == [old.group_id]
    assert planned.pace_seconds > 0.04


async def test_drop_does_not_wait() -> None:
    plane = MemoryDataPlane()
    _, young = await issue(plane, 0, 1)
    spec = a_spec(
        optimisation={"steps": 5, "groups_per_mini_batch": 1},
        asynchrony={"staleness_threshold": 1.0, "max_lag": 1, "on_max_lag": "drop"},
    )

    async with a_source(plane) as source:
        await answer(plane, a_group([1.0, 0.0], young, version=1))
        planned = await planner(spec, plane, source).groups_of(2, ROOT, never)

    assert [group.task.group_id for group in planned.groups] == [young.group_id]


async def test_a_group_trained_before_is_resolved_once_it_is_durable() -> None:
    plane = MemoryDataPlane()
    [task] = await issue(plane, 0)
    trained = IntervalSet()

    async with a_source(plane, trained=trained) as source:
        trained.add(task.group_id)  # trained in this lineage, but the server came back without its plan
        await answer(plane, a_group([1.0, 0.0], task))
        await settled(plane)
        before = await plane.ledger()
        await source.on_durable(trained)

    after = await plane.ledger()
    assert (before.trained, before.claimed.scored) == (0, 1)
    assert (after.trained, after.outstanding) == (1, 0)
    assert source.num_ready == 0


async def test_a_group_that_ended_before_is_not_counted_as_trained_unless_it_is_known_to_be() -> None:
    plane = MemoryDataPlane()
    tasks = await issue(plane, *[0] * 4)
    spec = a_spec(optimisation={"steps": 5, "groups_per_mini_batch": 1})

    async with a_source(plane, trained=IntervalSet([0, 1, 2])) as source:
        source.close(2)
        for task in tasks:
            await answer(plane, a_group([1.0, 0.0], task))
        await settled(plane)
        planned = await planner(spec, plane, source).groups_of(1, ROOT, never)

    after = await plane.ledger()
    assert [group.task.group_id for group in planned.groups] == [3]
    assert (after.dropped, after.trained, after.planned) == ({ENDED_BEFORE: 2}, 1, 1)
    assert after.balanced and after.outstanding == 0


async def test_another_plan_of_the_step_is_a_conflict() -> None:
    plane = MemoryDataPlane()
    tasks = await issue(plane, 0, 0)
    async with a_source(plane) as source:
        for task in tasks:
            await answer(plane, a_group([1.0, 0.0], task))
        await settled(plane)
        first, second = source.oldest(2)
        await source.plan(1, [first], 0, ROOT)

        with pytest.raises(Conflict, match="another plan"):
            await source.plan(1, [second], 0, ROOT)


def test_what_cannot_be_trained_is_told_apart() -> None:
    def ending(group: Group, requirements: Requirements = STRICT) -> tuple[str, str] | None:
        problem = find_problem(group, requirements)
        return None if problem is None else (problem[0].value, problem[1])

    good = a_group([1.0, 0.0, None])
    unsure = Group(good.task, tuple(t.graded(GradeStatus.ABSTAINED, None) for t in a_group([None, None]).trajectories))
    broken = Group(
        good.task, tuple(t.graded(GradeStatus.ERROR, None, reason="down") for t in a_group([None, None]).trajectories)
    )
    foreign = Group(good.task, (a_trajectory(3, [2], 1.0), _with_token(a_trajectory(3, [2], 0.0), VOCABULARY)))

    assert ending(good) is None
    assert ending(a_group([1.0, None])) == ("failed", "too_few_scored")
    assert ending(unsure) == ("filtered", "abstained")
    assert ending(broken) == ("failed", "too_few_scored")
    assert ending(foreign) == ("failed", "invalid_tokens")
    assert ending(good, Requirements(VOCABULARY, 2, ("style",), 1)) == ("failed", "missing_component")
    assert ending(good, replace(STRICT, needs_teacher=True)) == ("failed", "no_teacher")


def test_branches_of_one_episode_are_not_compared_with_each_other() -> None:
    group = a_group([1.0, 0.0, 1.0])
    names = ("one", "one", "two")
    of_two = replace(group, trajectories=tuple(map(_named, group.trajectories, names)))
    of_one = replace(group, trajectories=of_two.trajectories[:2])

    assert find_problem(of_two, replace(STRICT, joins_branches=True)) is None
    found = find_problem(of_one, replace(STRICT, joins_branches=True))
    assert found is not None and found[1] == "too_few_scored"
    assert find_problem(of_one, STRICT) is None


def _named(trajectory: Trajectory, episode: str) -> Trajectory:
    return replace(trajectory, episode=episode)


def _with_token(trajectory, token: int):  # type: ignore[no-untyped-def]
    trajectory.token_ids[-1] = token
    return trajectory


async def test_an_old_group_that_arrives_while_the_step_paces_is_dropped_and_not_trained() -> None:
    plane = MemoryDataPlane()
    old, new = await issue(plane, 0, 2)
    spec = a_spec(
        optimisation={"steps": 5, "groups_per_mini_batch": 1},
        asynchrony={"staleness_threshold": 1.0, "max_lag": 1, "on_max_lag": "pace"},
    )
    async with a_source(plane) as source:
        await answer(plane, a_group([1.0, 0.0], new, version=2))
        await settled(plane)
        work = planner(spec, plane, source).groups_of(3, ROOT, never)
        planning = asyncio.create_task(work)
        await asyncio.sleep(0.01)
        await answer(plane, a_group([1.0, 0.0], old, version=0))
        planned = await planning

    assert [group.task.group_id for group in planned.groups] == [new.group_id]
    assert (await plane.ledger()).dropped == {"stale": 1}


@pytest.mark.parametrize("times", [1, 4])
async def test_no_group_of_a_batch_is_forgotten_when_the_server_is_absent_in_between(times: int) -> None:
    """The trainer's claims have no lease: what it forgets is held for ever."""
    plane = MemoryDataPlane()
    tasks = await issue(plane, 0, 0, 0)
    for task in tasks:
        await answer(plane, a_group([1.0, 0.0] if task.group_id else [None, None], task))
    spec = a_spec(optimisation={"steps": 5, "groups_per_mini_batch": 2})
    queue = plane.trainer("trainer")
    await queue.take_over()
    refused = make_absent(queue.hop, "resolve", times)

    async with asyncio.timeout(5), a_running(GroupSource(queue, STRICT, IntervalSet(), Totals(), LINE)) as source:
        planned = await planner(spec, plane, source).groups_of(1, ROOT, never)

    assert [group.task.group_id for group in planned.groups] == [1, 2]
    ledger = await plane.ledger()
    assert (ledger.outstanding, len(refused)) == (0, times)


async def test_a_group_that_is_too_old_is_dropped_though_the_server_is_absent_at_that_moment() -> None:
    plane = MemoryDataPlane()
    (task,) = await issue(plane, 0)
    await answer(plane, a_group([1.0, 0.0], task))
    async with a_source(plane) as source:
        await settled(plane)
        refused = make_absent(source._queue.hop, "resolve", 2)

        await retry(lambda: source.drop_stale(9), waiting_for="the data plane")

    ledger = await plane.ledger()
    assert (ledger.dropped, len(refused)) == ({"stale": 1}, 2)


async def test_what_a_checkpoint_contains_is_resolved_though_the_server_is_absent_at_that_moment() -> None:
    plane = MemoryDataPlane()
    tasks = await issue(plane, 0, 0, 0)
    for task in tasks:
        await answer(plane, a_group([1.0, 0.0], task))
    trained = IntervalSet.from_list([[0, 3]])
    async with a_source(plane, trained=trained) as source:
        source._durable = IntervalSet()
        await settled(plane)
        assert source.num_again == 3
        make_absent(source._queue.hop, "resolve", 1)

        await retry(lambda: source.on_durable(trained), waiting_for="the data plane")

    assert (await plane.ledger()).trained == 3


async def test_records_of_experts_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    plane, readers, ids = MemoryDataPlane(), list[int](), RoutedExperts.ids

    def watched(experts: RoutedExperts) -> Ids:
        readers.append(threading.get_ident())
        return ids(experts)

    monkeypatch.setattr(RoutedExperts, "ids", watched)
    [task] = await issue(plane, 0)
    group = a_group((1.0, 0.0), task)
    members = [
        replace(each, experts=RoutedExperts.of(np.tile([[[0, 1]]], (each.token_ids.size - 1, 1, 1)), 4))
        for each in group.trajectories
    ]
    async with a_source(plane, replace(STRICT, routing=RoutingSizes(1, 2, 4))) as source:
        await answer(plane, replace(group, trajectories=tuple(members)))
        assert await source.until(lambda ready: len(ready) == 1, wait_seconds=5)

    assert len(readers) == len(members)
    assert threading.get_ident() not in readers


async def test_groups_of_another_experiment_are_held_against_its_newest_version() -> None:
    plane, newest = MemoryDataPlane(), 5

    async def read() -> int:
        return newest

    queue = plane.trainer("trainer")
    await queue.take_over()
    foreign = replace(STRICT, is_foreign=True)
    [old, fresh] = await issue(plane, 4, 5)
    async with a_running(GroupSource(queue, foreign, IntervalSet(), Totals(), LINE, read_theirs=read)) as source:
        await answer(plane, a_group([0.0, 1.0], old, version=4))
        await answer(plane, a_group([0.0, 1.0], fresh, version=5))
        assert await source.until(lambda ids: len(ids) == 2, wait_seconds=5)
        assert await source.drop_stale(0) == 0
        planning = planner(a_spec(asynchrony={"staleness_threshold": 1.0, "max_lag": 1}), plane, source)
        assert planning.aged_from(0)[0] == 5

        newest = 6
        plan = await source.plan(1, source.oldest(2), 0, ROOT)

        assert plan is None, "the older one was dropped before the plan was written"
        plan = await source.plan(1, source.oldest(1), 0, ROOT)
        assert plan is not None and plan.group_ids == (fresh.group_id,)
        assert (await plane.ledger()).dropped == {"stale": 1}
        version, lag = planning.aged_from(0)
        assert lag(version, 5) == 1
