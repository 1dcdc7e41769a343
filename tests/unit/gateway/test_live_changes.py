"""Live changes in the gateway: recorded first, held from a version, carried by groups, given to forks and trainers."""

import threading
from dataclasses import replace
from typing import Any

import pytest

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import RowOrder
from flotilla.services.gateway.lifecycle import live_changes
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.records.steering import Steering
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import ActionNotAllowed, InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.live_changes import ChangedKey, Effect, LiveChange
from flotilla.shared.schemas.service import Capabilities, ServiceKind
from flotilla.shared.schemas.task import Task
from flotilla.shared.streams.hop import HopName, Resolution
from tests.unit.gateway.builders import (
    MemoryPlanes,
    a_gateway,
    a_registration,
    a_spec,
    add_experiment,
    add_service,
    stop,
)

RATE, TEMPERATURE = "optimisation.learning_rate", "rollout.sampling.temperature"
BOTH = '{"optimisation": {"learning_rate": 0.5}, "rollout": {"sampling": {"temperature": 0.7}, "group_size": 3}}'


async def add_running(gateway: GatewayState, **facts: Any) -> Experiment:
    known: dict[str, Any] = {"state": ExperimentState.RUNNING, "policy_version": 4, "published_step": 4, "step": 4}
    document = a_spec(optimisation={"steps": 40, "groups_per_mini_batch": 2}).model_dump(mode="json")
    return await add_experiment(gateway, spec=document, **(known | facts))


async def issued(gateway: GatewayState, experiment: Experiment, count: int) -> list[Task]:
    rows = [{"prompt": f"p{n}", "label": str(n)} for n in range(8)]
    dataset = Dataset(rows, experiment.spec.data, 0)
    feeder = Feeder(
        experiment, RowOrder(experiment, dataset), gateway.store, gateway.clock, gateway.feeder_status.of(experiment)
    )
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
    newest = experiment.steering.changes[-1].id
    assert after[0].assignment is not None and before[0].assignment is not None
    assert (after[0].assignment.last_change, after[0].assignment.spec) == (newest, before[0].assignment.spec)


async def test_a_change_that_a_trainer_of_an_earlier_release_would_not_hear_of_is_refused_and_names_it() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, trainer_epoch=1)
    offered = Capabilities.model_validate({"transports": ("gloo",)})  # as its registration has it
    trainer = await add_service(gateway, ServiceKind.TRAINER, "old", experiment.id, capabilities=offered)

    with pytest.raises(InvalidSpec, match=f"{RATE}: trainer {trainer} is of a release that takes no changes"):
        await gateway.commands.change(experiment.id, BOTH)
    assert experiment.spec.optimisation.learning_rate == 1e-6 and not gateway.commands.view(experiment).changes

    with pytest.raises(InvalidSpec, match=f"{TEMPERATURE}: trainer {trainer} is of a release that takes no changes"):
        await gateway.commands.change(experiment.id, '{"rollout": {"sampling": {"temperature": 0.7}}}')
    await gateway.commands.change(experiment.id, '{"rollout": {"sampling": {"max_new_tokens": 4}}}')
    assert [change.effect for change in gateway.commands.view(experiment).changes] == [Effect.GROUP]


EARLIER = Capabilities.model_validate({"transports": ("gloo",)})
"""Of a service of an earlier release, as its registration has them."""
COMPONENTS = [{"kind": "exact", "weight": 1.0}, {"kind": "numeric", "weight": 0.5}]


async def test_a_trainer_of_an_earlier_release_is_not_appointed_after_a_change_that_it_would_not_hear_of() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway, trainer_epoch=1)
    await add_service(gateway, ServiceKind.ROLLOUT, "rollout", experiment.id)
    await add_service(gateway, ServiceKind.REWARD, "reward", experiment.id)
    trainer = await add_service(gateway, ServiceKind.TRAINER, "new", experiment.id)
    await gateway.commands.change(experiment.id, BOTH)
    await gateway.fleet.leave(trainer, reason="it died")

    old = await add_service(gateway, ServiceKind.TRAINER, "old", capabilities=EARLIER)
    await gateway.reconciler.reconcile()

    assert gateway.registry.get(old).experiment_id is None
    assert experiment.record.problem is not None
    assert experiment.record.problem["cause"] == (
        f"waiting for 1 trainer with live changes to register; {old} is of a release that takes no changes while it "
        "works: start it again with this one"
    )

    newer = await add_service(gateway, ServiceKind.TRAINER, "newer")
    await gateway.reconciler.reconcile()
    assert [each.id for each in gateway.registry.trainers_of(experiment.id)] == [newer]
    await stop(gateway)


