"""A lent rollout goes where its host's trainer goes, counts for no quota, and has the devices while they are lent."""

from typing import Any

import pytest

from flotilla.services.gateway.monitoring.lending import Verdict
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.runtime.shifts import Shifts
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import (
    Capabilities,
    DeviceOrder,
    DeviceReport,
    ObservedState,
    ServiceKind,
    WorkState,
)
from flotilla.shared.streams.ledger import HopCounts, Ledger
from tests.unit.gateway.builders import a_gateway, a_registration, add_experiment, add_service, say, spec_document

LENDING = {"resources": {"lending": {}}, "rollout": {"group_size": 2, "engine": {"threads": 1}}}
LENT = Capabilities(transports=("gloo",), live_changes=True, pool="lent")
PAYS = Verdict(lends=True, reason="it pays")
WAITING = Ledger(waiting=HopCounts(tasks=3))


async def a_lending_fleet(**experiment: Any) -> tuple[GatewayState, Experiment, dict[str, str]]:
    gateway = a_gateway(clock=ManualClock())
    made = await add_experiment(gateway, spec=spec_document(**LENDING), trainer_epoch=1, **experiment)
    services = {
        name: await add_service(gateway, kind, name, made.id)
        for name, kind in (
            ("trainer", ServiceKind.TRAINER),
            ("rollout", ServiceKind.ROLLOUT),
            ("reward", ServiceKind.REWARD),
        )
    }
    return gateway, made, services


async def join(gateway: GatewayState, incarnation: str = "lent", **registration: Any) -> str:
    made = a_registration(ServiceKind.ROLLOUT, incarnation, **({"capabilities": LENT} | registration))
    return (await gateway.fleet.register(made)).service_id


def shifts_of(gateway: GatewayState, experiment: Experiment) -> Shifts:
    return Shifts(
        experiment,
        gateway.repository,
        gateway.registry,
        gateway.publications,
        gateway.clock,
        gateway.feeder_status.of(experiment),
        gateway.measurements.of(experiment).lending,
    )


async def told(
    gateway: GatewayState, experiment: Experiment, service_id: str, device: DeviceReport | None, version: int | None = 0
) -> DeviceOrder | None:
    is_trainer = gateway.registry.get(service_id).kind is ServiceKind.TRAINER
    state = ObservedState(
        experiment_id=experiment.id,
        state=WorkState.RUNNING,
        policy_version=None if is_trainer else version,
        device=device,
    )
    order: DeviceOrder | None = (await say(gateway, service_id, state)).device
    return order


async def test_a_lent_rollout_works_for_the_trainer_of_its_host_alone_and_counts_for_no_quota() -> None:
    gateway, experiment, _ = await a_lending_fleet()
    beside, elsewhere = await join(gateway), await join(gateway, "far", host="there")

    await gateway.scheduler.reconcile()

    assert gateway.registry.get(beside).experiment_id == experiment.id
    assert gateway.registry.get(elsewhere).experiment_id is None
    [share] = gateway.scheduler.view().experiments
    assert len(share.kinds["rollout"].services) == 1
    assert share.lending == "the trainer has its devices: no step has ended yet"


async def test_it_is_no_rollout_for_experiments_that_lend_nothing() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING)
    for kind in (ServiceKind.TRAINER, ServiceKind.REWARD):
        await add_service(gateway, kind, kind.value)
    lent = await join(gateway)

    await gateway.scheduler.reconcile()

    assert gateway.registry.get(lent).experiment_id is None
    assert "waiting for 1 rollout" in str(gateway.commands.view(experiment).problem)


async def test_it_leaves_for_a_trainer_that_is_elsewhere_and_stays_while_there_is_none() -> None:
    gateway, experiment, services = await a_lending_fleet()
    lent = await join(gateway)
    await gateway.scheduler.reconcile()

    await gateway.fleet.leave(services["trainer"], reason="it died")
    await gateway.scheduler.reconcile()
    assert gateway.registry.get(lent).leaving is None

    await add_service(gateway, ServiceKind.TRAINER, "another", experiment.id, host="there")
    await gateway.scheduler.reconcile()
    leaving = gateway.registry.get(lent).leaving
    assert leaving is not None
    assert leaving.reason == "the trainer whose devices it is lent is on another host now"


async def test_what_lent_rollouts_have_sampled_is_known_once_all_of_them_say_it() -> None:
    gateway, experiment, services = await a_lending_fleet()
    lent = [await join(gateway), await join(gateway, "lent too")]
    await gateway.scheduler.reconcile()
    sampled = gateway.scheduler.lent.sampled
    assert sampled(experiment.id) is None

    for service_id, count in ((services["rollout"], 100.0), (lent[0], 7.0)):
        await say(gateway, service_id, ObservedState(experiment_id=experiment.id, load={"generated_tokens": count}))
    assert sampled(experiment.id) is None
    await say(gateway, lent[1], ObservedState(experiment_id=experiment.id, load={"generated_tokens": 0.0}))

    assert sampled(experiment.id) == 7.0


