"""What the scheduler does about a placement: notices, releases, patience, and what it shows."""

import asyncio
import itertools
import time

import pytest

from flotilla.services.gateway import signals
from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.runtime.reconciler import REST_SHARE
from flotilla.services.gateway.scheduler.demands import Demands
from flotilla.services.gateway.scheduler.quota import Candidates
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import ActionNotAllowed, InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import Capabilities, EngineOffer, ObservedState, ServiceKind, WorkState
from tests.unit.gateway.builders import a_gateway, a_record, a_spec, add_experiment, add_service, say, stop

ROLLOUT = ServiceKind.ROLLOUT
EVERY_KIND = (ServiceKind.TRAINER, ServiceKind.REWARD, ROLLOUT)


async def add(
    gateway: GatewayState, experiment_id: str, state: ExperimentState, started_at: float = 1.0, **resources: object
) -> Experiment:
    spec = a_spec(resources=resources).model_dump(mode="json")
    epoch = 0 if state is ExperimentState.STARTING else 1
    return await add_experiment(
        gateway, experiment_id, state=state, spec=spec, started_at=started_at, trainer_epoch=epoch
    )


async def run_alone(gateway: GatewayState, num_rollouts: int, **resources: object) -> tuple[Experiment, list[str]]:
    experiment = await add(gateway, "first", ExperimentState.RUNNING, **resources)
    for kind in (ServiceKind.TRAINER, ServiceKind.REWARD):
        await add_service(gateway, kind, f"first {kind}", experiment.id)
    return experiment, [await add_service(gateway, ROLLOUT, f"r{n}", experiment.id) for n in range(num_rollouts)]


async def add_spares(gateway: GatewayState) -> None:
    for kind in (ServiceKind.TRAINER, ServiceKind.REWARD):
        await add_service(gateway, kind, f"spare {kind}")


def of(gateway: GatewayState, experiment_id: str) -> list[str]:
    return [service.id for service in gateway.registry.of(experiment_id, ROLLOUT)]


async def test_an_experiment_that_needs_a_rollout_gets_one_after_its_holder_has_finished() -> None:
    gateway = a_gateway()
    first, rollouts = await run_alone(gateway, 2)
    await add_spares(gateway)
    second = await add(gateway, "second", ExperimentState.STARTING, 2.0)

    await gateway.reconciler.reconcile()

    # Told to leave, and working still: nobody has got anything yet, and the second says why.
    leaving = gateway.registry.get(rollouts[1])
    assert gateway.fleet.desired(leaving).state is WorkState.DRAINING
    assert gateway.fleet.desired(gateway.registry.get(rollouts[0])).state is WorkState.RUNNING
    assert gateway.registry.of(second.id) == []
    problem = gateway.commands.view(second).problem
    assert problem is not None
    assert (problem.component, problem.cause) == ("scheduler", "waiting for 1 rollout, which first gives back")
    view = gateway.registry.view(leaving)
    assert (view.experiment_id, view.leaving) == ("first", "another experiment needs it for its minimum")

    await say(gateway, leaving.id, ObservedState(experiment_id=first.id, state=WorkState.FINISHED))
    await gateway.reconciler.reconcile()
    assert leaving.experiment_id is None
    await say(gateway, leaving.id, ObservedState())
    await gateway.reconciler.reconcile()

    assert of(gateway, second.id) == [leaving.id]
    assert gateway.commands.view(second).problem is None
    assert {service.kind for service in gateway.registry.of(second.id)} == set(EVERY_KIND)
    assert of(gateway, first.id) == [rollouts[0]]
    kinds = [event.type for event in await gateway.store.events(first.id, after=0, limit=100)]
    assert kinds == ["service_asked_to_leave", "service_left"]
    await stop(gateway)


async def test_a_service_that_does_not_leave_in_time_is_released() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, notice_seconds=4.0)
    _, rollouts = await run_alone(gateway, 2)
    await add_spares(gateway)
    await add(gateway, "second", ExperimentState.STARTING, 2.0)

    await gateway.reconciler.reconcile()
    clock.advance(3.9)
    await gateway.reconciler.reconcile()
    assert gateway.registry.get(rollouts[1]).experiment_id == "first"

    clock.advance(0.2)
    await gateway.reconciler.reconcile()
    # Released, but not given away before it says that it is idle.
    assert gateway.registry.get(rollouts[1]).experiment_id is None
    await gateway.reconciler.reconcile()
    assert of(gateway, "second") == []
    await stop(gateway)