async def test_a_trainer_of_an_earlier_release_that_was_out_of_reach_meanwhile_does_not_get_its_work_back() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_running(gateway, trainer_epoch=1)
    old = await add_service(gateway, ServiceKind.TRAINER, "old", experiment.id, capabilities=EARLIER)
    clock.advance(20.0)
    await gateway.reconciler.reconcile()
    await gateway.commands.change(experiment.id, BOTH)

    registration = a_registration(ServiceKind.TRAINER, "old", capabilities=EARLIER)
    assert (await gateway.fleet.register(registration)).service_id == old
    assert gateway.registry.get(old).experiment_id is None
    await stop(gateway)


async def test_weights_of_rewards_ask_for_reward_services_that_hear_of_them() -> None:
    gateway = a_gateway()
    document = a_spec(reward={"components": COMPONENTS}).model_dump(mode="json")
    experiment = await add_experiment(gateway, spec=document, trainer_epoch=1)
    for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT):
        await add_service(gateway, kind, kind.value, experiment.id)
    old = await add_service(gateway, ServiceKind.REWARD, "old", experiment.id, capabilities=EARLIER)
    weights = '{"reward": {"components": {"1": {"weight": 0.25}}}}'

    with pytest.raises(InvalidSpec, match=f"reward.components.1.weight: reward {old} is of a release that takes no"):
        await gateway.commands.change(experiment.id, weights)
    await gateway.fleet.leave(old, reason="it is started again")
    await gateway.commands.change(experiment.id, weights)
    older = await add_service(gateway, ServiceKind.REWARD, "older", capabilities=EARLIER)
    await gateway.reconciler.reconcile()
    waits = experiment.record.problem
    newer = await add_service(gateway, ServiceKind.REWARD, "newer")
    await gateway.reconciler.reconcile()

    assert waits is not None and waits["cause"].startswith("waiting for 1 reward with live changes to register; ")
    assert gateway.registry.get(older).experiment_id is None
    assert [each.id for each in gateway.registry.of(experiment.id, ServiceKind.REWARD)] == [newer]
    await stop(gateway)


async def test_changed_sampling_asks_for_rollouts_that_hear_of_it_and_start_the_engine() -> None:
    gateway = a_gateway()
    engine = {"kind": "vllm"}
    document = a_spec(rollout={"engine": engine, "sampling": {"max_new_tokens": 8}}).model_dump(mode="json")
    experiment = await add_experiment(gateway, spec=document, trainer_epoch=1)
    for kind in (ServiceKind.TRAINER, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value, experiment.id)
    earlier, present = (
        Capabilities.model_validate({"transports": ("gloo",), "engines": ({"kind": "vllm"},), "live_changes": hears})
        for hears in (False, True)
    )
    old = await add_service(gateway, ServiceKind.ROLLOUT, "old", experiment.id, capabilities=earlier)
    shorter = '{"rollout": {"sampling": {"max_new_tokens": 4}}}'

    with pytest.raises(InvalidSpec, match=f"max_new_tokens: rollout {old} is of a release that takes no changes"):
        await gateway.commands.change(experiment.id, shorter)
    await gateway.fleet.leave(old, reason="it is started again")
    await gateway.commands.change(experiment.id, shorter)
    older = await add_service(gateway, ServiceKind.ROLLOUT, "older", capabilities=earlier)
    without = await add_service(gateway, ServiceKind.ROLLOUT, "without")
    await gateway.reconciler.reconcile()
    waits = experiment.record.problem
    newer = await add_service(gateway, ServiceKind.ROLLOUT, "newer", capabilities=present)
    await gateway.reconciler.reconcile()

    assert waits is not None and "1 rollout with live changes and an interpreter for vllm" in waits["cause"]
    assert [gateway.registry.get(each).experiment_id for each in (older, without)] == [None, None]
    assert [each.id for each in gateway.registry.of(experiment.id, ServiceKind.ROLLOUT)] == [newer]
    await stop(gateway)


async def test_where_all_services_hear_of_changes_an_experiment_that_was_changed_keeps_none_from_others() -> None:
    gateway = a_gateway()
    document = a_spec(reward={"components": COMPONENTS}).model_dump(mode="json")
    changed = await add_experiment(gateway, spec=document, start_number=1)
    await gateway.commands.change(changed.id, '{"reward": {"components": {"1": {"weight": 0.25}}}}')
    other = await add_experiment(gateway, "other", spec=document, start_number=2)
    for kind in (ServiceKind.TRAINER, ServiceKind.ROLLOUT, ServiceKind.REWARD):
        for number in range(2):
            await add_service(gateway, kind, f"{kind} {number}")
    await gateway.reconciler.reconcile()

    assert [len(gateway.registry.of(each.id, ServiceKind.REWARD)) for each in (changed, other)] == [1, 1]
    await stop(gateway)


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


def told(path: str, before: Any, after: Any, effect: Effect = Effect.TRAINER, **facts: Any) -> LiveChange:
    key = ChangedKey(path=path, before=before, after=after)
    known = {"id": "5eed5eed5eed", "at": "2026-01-01T00:00:00.000Z", "actor": "operator x", "version": 3, "step": 3}
    return LiveChange(effect=effect, keys=(key,), **(known | facts))


