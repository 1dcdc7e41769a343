"""An evaluation while the data plane comes back at an earlier state: exact results, no spinning, nothing left."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from flotilla.services.gateway.evaluation import evaluator as module
from flotilla.services.gateway.lifecycle import drain_outstanding
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.schemas.task import Task
from flotilla.shared.streams.hop import Claim, Hop, HopName
from flotilla.shared.streams.memory.streams import MemoryStore
from flotilla.shared.testing.builders import a_group
from tests.unit.gateway.builders import running, until
from tests.unit.gateway.test_evaluator import ROWS, an_evaluator, answer, series

NUM_ROWS = len(ROWS)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COLLECT_SECONDS", 0.002)
    monkeypatch.setattr(module, "LEFTOVERS_SECONDS", 0.002)
    monkeypatch.setattr(drain_outstanding, "IDLE_SECONDS", 0.002)


def log_of(experiment: Experiment) -> Callable[[], None]:
    """Remember the evaluation lane as it is; the result brings it back to that, as a lost tail of the log does."""
    store: MemoryStore = experiment.evaluation._store  # type: ignore[attr-defined]
    kept = ["counters", "outstanding", "consumed", "next_group_id"]
    contents = ["entries", "undelivered", "pending", "_next_number"]
    fields = copy.deepcopy({name: getattr(store, name) for name in kept})
    streams = {hop: copy.deepcopy({n: vars(stream)[n] for n in contents}) for hop, stream in store.streams.items()}

    def come_back() -> None:
        for name, value in copy.deepcopy(fields).items():
            setattr(store, name, value)
        for hop, content in copy.deepcopy(streams).items():
            vars(store.streams[hop]).update(content)
        store.wake()

    return come_back


def rollout_of(experiment: Experiment) -> Hop:
    """Open the tasks' hop under the same name each time."""
    hop = experiment.evaluation.hop(HopName.TASKS, "r")
    hop.consumer = "the rollout"
    return hop


async def claims_of(experiment: Experiment, num: int) -> list[Claim]:
    rollout = rollout_of(experiment)
    claims: list[Claim] = []
    while len(claims) < num:
        claims += await rollout.claim(num - len(claims), wait_seconds=0.05)
    return claims


async def grade(experiment: Experiment, claims: list[Claim], reward: float) -> None:
    """Answer tasks and grade the answers."""
    rollout, grader = rollout_of(experiment), experiment.evaluation.hop(HopName.GENERATED, "w")
    for claim in claims:
        assert await rollout.forward(claim, a_group(claim.task()))
    for claim in await grader.claim(len(claims), wait_seconds=0.05):
        await grader.forward(claim, a_group(claim.task(), rewards=[reward]))


async def settled(gateway: GatewayState, experiment: Experiment, version: int) -> dict[str, float]:
    """Wait until a version is evaluated and its lane at rest; give what was found."""
    await until(lambda: experiment.record.evaluated_version == version)
    async with asyncio.timeout(60):
        while (await experiment.evaluation.ledger()).outstanding:
            await asyncio.sleep(0.001)
    assert (await experiment.evaluation.ledger()).balanced
    return {name: value for (name, v), value in (await series(gateway, experiment)).items() if v == version}


def exact(found: dict[str, float], accuracy: float) -> None:
    assert found["evaluation/accuracy"] == accuracy
    assert (found["evaluation/num_scored"], found["evaluation/num_errors"]) == (NUM_ROWS, 0)


async def test_a_group_that_returns_after_it_was_counted_counts_once() -> None:
    gateway, experiment, evaluator = await an_evaluator()
    async with running(evaluator.run()):
        claims = await claims_of(experiment, 1)
        come_back = log_of(experiment)
        await grade(experiment, claims, 1.0)
        while (await experiment.evaluation.ledger()).trained == 0:
            await asyncio.sleep(0)

        come_back()
        await grade(experiment, claims, 1.0)
        await grade(experiment, await claims_of(experiment, NUM_ROWS - 1), 0.0)
        found = await settled(gateway, experiment, 0)

    exact(found, 1 / NUM_ROWS)
    assert (await experiment.evaluation.ledger()).trained == NUM_ROWS