async def test_without_a_lent_rollout_it_is_said_what_is_missing() -> None:
    gateway, experiment, _ = await a_lending_fleet()

    assert gateway.scheduler.lent.told(experiment) == (
        "nothing is lent: no rollout of the pool lent is there (flotilla rollout --pool lent on here)"
    )


async def test_an_experiment_starts_without_its_lent_rollouts() -> None:
    gateway, experiment, _ = await a_lending_fleet(state=ExperimentState.STARTING)
    await join(gateway)
    await gateway.scheduler.reconcile()

    assert gateway.reconciler._is_ready(experiment)


@pytest.mark.parametrize(
    ("verdict", "ledger", "lends"),
    [
        (PAYS, WAITING, True),
        (Verdict(), WAITING, False),
        (PAYS, Ledger(claimed=HopCounts(tasks=3)), False),
        (PAYS, Ledger(waiting=HopCounts(tasks=3, scored=1), claimed=HopCounts(scored=1)), False),
        (PAYS, None, False),
    ],
    ids=["it pays", "it does not pay", "no task waits", "the next step is there", "the ledger is not known"],
)
async def test_devices_are_lent_while_it_pays_and_tasks_wait(
    verdict: Verdict, ledger: Ledger | None, lends: bool
) -> None:
    gateway, experiment, services = await a_lending_fleet()
    lent = await join(gateway)
    await gateway.scheduler.reconcile()
    await told(gateway, experiment, services["trainer"], DeviceReport(shift=1, is_held=True))
    await told(gateway, experiment, lent, DeviceReport(shift=1, is_held=False))
    gateway.measurements.of(experiment).lending.verdict = verdict
    gateway.feeder_status.of(experiment).ledger = ledger

    await shifts_of(gateway, experiment).look()

    assert experiment.record.device_shift == 1 + lends


async def test_nothing_is_lent_while_a_version_is_evaluated() -> None:
    gateway, experiment, services = await a_lending_fleet(evaluating_version=0)
    lent = await join(gateway)
    await gateway.scheduler.reconcile()
    await told(gateway, experiment, services["trainer"], DeviceReport(shift=1, is_held=True))
    await told(gateway, experiment, lent, DeviceReport(shift=1, is_held=False))
    gateway.measurements.of(experiment).lending.verdict = PAYS
    gateway.feeder_status.of(experiment).ledger = WAITING

    await shifts_of(gateway, experiment).look()

    assert experiment.record.device_shift == 1


async def test_the_trainer_has_its_devices_back_at_once_whatever_is_under_way() -> None:
    gateway, experiment, services = await a_lending_fleet(device_shift=2)
    lent = await join(gateway)
    await gateway.scheduler.reconcile()
    gateway.measurements.of(experiment).lending.verdict = PAYS
    gateway.feeder_status.of(experiment).ledger = WAITING
    assert await told(gateway, experiment, services["trainer"], DeviceReport(shift=2, is_held=False)) is not None
    order = await told(gateway, experiment, lent, DeviceReport(shift=2, is_held=True))
    assert order == DeviceOrder(shift=2, may_hold=True)
    assert gateway.scheduler.lent.told(experiment) == f"{lent} has the trainer's devices: it pays"

    await told(gateway, experiment, services["trainer"], DeviceReport(shift=2, is_held=False, is_wanted=True))
    await shifts_of(gateway, experiment).look()

    assert await told(gateway, experiment, lent, DeviceReport(shift=2, is_held=True)) == DeviceOrder(
        shift=3, may_hold=False
    )
    waiting = DeviceReport(shift=3, is_held=False, is_wanted=True)
    assert await told(gateway, experiment, services["trainer"], waiting) == DeviceOrder(shift=3, may_hold=False)
    await told(gateway, experiment, lent, DeviceReport(shift=3, is_held=False))
    assert await told(gateway, experiment, services["trainer"], waiting) == DeviceOrder(shift=3, may_hold=True)


async def test_rollouts_with_devices_of_their_own_have_no_orders_and_hold_nobody_up() -> None:
    gateway, experiment, services = await a_lending_fleet()
    lent = await join(gateway)
    await gateway.scheduler.reconcile()

    assert await told(gateway, experiment, services["rollout"], None) is None
    assert await told(gateway, experiment, lent, DeviceReport(shift=1, is_held=False)) == DeviceOrder(
        shift=1, may_hold=False
    )
    order = await told(gateway, experiment, services["trainer"], DeviceReport(shift=1, is_held=True))
    assert order == DeviceOrder(shift=1, may_hold=True)


async def test_an_engine_that_was_never_loaded_gets_the_devices_before_they_are_needed() -> None:
    gateway, experiment, services = await a_lending_fleet()
    lent = await join(gateway)
    await gateway.scheduler.reconcile()
    await told(gateway, experiment, services["trainer"], DeviceReport(shift=1, is_held=True))
    await told(gateway, experiment, lent, DeviceReport(shift=1, is_held=False), version=None)

    await shifts_of(gateway, experiment).look()

    assert experiment.record.device_shift == 2
