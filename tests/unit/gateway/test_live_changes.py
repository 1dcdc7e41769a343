"""Live changes in the gateway: recorded first, held from a version, carried by groups, given to forks and trainers."""

from typing import Any

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.lifecycle import live_changes
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.errors import ActionNotAllowed, InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.live_changes import Effect
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.schemas.task import Task
from flotilla.shared.streams.hop import HopName, Resolution
from tests.unit.gateway.builders import MemoryPlanes, a_gateway, a_spec, add_experiment, add_service

RATE, TEMPERATURE = "optimisation.learning_rate", "rollout.sampling.temperature"
BOTH = '{"optimisation": {"learning_rate": 0.5}, "rollout": {"sampling": {"temperature": 0.7}, "group_size": 3}}'


async def add_running(gateway: GatewayState, **facts: Any) -> Experiment:
    known: dict[str, Any] = {"state": ExperimentState.RUNNING, "policy_version": 4, "published_step": 4, "step": 4}
    document = a_spec(optimisation={"steps": 40, "groups_per_mini_batch": 2}).model_dump(mode="json")
    return await add_experiment(gateway, spec=document, **(known | facts))


async def issued(gateway: GatewayState, experiment: Experiment, count: int) -> list[Task]:
    rows = [{"prompt": f"p{n}", "label": str(n)} for n in range(8)]
    dataset = Dataset(rows, experiment.spec.data, 0)
    feeder = Feeder(experiment, dataset, gateway.store, gateway.clock, gateway.feeder_status.of(experiment))
    await feeder.feed()
    hop = experiment.train.hop(HopName.TASKS, "rollout")
    claims = await hop.claim(count, wait_seconds=0)
    await hop.resolve_many(claims, Resolution.FILTERED, "test")
    return [claim.task() for claim in claims]


async def test_each_change_is_recorded_with_who_when_old_new_and_the_version_from_which_it_holds() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)

    await gateway.commands.change(experiment.id, BOTH)

    sampling, rate = gateway.commands.view(experiment).changes
    assert [(key.path, key.before, key.after) for key in rate.keys] == [(RATE, 1e-6, 0.5)]
    assert {key.path for key in sampling.keys} == {TEMPERATURE, "rollout.group_size"}
    assert (rate.effect, rate.version) == (Effect.TRAINER, None), "the trainer has not begun a version since"
    assert (sampling.effect, sampling.version, sampling.step, sampling.actor) == (Effect.GROUP, 4, 4, "gateway")
    assert experiment.spec.optimisation.learning_rate == 0.5
    events = [event.type for event in await gateway.store.events(experiment.id, after=0, limit=10)]
    assert events == [live_changes.CHANGED, live_changes.CHANGED]


async def test_services_are_opened_with_the_spec_without_live_changes_and_the_trainer_is_told_of_them() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, trainer_epoch=1)
    ids = [
        await add_service(gateway, kind, kind.value, experiment.id)
        for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT)
    ]
    trainer, rollout = map(gateway.registry.get, ids)
    before = [gateway.fleet.desired(each) for each in (trainer, rollout)]

    await gateway.commands.change(experiment.id, BOTH)

    after = [gateway.fleet.desired(each) for each in (trainer, rollout)]
    assert before[1] == after[1], "a rollout does not notice"
    assert before[0].tag != after[0].tag
    assert after[0].assignment is not None and before[0].assignment is not None
    assert (after[0].assignment.changes, after[0].assignment.spec) == (2, before[0].assignment.spec)


async def test_groups_carry_what_they_are_sampled_with_from_the_next_one_issued_on() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    [before, *_] = await issued(gateway, experiment, 3)
    await gateway.commands.change(experiment.id, BOTH)
    found = [Task.from_wire(task.to_wire()) for task in await issued(gateway, experiment, 9)]

    assert (before.settings, before.group_size) == ({}, 2)
    assert found, "the budget has room again"
    assert {tuple(sorted(task.settings.items())) for task in found} == {(("rollout.group_size", 3), (TEMPERATURE, 0.7))}
    assert {task.group_size for task in found} == {3}


