"""Faults of the network are named by host: who is silent, and who reaches the gateway but not Redis."""

import pytest

from flotilla.services.gateway.monitoring.diagnosis import without_redis
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from tests.unit.gateway.builders import a_gateway, a_registration, add_experiment, add_service, say, stop


async def test_the_host_that_an_experiment_waits_for_is_named_with_its_silence() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway, state=ExperimentState.STARTING)
    for kind in ServiceKind:
        address = "http://10.0.0.3:9000" if kind is ServiceKind.ROLLOUT else f"http://10.0.0.1/{kind}"
        await gateway.fleet.register(a_registration(kind, kind.value, address=address))
    await gateway.reconciler.reconcile()
    (rollout,) = gateway.registry.of(experiment.id, ServiceKind.ROLLOUT)

    clock.advance(9.0)
    await say(gateway, rollout.id, ObservedState())
    clock.advance(6.0)
    for service in gateway.registry:
        if service is not rollout:
            await say(gateway, service.id, ObservedState(experiment_id=experiment.id, state=WorkState.RUNNING))
    await gateway.reconciler.reconcile()

    assert experiment.record.problem is not None
    silence = f"no contact with 10.0.0.3 ({rollout.id}) for 5 s"
    assert experiment.record.problem["cause"] == f"{silence}; waiting for 1 rollout to register"
    left = [
        event for event in await gateway.store.events(experiment.id, after=0, limit=100) if event.type == "service_left"
    ]
    assert [event.data["reason"] for event in left] == [f"its lease ended: {silence}"]

    await gateway.fleet.register(a_registration(ServiceKind.ROLLOUT, "rollout"))
    await gateway.reconciler.reconcile()
    assert experiment.record.problem is None
    await stop(gateway)


@pytest.mark.parametrize(("seconds", "is_named"), [(0.0, False), (4.9, False), (12.0, True)])
async def test_a_host_that_reaches_the_gateway_and_not_redis_is_named(seconds: float, is_named: bool) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "one", experiment.id)
    await say(gateway, service_id, ObservedState(experiment_id=experiment.id, load={"redis_silent_seconds": seconds}))

    found = without_redis((each.record, each.observed.load) for each in gateway.registry.of(experiment.id))

    cause = ("network", f"127.0.0.1 ({service_id}) reaches the gateway, not Redis, for 10 s")
    assert found == (cause if is_named else None)