async def test_a_notice_is_taken_back_when_nobody_needs_the_service_any_more() -> None:
    gateway = a_gateway()
    _, rollouts = await run_alone(gateway, 2)
    await add_spares(gateway)
    second = await add(gateway, "second", ExperimentState.STARTING, 2.0)
    await gateway.reconciler.reconcile()

    await gateway.repository.update(second, state=ExperimentState.STOPPED)
    await gateway.reconciler.reconcile()

    service = gateway.registry.get(rollouts[1])
    assert service.leaving is None
    assert gateway.fleet.desired(service).state is WorkState.RUNNING
    await stop(gateway)


async def test_an_unfair_share_moves_services_only_when_it_lasts() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, unfair_seconds=5.0)
    await run_alone(gateway, 3)
    second = await add(gateway, "second", ExperimentState.RUNNING, 2.0)
    for kind in EVERY_KIND:
        await add_service(gateway, kind, f"second {kind}", second.id)

    await gateway.reconciler.reconcile()
    clock.advance(4.9)
    await gateway.reconciler.reconcile()
    assert [service.leaving for service in gateway.registry] == [None] * 8

    clock.advance(0.2)
    await gateway.reconciler.reconcile()
    asked = [service.id for service in gateway.registry if service.leaving is not None]
    assert len(asked) == 1 and asked[0] in of(gateway, "first")
    await stop(gateway)


async def test_a_drained_rollout_is_replaced_at_once() -> None:
    gateway = a_gateway()
    first, rollouts = await run_alone(gateway, 1)
    spare = await add_service(gateway, ROLLOUT, "spare")

    await gateway.fleet.drain(rollouts[0])
    await gateway.reconciler.reconcile()

    assert of(gateway, first.id) == [rollouts[0], spare]
    await stop(gateway)


async def test_an_experiment_is_told_who_holds_what_it_waits_for_while_that_one_ends() -> None:
    gateway = a_gateway()
    await add(gateway, "first", ExperimentState.STOPPING)
    for kind in EVERY_KIND:
        await add_service(gateway, kind, f"first {kind}", "first")
    second = await add(gateway, "second", ExperimentState.STARTING, 2.0)

    await gateway.reconciler.reconcile()

    problem = gateway.commands.view(second).problem
    assert problem is not None
    assert problem.cause == (
        "waiting for 1 trainer and 1 rollout and 1 reward to register or to fall free: "
        "first is ending and still has 1 trainer and 1 rollout and 1 reward"
    )


async def test_the_fleet_is_shown_with_shares_and_what_is_waited_for() -> None:
    gateway = a_gateway()
    first, rollouts = await run_alone(gateway, 2, rollouts={"min": 2, "max": 5}, weight=2.0, priority=3)
    await add(gateway, "second", ExperimentState.STARTING, 2.0)
    await add_service(gateway, ServiceKind.REWARD, "idle one")

    shown = gateway.scheduler.view()

    mine, other = shown.experiments
    assert (mine.experiment_id, mine.weight, mine.priority, mine.waiting) == (first.id, 2.0, 3, None)
    share = mine.kinds["rollout"]
    assert (share.min, share.max, share.share, share.services) == (2, 5, 2, tuple(rollouts))
    assert mine.kinds["reward"].share == 2
    assert other.kinds["rollout"].share == 0
    assert other.waiting == (
        "waiting for 1 trainer and 1 rollout to register or to fall free: first has 1 trainer; "
        "first has 2 rollouts and needs 2"
    )
    assert [len(shown.idle[kind]) for kind in ("trainer", "rollout", "reward", "sandbox")] == [0, 0, 1, 0]


async def test_a_change_of_quotas_takes_effect_and_no_service_notices() -> None:
    gateway = a_gateway()
    first, _ = await run_alone(gateway, 3)

    await gateway.commands.change(first.id, "{resources: {rollouts: {max: 1}, priority: 4}}")
    await gateway.reconciler.reconcile()

    assert (first.spec.resources.rollouts.max, first.spec.resources.priority) == (1, 4)
    assert first.record.spec["resources"]["rollouts"] == {"min": 1, "max": 1, "devices": "auto", "on_demand": 0}
    assert first.record.revision == 1
    assert sum(service.leaving is not None for service in gateway.registry.of(first.id)) == 2
    assert [record.action for record in await gateway.store.audit(f"experiments/{first.id}", limit=1)] == ["change"]
    await stop(gateway)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{optimisation: {steps: 9, epochs_per_step: 2}}", r"optimisation\.epochs_per_step: cannot change while"),
        ("{seed: 9}", "seed: cannot change while the experiment runs"),
        ("{optimisation: {steps: 1}}", "more than the 2 that there are"),
        ("{resources: {rollouts: {min: 3, max: 2}}}", "max 2 is below min 3"),
        ("{resources: {rolouts: {max: 2}}}", "did you mean resources.rollouts"),
        ("{resources: 3}", "resources"),
        ("{}", "what can be changed is resources"),
    ],
)
async def test_a_change_that_is_not_possible_says_what_is(body: str, words: str) -> None:
    gateway = a_gateway()
    first = await add(gateway, "first", ExperimentState.RUNNING)

    with pytest.raises(InvalidSpec, match=words):
        await gateway.commands.change(first.id, body)

    assert first.spec == a_spec()