async def test_tasks_whose_issue_was_lost_are_issued_again() -> None:
    gateway, experiment, evaluator = await an_evaluator()
    before = log_of(experiment)
    async with running(evaluator.run()):
        await grade(experiment, await claims_of(experiment, 1), 0.0)
        while (await experiment.evaluation.ledger()).trained == 0:
            await asyncio.sleep(0)

        before()
        await answer(experiment, [1.0])
        found = await settled(gateway, experiment, 0)

    exact(found, 1.0)


async def test_what_returns_of_an_earlier_evaluation_neither_counts_nor_blocks_the_next() -> None:
    gateway, experiment, evaluator = await an_evaluator(every_versions=5)
    async with running(evaluator.run()):
        claims = await claims_of(experiment, NUM_ROWS)
        await grade(experiment, claims[1:], 0.0)
        while (await experiment.evaluation.ledger()).trained < NUM_ROWS - 1:
            await asyncio.sleep(0)
        come_back = log_of(experiment)
        await grade(experiment, claims[:1], 0.0)
        await settled(gateway, experiment, 0)

    come_back()
    await gateway.repository.update(experiment, policy_version=5, published_step=5)
    async with running(evaluator.run()):
        tasks = await answer(experiment, [1.0])
        found = await settled(gateway, experiment, 5)

    assert {task.pinned_version for task in tasks} == {5}
    exact(found, 1.0)
    assert (await experiment.evaluation.ledger()).dropped == {"evaluation_over": 1}


async def test_one_that_returns_between_evaluations_is_dropped() -> None:
    gateway, experiment, evaluator = await an_evaluator()
    async with running(evaluator.run()):
        claims = await claims_of(experiment, NUM_ROWS)
        come_back = log_of(experiment)
        await grade(experiment, claims, 1.0)
        await settled(gateway, experiment, 0)

        come_back()
        assert (await experiment.evaluation.ledger()).outstanding == NUM_ROWS
        await settled(gateway, experiment, 0)

    assert (await experiment.evaluation.ledger()).dropped == {"evaluation_over": NUM_ROWS}


async def test_one_of_an_earlier_evaluation_that_returns_meanwhile_does_not_count() -> None:
    gateway, experiment, evaluator = await an_evaluator(every_versions=5)
    async with running(evaluator.run()):
        claims = await claims_of(experiment, NUM_ROWS)
        come_back = log_of(experiment)
        await grade(experiment, claims, 0.0)
        await settled(gateway, experiment, 0)
        await gateway.repository.update(experiment, policy_version=5, published_step=5)
        later = await claims_of(experiment, NUM_ROWS)
        assert {claim.task().pinned_version for claim in later} == {5}

        come_back()
        await grade(experiment, claims, 0.0)
        again: list[Task] = await answer(experiment, [1.0])
        found = await settled(gateway, experiment, 5)

    assert {task.pinned_version for task in again} == {5}
    exact(found, 1.0)


async def test_a_lane_that_takes_nothing_is_asked_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups return just after the lane was found empty, again and again."""
    gateway, experiment, evaluator = await an_evaluator()
    plane: Any = experiment.evaluation
    issues, pauses = 0, list[float]()
    issue_many = plane.admission.issue_many

    class Noted(module.Backoff):
        def after(self, error: Exception) -> float:
            pauses.append(super().after(error))
            return pauses[-1]

    async def counted(tasks: list[Task], *, limit: int) -> Any:
        nonlocal issues
        issues += 1
        return await issue_many(tasks, limit=0)

    monkeypatch.setattr(module, "Backoff", Noted)
    monkeypatch.setattr(plane.admission, "issue_many", counted)
    async with running(evaluator.run()):
        await until(lambda: issues >= 2)
        # However long this machine takes: one pause before each but the first.
        assert issues <= len(pauses) + 1 and min(pauses) > 0.01
        monkeypatch.setattr(plane.admission, "issue_many", issue_many)
        await answer(experiment, [1.0])
        exact(await settled(gateway, experiment, 0), 1.0)