async def test_a_gateway_that_is_killed_between_record_and_effect_comes_back_with_both() -> None:
    store, planes = MemoryStore(), MemoryPlanes()
    killed = a_gateway(store, planes=planes)
    experiment = await add_running(killed)
    await killed.commands.change(experiment.id, BOTH)

    gateway = a_gateway(store, planes=planes)
    await gateway.load()

    again = gateway.repository.get(experiment.id)
    assert again.steering.settings[TEMPERATURE] == 0.7
    assert [task.settings[TEMPERATURE] for task in await issued(gateway, again, 1)] == [0.7]
    [_, rate] = await gateway.commands.live.adopt(again.id, 6, 7)
    assert (rate.version, rate.step) == (6, 7)


async def test_what_the_trainer_adopted_holds_from_its_first_word_on() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    await gateway.commands.change(experiment.id, BOTH)

    first = await gateway.commands.live.adopt(experiment.id, 5, 5)
    again = await gateway.commands.live.adopt(experiment.id, 9, 9)

    assert first == again == experiment.steering.changes
    assert [each.version for each in first] == [4, 5]
    held = [e for e in await gateway.store.events(experiment.id, after=0, limit=10) if e.type == live_changes.HELD]
    assert [(event.data["version"], event.data["step"]) for event in held] == [(5, 5)]


async def test_the_feeder_follows_a_threshold_when_the_trainer_does() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)

    await gateway.commands.change(experiment.id, '{"asynchrony": {"staleness_threshold": 1.0}}')

    assert experiment.spec.admission_budget == 4
    assert experiment.steering.in_force.admission_budget == 3
    await gateway.commands.live.adopt(experiment.id, 5, 5)
    assert experiment.steering.in_force.admission_budget == 4


async def test_a_database_that_came_back_older_learns_from_the_checkpoint_what_it_was_trained_with() -> None:
    gateway, restored = a_gateway(), a_gateway()
    experiment, older = [await add_running(each) for each in (gateway, restored)]
    await gateway.commands.change(experiment.id, BOTH)
    trained = await gateway.commands.live.adopt(experiment.id, 5, 5)
    await restored.commands.change(older.id, '{"algorithm": {"entropy_coefficient": 0.25}}')

    for _ in range(2):
        async with restored.repository.transaction() as change:
            restored.commands.live.stage_restored(change, older, trained)

    assert {each.id for each in older.steering.changes} > {each.id for each in trained}
    assert older.spec.optimisation.learning_rate == 0.5
    assert older.spec.algorithm.entropy_coefficient == 0.25
    events = [event.type for event in await restored.store.events(older.id, after=0, limit=10)]
    assert events.count(live_changes.RESTORED) == 1, "what is known already is not restored again"


async def test_a_change_of_nothing_is_none_and_an_ended_experiment_has_none() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)

    await gateway.commands.change(experiment.id, '{"rollout": {"group_size": 2}}')

    assert experiment.steering.changes == ()
    await gateway.repository.update(experiment, state=ExperimentState.STOPPED)
    with pytest.raises(ActionNotAllowed):
        await gateway.commands.change(experiment.id, BOTH)


async def test_a_draft_begins_with_what_was_changed() -> None:
    gateway = a_gateway()
    draft = await add_experiment(gateway, state=ExperimentState.DRAFT)

    await gateway.commands.change(draft.id, BOTH)

    assert [each.version for each in draft.steering.changes] == [0, 0]


async def test_there_is_a_bound_on_how_often_an_experiment_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_changes, "MOST_CHANGES", 1)
    gateway = a_gateway()
    experiment = await add_running(gateway)
    await gateway.commands.change(experiment.id, '{"rollout": {"group_size": 3}}')

    with pytest.raises(InvalidSpec, match="was changed 1 times, at most 1 are kept"):
        await gateway.commands.change(experiment.id, '{"rollout": {"group_size": 4}}')

    assert experiment.spec.rollout.group_size == 3