async def test_an_experiment_that_has_ended_is_not_changed() -> None:
    gateway = a_gateway()
    await gateway.repository.add(a_record("over", state=ExperimentState.COMPLETED), a_spec())

    with pytest.raises(ActionNotAllowed, match="completed"):
        await gateway.commands.change("over", "{resources: {priority: 1}}")
    await asyncio.sleep(0)


async def test_who_started_first_comes_first_although_the_clock_was_set_back_since() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    for name in ("first", "second"):
        await add_experiment(gateway, name, state=ExperimentState.DRAFT, started_at=None)
        async with gateway.store.transaction() as change:
            gateway.commands._stage_action(change, gateway.repository.get(name), Action.START)
        clock.advance(-3600.0)

    assert [share.experiment_id for share in gateway.scheduler.view().experiments] == ["first", "second"]


async def test_a_thousand_wake_ups_do_not_make_a_thousand_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    passes = 0

    async def costly_pass() -> None:
        nonlocal passes
        passes += 1
        clock.advance(0.01)

    monkeypatch.setattr(gateway.reconciler, "reconcile", costly_pass)
    service_id = await add_service(gateway, ROLLOUT, "r")
    running = asyncio.create_task(gateway.reconciler.run())
    began = time.monotonic()
    for number in range(1000):
        await say(gateway, service_id, ObservedState(state=(WorkState.IDLE, WorkState.DRAINING)[number % 2]))
        await asyncio.sleep(0)
    seconds = time.monotonic() - began
    await signals.end(running)

    assert 1 <= passes <= 2 + seconds / (REST_SHARE * 0.01)
    await stop(gateway)


async def test_a_candidate_is_kept_until_something_of_its_service_changes() -> None:
    gateway = a_gateway()
    first, rollouts = await run_alone(gateway, 2)
    known, (moved, other) = Candidates(), (gateway.registry.get(each) for each in rollouts)
    seen = [known.of(gateway.registry)]

    async def look() -> None:
        seen.append(known.of(gateway.registry))
        assert seen[-1] == Candidates().of(gateway.registry)

    await look()
    assert all(one is two for one, two in zip(*seen, strict=True))
    await gateway.fleet.ask_to_leave(moved, "why", 5.0)
    await look()
    gateway.fleet.cancel_notice(moved)
    await look()
    await say(gateway, moved.id, ObservedState(experiment_id=first.id, state=WorkState.RUNNING, policy_version=0))
    await gateway.fleet.release(moved, "why")
    await look()
    await say(gateway, moved.id, ObservedState(state=WorkState.IDLE))
    await look()
    moved.can_do(Capabilities(engines=(EngineOffer(kind="sglang", can_start=True),)))
    await look()
    await gateway.fleet.drain(moved.id)
    await look()
    await gateway.fleet.leave(other.id, reason="why")
    await look()

    moves = [each != before for before, each in itertools.pairwise(seen)]
    assert moves == [False, True, True, True, True, True, True, True]


async def test_a_demand_is_kept_until_something_of_its_experiment_changes() -> None:
    gateway = a_gateway()
    experiment, _ = await run_alone(gateway, 1)
    known, nobody = Demands(), frozenset[ServiceKind]()
    seen = [known.of(gateway.repository, nobody)]

    def look(mixed: frozenset[ServiceKind] = nobody) -> None:
        seen.append(known.of(gateway.repository, mixed))
        assert seen[-1] == Demands().of(gateway.repository, mixed)

    await gateway.repository.update(experiment, step=1, policy_version=1)
    look()
    assert seen[0][0] is seen[1][0]
    await gateway.repository.update(experiment, state=ExperimentState.PAUSED)
    look()
    await gateway.repository.update(experiment, trainer_epoch=0)
    look()
    async with gateway.repository.transaction() as change:
        gateway.repository.stage_spec(change, experiment, a_spec(resources={"weight": 3.0}))
    look()
    look(frozenset(ServiceKind))

    assert seen[2][0].is_paused
    assert not seen[3][0].is_placed
    assert seen[4][0].weight == 3.0
    assert seen[5][0].hearers == experiment.steering.hearers
