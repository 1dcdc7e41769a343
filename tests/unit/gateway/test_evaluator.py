"""The evaluator over the data plane in memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from flotilla.services.gateway.datasets.dataset import Dataset, Part
from flotilla.services.gateway.evaluation import evaluator as module
from flotilla.services.gateway.evaluation.evaluator import Evaluator
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import Unavailable
from flotilla.shared.samples.folder import SAMPLES, stored_files
from flotilla.shared.samples.table import to_groups
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.schemas.task import Task
from flotilla.shared.streams.hop import HopName, Resolution
from flotilla.shared.testing.builders import a_group
from tests.unit.gateway.builders import a_gateway, a_spec, add_experiment, add_service, running, turns, until

ROWS = [{"prompt": f"p{n}", "label": str(n)} for n in range(3)]


async def an_evaluator(**config: Any) -> tuple[GatewayState, Experiment, Evaluator]:
    gateway = a_gateway()
    optimisation = {"steps": 10, "groups_per_mini_batch": 2}
    spec = a_spec(evaluation={"path": "/nowhere/heldout.jsonl"} | config, optimisation=optimisation)
    experiment = await add_experiment(gateway, spec=spec.model_dump(mode="json"))
    dataset = Dataset(ROWS, experiment.spec.data, 0)
    evaluator = Evaluator(experiment, dataset, gateway.repository, gateway.events, gateway.clock)
    return gateway, experiment, evaluator


async def answer(experiment: Experiment, rewards: list[float], *, num_failed: int = 0) -> list[Task]:
    """Answer and grade what is issued in the evaluation lane, but let some groups fail."""
    rollout = experiment.evaluation.hop(HopName.TASKS, "r")
    reward = experiment.evaluation.hop(HopName.GENERATED, "w")
    tasks: list[Task] = []
    while len(tasks) < len(ROWS):
        for claim in await rollout.claim(9, wait_seconds=0.05):
            tasks.append(claim.task())
            if len(tasks) <= num_failed:
                await rollout.resolve(claim, Resolution.FAILED, "timeout")
            else:
                await rollout.forward(claim, a_group(claim.task()))
    for claim in await reward.claim(9, wait_seconds=0.05):
        await reward.forward(claim, a_group(claim.task(), rewards=rewards))
    return tasks


async def test_its_answers_are_kept_and_a_right_and_a_wrong_one_are_told(tmp_path: Path) -> None:
    gateway, experiment, evaluator = await an_evaluator(group_size=2, greedy=False)
    await gateway.repository.update(experiment, directory=str(tmp_path))
    async with running(evaluator.run()):
        await answer(experiment, [1.0, 0.0])
        await until(lambda: experiment.record.evaluated_version == 0)

    [file] = stored_files(tmp_path / SAMPLES)
    groups = to_groups(parquet.read_table(tmp_path / SAMPLES / file.name))
    assert (file.family, file.number, [kept.group.task.row for kept in groups]) == ("evaluation", 0, [0, 1, 2])
    [event] = [
        each for each in await gateway.store.events(experiment.id, after=0, limit=99) if each.type == "evaluation"
    ]
    assert [sample["reward"] for sample in event.data["samples"]] == [1.0, 0.0]
    told = event.data["samples"][0]
    assert told["completion"] == told["written"] == "an answer"
    assert told["question"] == ROWS[told["row"]]["prompt"]


async def series(gateway: GatewayState, experiment: Experiment) -> dict[tuple[str, int], float]:
    rows = await gateway.store.metrics(experiment.id, names=[], after=0, limit=99)
    return {(point.name, point.version): point.value for _, point in rows}


async def kinds(gateway: GatewayState, experiment: Experiment) -> list[str]:
    return [event.type for event in await gateway.store.events(experiment.id, after=0, limit=99)]


@pytest.mark.parametrize(("greedy", "rewards", "accuracy"), [(True, [1.0], 1.0), (False, [1.0, 0.0], 0.5)])
async def test_the_first_version_is_evaluated_pinned_and_held(
    greedy: bool, rewards: list[float], accuracy: float
) -> None:
    size = len(rewards)
    gateway, experiment, evaluator = await an_evaluator(group_size=size, greedy=greedy)
    rollout = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)
    async with running(evaluator.run()):
        await until(lambda: experiment.record.evaluating_version == 0)
        assert gateway.fleet.desired(gateway.registry.get(rollout)).hold_version == 0

        tasks = await answer(experiment, rewards)
        await until(lambda: experiment.record.evaluated_version == 0)

    assert [(t.row, t.pinned_version, t.greedy, t.group_size) for t in tasks] == [
        (n, 0, greedy, size) for n in range(3)
    ]
    found = await series(gateway, experiment)
    assert (found["evaluation/accuracy", 0], found["evaluation/num_scored", 0]) == (accuracy, 3.0 * size)
    assert found["evaluation/lag_versions", 0] == 0
    ledger = await experiment.evaluation.ledger()
    assert (ledger.trained, ledger.outstanding, ledger.balanced) == (3, 0, True)
    assert gateway.fleet.desired(gateway.registry.get(rollout)).hold_version is None
    assert "evaluation" in await kinds(gateway, experiment)


async def test_groups_that_fail_on_their_way_are_errors_and_do_not_hold_it_up() -> None:
    gateway, experiment, evaluator = await an_evaluator()
    async with running(evaluator.run()):
        await answer(experiment, [1.0], num_failed=2)
        await until(lambda: experiment.record.evaluated_version == 0)

    found = await series(gateway, experiment)
    assert (found["evaluation/accuracy", 0], found["evaluation/num_errors", 0]) == (1.0, 2.0)


async def test_a_group_of_another_schema_is_an_error_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, experiment, evaluator = await an_evaluator()
    async with running(evaluator.run()):
        rollout = experiment.evaluation.hop(HopName.TASKS, "r")
        reward = experiment.evaluation.hop(HopName.GENERATED, "w")
        claims = []
        while len(claims) < len(ROWS):
            claims += await rollout.claim(9, wait_seconds=0.05)
        for claim in claims:
            await rollout.forward(claim, a_group(claim.task()))
        for number, claim in enumerate(await reward.claim(9, wait_seconds=0.05)):
            graded = a_group(claim.task(), rewards=[1.0])
            with monkeypatch.context() as earlier:
                if number == 0:
                    earlier.setattr("flotilla.shared.schemas.trajectory.GROUP_SCHEMA", 1)
                await reward.forward(claim, graded)

        await until(lambda: experiment.record.evaluated_version == 0)

    found = await series(gateway, experiment)
    assert (found["evaluation/accuracy", 0], found["evaluation/num_errors", 0]) == (1.0, 1.0)
    assert (await experiment.evaluation.ledger()).failed == {"unreadable": 1}


async def test_the_lane_is_not_searched_again_for_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, experiment, evaluator = await an_evaluator(every_versions=9)
    await gateway.repository.update(experiment, evaluated_version=0)
    num_looks, ledger = 0, experiment.evaluation.ledger

    async def look() -> object:
        nonlocal num_looks
        num_looks += 1
        return await ledger()

    monkeypatch.setattr(experiment.evaluation, "ledger", look)
    monkeypatch.setattr(module, "LEFTOVERS_SECONDS", 1000.0)
    async with running(evaluator.run()):
        await until(lambda: num_looks)
        for version in range(1, 7):
            await gateway.repository.update(experiment, policy_version=version)
            await turns()
        assert num_looks == 1

    monkeypatch.setattr(module, "LEFTOVERS_SECONDS", 0.002)
    async with running(evaluator.run()):
        await until(lambda: num_looks > 3)


async def test_the_next_is_due_after_some_versions_and_the_last_one_when_training_is_over() -> None:
    gateway, experiment, evaluator = await an_evaluator(every_versions=5)
    async with running(evaluator.run()):
        await answer(experiment, [1.0])
        await until(lambda: experiment.record.evaluated_version == 0)

        await gateway.repository.update(experiment, policy_version=4, published_step=4)
        await asyncio.sleep(0.01)
        assert experiment.record.evaluating_version is None
        await gateway.repository.update(experiment, policy_version=5, published_step=5)
        assert {task.pinned_version for task in await answer(experiment, [1.0])} == {5}
        await until(lambda: experiment.record.evaluated_version == 5)

        await gateway.repository.update(experiment, policy_version=6, published_step=6, is_trained=True)
        await answer(experiment, [0.0])
        await until(lambda: experiment.record.evaluated_version == 6)

    rows = await gateway.store.metrics(experiment.id, names=["evaluation/accuracy"], after=0, limit=9)
    assert [(point.version, point.step, point.value) for _, point in rows] == [(0, 0, 1.0), (5, 5, 1.0), (6, 6, 0.0)]
    assert (await experiment.evaluation.ledger()).issued == 9


async def test_one_that_takes_too_long_is_given_up_and_said_to_be() -> None:
    gateway, experiment, evaluator = await an_evaluator(deadline_seconds=0.001)
    clock = gateway.clock
    async with running(evaluator.run()):
        await until(lambda: experiment.record.evaluating_version == 0)
        # More than once: the deadline may begin behind the first.
        while experiment.record.evaluated_version != 0:
            clock.advance(1.0)  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)

    ledger = await experiment.evaluation.ledger()
    assert (ledger.dropped, ledger.balanced) == ({"evaluation_deadline": 3}, True)
    assert "evaluation_failed" in await kinds(gateway, experiment)
    assert await series(gateway, experiment) == {}


async def test_one_that_a_restart_interrupted_is_abandoned_and_done_again() -> None:
    gateway, experiment, evaluator = await an_evaluator()
    async with running(evaluator.run()):
        await until(lambda: experiment.record.evaluating_version == 0)
        rollout = experiment.evaluation.hop(HopName.TASKS, "r")
        assert await rollout.claim(1, wait_seconds=30)
    assert experiment.record.evaluating_version == 0, "what a killed gateway leaves in its database"

    dataset = Dataset(ROWS, experiment.spec.data, 0)
    again = Evaluator(experiment, dataset, gateway.repository, gateway.events, gateway.clock)
    async with running(again.run()):
        while "evaluation_abandoned" not in await kinds(gateway, experiment):
            await asyncio.sleep(0.001)
        tasks = await answer(experiment, [1.0])
        await until(lambda: experiment.record.evaluated_version == 0)

    ledger = await experiment.evaluation.ledger()
    assert [task.group_id for task in tasks] == [3, 4, 5]
    assert (ledger.dropped, ledger.trained, ledger.balanced) == ({"evaluation_abandoned": 3}, 3, True)


async def test_one_that_the_data_planes_absence_cut_short_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, experiment, evaluator = await an_evaluator()
    admission = experiment.evaluation.admission
    outages = iter([True, True, False])

    async def next_group_id() -> int:
        if next(outages, False):
            raise Unavailable("the Redis server does not answer")
        return admission._store.next_group_id  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(admission, "next_group_id", next_group_id)
    async with running(evaluator.run()):
        await answer(experiment, [1.0])
        await until(lambda: experiment.record.evaluated_version == 0)

    assert (await series(gateway, experiment))["evaluation/accuracy", 0] == 1.0
    assert "evaluation_failed" not in await kinds(gateway, experiment)


async def test_each_held_out_set_has_series_of_its_own() -> None:
    gateway = a_gateway()
    sets = [{"name": "easy", "path": "/nowhere/a.jsonl"}, {"name": "hard", "path": "/nowhere/b.jsonl"}]
    spec = a_spec(evaluation={"sets": sets}, optimisation={"steps": 10, "groups_per_mini_batch": 2})
    experiment = await add_experiment(gateway, spec=spec.model_dump(mode="json"))
    dataset = Dataset(ROWS, experiment.spec.data, 0, parts=(Part(0, 2, "easy"), Part(2, 1, "hard")))
    evaluator = Evaluator(experiment, dataset, gateway.repository, gateway.events, gateway.clock)

    evaluating = asyncio.create_task(evaluator.evaluate(0))
    await answer(experiment, [1.0], num_failed=1)
    await evaluating

    found = {name: value for (name, _), value in (await series(gateway, experiment)).items()}
    assert found["evaluation/num_scored"] == 2 and found["evaluation/num_errors"] == 1
    assert (found["evaluation/easy/num_scored"], found["evaluation/easy/num_errors"]) == (1, 1)
    assert (found["evaluation/hard/accuracy"], found["evaluation/hard/num_errors"]) == (1.0, 0)


async def test_answers_that_come_one_by_one_are_taken_and_ended_together(monkeypatch: pytest.MonkeyPatch) -> None:
    _gateway, experiment, evaluator = await an_evaluator()
    have_come, collected, sleep = asyncio.Event(), list[int](), asyncio.sleep

    async def gather(seconds: float) -> None:
        # However long three answers take on a machine with much else to do.
        await (have_come.wait() if seconds == module.GATHER_SECONDS else sleep(seconds))

    monkeypatch.setattr(asyncio, "sleep", gather)
    plane = experiment.evaluation
    original = plane.hop

    def watched(name: HopName, service_id: str) -> Any:
        hop = original(name, service_id)
        if name is HopName.SCORED:
            resolve_many = hop.resolve_many

            async def counted(claims: Any, resolution: Resolution, reason: str) -> list[bool]:
                collected.extend([len(claims)] if claims else [])
                return await resolve_many(claims, resolution, reason)

            monkeypatch.setattr(hop, "resolve_many", counted)
        return hop

    monkeypatch.setattr(plane, "hop", watched)
    async with running(evaluator.run()):
        rollout, reward = original(HopName.TASKS, "r"), original(HopName.GENERATED, "w")
        claims = await rollout.claim(9, wait_seconds=30)
        for claim in claims:
            await rollout.forward(claim, a_group(claim.task()))
            [made] = await reward.claim(1, wait_seconds=30)
            await reward.forward(made, a_group(claim.task(), rewards=[1.0]))
            await turns()
        have_come.set()
        await until(lambda: experiment.record.evaluated_version == 0)

    assert (len(claims), sum(collected)) == (3, 3)
    assert len(collected) <= 2, "the first wakes the evaluator, the others gather meanwhile"


async def test_what_is_due_follows_a_change_of_the_period_at_once() -> None:
    gateway, experiment, evaluator = await an_evaluator(every_versions=5)
    await gateway.repository.update(experiment, state="running", policy_version=2, evaluated_version=0)
    assert evaluator.due() is None

    await gateway.commands.change(experiment.id, '{"evaluation": {"every_versions": 2}}')

    assert evaluator.due() == 2
