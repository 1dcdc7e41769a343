"""Services that come back after they were given up: to their work where it is still theirs, never beside another."""

import asyncio
from collections.abc import Sequence

import pytest

from flotilla.services.gateway.lifecycle.states import Action
from flotilla.services.gateway.membership.joining import REMEMBERED_SECONDS
from flotilla.services.gateway.state import GatewayState
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import Write
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.experiment import Event, ExperimentState
from flotilla.shared.schemas.service import Capabilities, GpuDevice, ObservedState, ServiceKind, WorkState
from tests.unit.gateway.builders import a_gateway, a_registration, add_experiment, add_service, say, stop, turns


async def give_up(gateway: GatewayState, clock: ManualClock, seconds: float = 20.0) -> None:
    """Let all leases end."""
    clock.advance(seconds)
    await gateway.reconciler.reconcile()


async def test_a_trainer_that_returns_while_another_is_about_to_be_assigned_is_the_only_one() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, trainer_epoch=3)
    lost = await add_service(gateway, ServiceKind.TRAINER, "lost", experiment.id)
    await give_up(gateway, clock)
    spare = await add_service(gateway, ServiceKind.TRAINER, "spare")

    async with gateway.store.transaction():
        returning = asyncio.create_task(gateway.fleet.register(a_registration(ServiceKind.TRAINER, "lost")))
        await turns()
        reconciling = asyncio.create_task(gateway.reconciler.reconcile())
        await turns()
    await asyncio.gather(returning, reconciling)
    await gateway.reconciler.reconcile()

    assert [each.id for each in gateway.registry.trainers_of(experiment.id)] == [lost]
    assert (gateway.registry.get(spare).experiment_id, experiment.record.trainer_epoch) == (None, 3)
    await stop(gateway)


async def test_a_trainer_does_not_return_to_an_experiment_that_ended_and_starts_again() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, trainer_epoch=3)
    await add_service(gateway, ServiceKind.TRAINER, "lost", experiment.id)
    await give_up(gateway, clock)
    async with gateway.repository.transaction() as change:
        gateway.repository.stage(change, experiment, state=ExperimentState.STOPPED, final_ledger={})
    async with gateway.repository.transaction() as change:
        gateway.commands._stage_action(change, experiment, Action.RESUME)

    again = await gateway.fleet.register(a_registration(ServiceKind.TRAINER, "lost"))

    assert gateway.registry.get(again.service_id).experiment_id is None
    await stop(gateway)


@pytest.mark.parametrize("kind", [ServiceKind.ROLLOUT, ServiceKind.REWARD])
@pytest.mark.parametrize("is_let_go", [False, True])
async def test_a_rollout_does_not_return_to_a_device_that_another_still_computes_on(
    kind: ServiceKind, is_let_go: bool
) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    other = await add_experiment(gateway, "other-1")
    shared = Capabilities(devices=(GpuDevice(index=0, uuid="GPU-1"),))
    lost = (await gateway.fleet.register(a_registration(kind, "lost", capabilities=shared))).service_id
    await gateway.registry.assign(gateway.registry.get(lost), experiment.id)
    await give_up(gateway, clock)
    taker = a_registration(ServiceKind.ROLLOUT, "taker", capabilities=shared)
    taken = (await gateway.fleet.register(taker)).service_id
    observed = ObservedState() if is_let_go else ObservedState(experiment_id=other.id, state=WorkState.DRAINING)
    await say(gateway, taken, observed)

    await gateway.fleet.register(a_registration(kind, "lost", capabilities=shared))

    returns = is_let_go or kind is ServiceKind.REWARD
    assert gateway.registry.get(lost).experiment_id == (experiment.id if returns else None)
    await stop(gateway)


class Failing(MemoryStore):
    """Stores nothing while it is told to fail."""

    fails = False

    async def apply(self, writes: Sequence[Write]) -> list[Event]:
        if self.fails:
            raise Unavailable("no database")
        return await super().apply(writes)


async def test_one_that_could_not_be_given_up_is_not_taken_for_silent() -> None:
    clock, store = ManualClock(), Failing()
    gateway = a_gateway(store, clock)
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one", experiment.id)
    store.fails = True
    clock.advance(20.0)
    with pytest.raises(Unavailable):
        await gateway.fleet.give_up(gateway.registry.get(service_id))
    store.fails = False

    await say(gateway, service_id, ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING))

    assert gateway.fleet.returning.why_missing(experiment.id) is None