GRADER = [{"kind": "http", "url": "http://elsewhere:80/"}]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (told("reward.components", GRADER, GRADER), "reward.components: cannot change"),
        (told("asynchrony", None, {}), "asynchrony: cannot change"),
        (told("resources.stream_bytes", 1, 1 << 60), "resources.stream_bytes: cannot change"),
        (told(RATE, 1e-6, 0.5, Effect.GROUP), f"{RATE}: cannot change with effect group"),
        (told(RATE, 0.25, 0.5), f"{RATE}: the change begins with another value"),
        (told(RATE, 1e-6, -1), "greater than 0"),
        (told(RATE, 1e-6, 0.5, version=None), "does not hold yet"),
        (told(RATE, 1e-6, 0.5, actor="x" * 1000), "letters"),
        (told("algorithm.kl.coefficient", None, 0.1), "the spec does not have this key"),
        (told("rollout.sampling.max_new_tokens", 16, 9999, Effect.GROUP), "rollout.sampling.max_new_tokens"),
    ],
)
async def test_a_trainer_changes_no_more_by_its_checkpoint_than_a_person_may(change: LiveChange, cause: str) -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    before = experiment.record

    async with gateway.repository.transaction() as transaction:
        gateway.commands.live.stage_restored(transaction, experiment, [change])

    assert (experiment.record.spec, experiment.record.changes) == (before.spec, before.changes)
    assert experiment.steering.base == before.spec
    [event] = await gateway.store.events(experiment.id, after=0, limit=10)
    assert event.type == live_changes.REFUSED and cause in event.data["cause"]


async def test_a_checkpoints_word_on_a_change_that_is_known_is_its_version_alone() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    await gateway.commands.change(experiment.id, '{"optimisation": {"learning_rate": 0.5}}')
    [known] = experiment.steering.changes

    async with gateway.repository.transaction() as transaction:
        gateway.commands.live.stage_restored(transaction, experiment, [told("asynchrony", 1, 2, id=known.id)])

    assert experiment.steering.changes == (known.model_copy(update={"version": 3, "step": 3}),)
    assert experiment.spec.optimisation.learning_rate == 0.5


async def test_a_checkpoint_brings_no_more_changes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_changes, "MOST_CHANGES", 1)
    gateway = a_gateway()
    experiment = await add_running(gateway)
    changes = [told(RATE, 1e-6, 0.5, id="a"), told(RATE, 0.5, 0.25, id="b")]

    async with gateway.repository.transaction() as transaction:
        gateway.commands.live.stage_restored(transaction, experiment, changes)

    assert experiment.steering.changes == ()


async def test_what_restored_changes_is_in_the_audit_with_the_service_that_told_it() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)

    async with gateway.repository.transaction() as transaction:
        gateway.commands.live.stage_restored(transaction, experiment, [told(RATE, 1e-6, 0.5)])

    assert experiment.spec.optimisation.learning_rate == 0.5
    assert experiment.steering.base["optimisation"]["learning_rate"] == 1e-6
    [record] = await gateway.store.audit(f"experiments/{experiment.id}", limit=1)
    assert (record.action, record.detail) == ("restore", {"changes": ["5eed5eed5eed"]})


async def test_steering_belongs_to_the_record_that_it_was_made_of_whoever_sets_another_meanwhile() -> None:
    gateway = a_gateway()
    experiment, other = await add_running(gateway), await add_running(gateway)
    await gateway.commands.change(other.id, BOTH)
    after = replace(experiment.record, spec=other.record.spec, changes=other.record.changes)
    make = experiment.steering_of

    def slow(record: ExperimentRecord) -> Steering:
        found = make(record)
        experiment.record = after
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "steering_of", slow)
        assert experiment.steering.changes == ()

    assert len(experiment.steering.changes) == 2


async def test_a_change_of_spec_and_record_shows_no_record_in_between() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    seen: list[tuple[float, int]] = []

    def look(_id: str) -> None:
        spec = experiment.record.spec
        seen.append((spec["optimisation"]["learning_rate"], len(experiment.record.changes or ())))

    gateway.repository._on_change = look
    await gateway.commands.change(experiment.id, BOTH)

    assert set(seen) == {(0.5, 2)}


async def test_tasks_are_made_in_a_thread_from_settings_that_were_read_before() -> None:
    gateway = a_gateway()
    experiment = await add_running(gateway)
    await gateway.commands.change(experiment.id, BOTH)
    threads: list[bool] = []
    of = Steering.of

    def noting(*arguments: Any) -> Steering:
        threads.append(threading.current_thread() is threading.main_thread())
        return of(*arguments)

    experiment._steering = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steering, "of", noting)
        patch.setattr(Experiment, "steering", property(lambda each: each.steering_of(each.record)))
        await issued(gateway, experiment, 1)

    assert threads and all(threads)