async def test_one_that_calls_before_it_is_given_up_stays() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, ServiceKind.REWARD, "one", experiment.id)
    clock.advance(20.0)
    async with gateway.store.transaction():
        giving_up = asyncio.create_task(gateway.fleet.give_up(gateway.registry.get(service_id)))
        await turns()
        await say(gateway, service_id, ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING))
    await giving_up

    assert gateway.registry.find(service_id) is not None


async def test_nodes_of_a_job_have_numbers_of_their_own_though_one_was_away() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    await add_service(gateway, ServiceKind.TRAINER, "first")
    lost = await add_service(gateway, ServiceKind.TRAINER, "lost")
    await give_up(gateway, clock)
    await add_service(gateway, ServiceKind.TRAINER, "second")
    await add_service(gateway, ServiceKind.TRAINER, "third")

    assert (await gateway.fleet.register(a_registration(ServiceKind.TRAINER, "lost"))).service_id == lost

    numbers = [each.record.number for each in gateway.registry]
    assert len(set(numbers)) == len(numbers)


async def test_the_silence_of_a_service_that_a_restarted_gateway_never_heard_is_counted_from_its_start() -> None:
    clock, store = ManualClock(), MemoryStore()
    before = a_gateway(store, clock)
    experiment = await add_experiment(before)
    service_id = await add_service(before, ServiceKind.ROLLOUT, "one", experiment.id)
    gateway = a_gateway(store, clock, grace_seconds=8.0)
    await gateway.repository.load()
    await gateway.registry.load()
    clock.advance(10.0)

    await gateway.fleet.give_up(gateway.registry.get(service_id))

    left = [each for each in await store.events(experiment.id, after=0, limit=100) if each.type == "service_left"]
    assert [each.data["reason"] for each in left] == [
        f"its lease ended: no contact with 127.0.0.1 ({service_id}) for 10 s"
    ]


async def restarted(store: MemoryStore, clock: ManualClock) -> GatewayState:
    """Start a gateway on what an earlier one stored."""
    gateway = a_gateway(store, clock)
    await gateway.load()
    return gateway


async def test_a_gateway_that_restarts_during_a_cut_remembers_who_was_cut_off() -> None:
    clock, store = ManualClock(), MemoryStore()
    before = a_gateway(store, clock)
    experiment = await add_experiment(before, trainer_epoch=3)
    lost = await add_service(before, ServiceKind.TRAINER, "lost", experiment.id)
    await give_up(before, clock)
    await stop(before)

    gateway = await restarted(store, clock)
    assert "no contact with" in str(gateway.fleet.returning.why_missing(experiment.id))
    assert gateway.registry.find(lost) is None
    again = await gateway.fleet.register(a_registration(ServiceKind.TRAINER, "lost"))

    assert (again.service_id, gateway.registry.get(lost).experiment_id) == (lost, experiment.id)
    assert gateway.fleet.returning.why_missing(experiment.id) is None
    await stop(gateway)
    assert (await restarted(store, clock)).registry.get(lost).experiment_id == experiment.id


async def test_who_is_away_for_too_long_is_stored_no_longer() -> None:
    clock, store = ManualClock(), MemoryStore()
    gateway = a_gateway(store, clock)
    experiment = await add_experiment(gateway)
    await add_service(gateway, ServiceKind.ROLLOUT, "old", experiment.id)
    await give_up(gateway, clock)
    clock.advance(REMEMBERED_SECONDS)
    later = await add_service(gateway, ServiceKind.ROLLOUT, "later", experiment.id)
    await give_up(gateway, clock)
    await stop(gateway)

    assert [each.id for each in await store.services()] == [later]


async def test_an_experiment_that_starts_again_is_returned_to_after_no_restart_of_the_gateway() -> None:
    clock, store = ManualClock(), MemoryStore()
    before = a_gateway(store, clock)
    experiment = await add_experiment(before)
    await add_service(before, ServiceKind.ROLLOUT, "lost", experiment.id)
    await give_up(before, clock)
    async with before.repository.transaction() as change:
        before.repository.stage(change, experiment, state=ExperimentState.STOPPED, final_ledger={})
    async with before.repository.transaction() as change:
        before.commands._stage_action(change, experiment, Action.RESUME)
    await stop(before)

    gateway = await restarted(store, clock)
    again = await gateway.fleet.register(a_registration(ServiceKind.ROLLOUT, "lost"))

    assert gateway.registry.get(again.service_id).experiment_id is None
    await stop(gateway)
