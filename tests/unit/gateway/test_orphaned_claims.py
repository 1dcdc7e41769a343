"""Who is dead, and what is freed of what they held; when that is looked for."""

import pytest

from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.runtime.orphaned_claims import OrphanedClaims
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.streams.hop import Hop, HopName, holder_name
from flotilla.shared.testing.builders import a_task
from tests.unit.gateway.builders import (
    a_gateway,
    a_registration,
    add_experiment,
    add_service,
    running,
    stays,
    turns,
    until,
)


def of(gateway: GatewayState, experiment: Experiment) -> OrphanedClaims:
    return OrphanedClaims(experiment, gateway.registry, gateway.events, gateway.fleet.left.of(experiment))


def hop_of(gateway: GatewayState, experiment: Experiment, service_id: str) -> Hop:
    return experiment.train.hop(HopName.TASKS, gateway.registry.get(service_id).holder)


async def issue(experiment: Experiment, count: int) -> None:
    await experiment.train.admission.issue_many([a_task(number) for number in range(count)], limit=99)


async def test_claims_of_the_registered_and_of_strangers_stay() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    await issue(experiment, 3)
    alive = hop_of(gateway, experiment, await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id))
    stranger = experiment.train.hop(HopName.TASKS, "somebody's own")
    dead = experiment.train.hop(HopName.TASKS, holder_name("rollout", 77, "gone"))
    held = {hop: await hop.claim(wait_seconds=0) for hop in (alive, stranger, dead)}

    assert await of(gateway, experiment).look() == 1

    lost = {hop: await hop.renew(claims) for hop, claims in held.items()}
    assert lost == {alive: [], stranger: [], dead: held[dead]}
    (event,) = await gateway.store.events(experiment.id, after=0, limit=9)
    assert (event.type, event.data) == ("claims_released", {"claims": 1})


async def test_a_service_that_was_silent_too_long_loses_its_claims_with_its_registration() -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock)
    experiment = await add_experiment(gateway)
    await issue(experiment, 1)
    service_id = await add_service(gateway, ServiceKind.ROLLOUT, "r", experiment.id)
    hop = hop_of(gateway, experiment, service_id)
    claims = await hop.claim(wait_seconds=0)
    async with running(of(gateway, experiment).run()):
        await until(lambda: gateway.fleet.left.of(experiment)._next is not None)
        clock.advance(10.1)

        for service in gateway.registry.expired():
            await gateway.fleet.leave(service.id, reason="its lease ended")

        heir = experiment.train.hop(HopName.TASKS, "heir")
        assert len(await heir.claim(wait_seconds=0.5)) == 1, "long before the next look that is not asked for"
    assert await hop.renew(claims) == claims


@pytest.mark.parametrize("kind", [ServiceKind.ROLLOUT, ServiceKind.REWARD])
async def test_a_process_that_is_started_in_anothers_place_ends_it(kind: ServiceKind) -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    old = await add_service(gateway, kind, "one", experiment.id)
    place = a_registration(kind, "one").address
    elsewhere = await add_service(gateway, kind, "elsewhere", experiment.id)
    waits = gateway.registry.get(old).observed.model_copy(
        update={"acknowledged": gateway.fleet.desired(gateway.registry.get(old)).tag}
    )
    hung_up = stays()
    hung_up.set_result(None)
    await gateway.fleet.report(old, waits, 30.0, lambda: hung_up)

    new = (await gateway.fleet.register(a_registration(kind, "two", address=place))).service_id

    assert {service.id for service in gateway.registry} == {elsewhere, new}
    events = await gateway.store.events(experiment.id, after=0, limit=9)
    left = [event.data for event in events if event.type == "service_left"]
    assert [(each["service_id"], each["reason"]) for each in left] == [
        (old, "another process was started in its place")
    ]


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_process_that_is_there_keeps_its_place_whatever_address_another_names(is_waiting: bool) -> None:
    clock = ManualClock()
    gateway = a_gateway(clock=clock, lease_seconds=10.0)
    experiment = await add_experiment(gateway)
    there = await add_service(gateway, ServiceKind.REWARD, "one", experiment.id)
    tag = gateway.fleet.desired(gateway.registry.get(there)).tag
    observed = ObservedState(acknowledged=tag, experiment_id=experiment.id, state=WorkState.RUNNING)
    thief = a_registration(ServiceKind.REWARD, "two", address=a_registration(ServiceKind.REWARD, "one").address)

    async with running(gateway.fleet.report(there, observed, 30.0 if is_waiting else 0.0, stays)):
        await turns()
        await gateway.fleet.register(thief)
        assert gateway.registry.get(there).experiment_id == experiment.id
    clock.advance(50.0)
    await gateway.fleet.register(thief)

    assert gateway.registry.find(there) is None, "its lease has ended"


async def test_an_address_that_names_no_place_says_nothing_of_others() -> None:
    gateway = a_gateway()
    for incarnation in ("one", "two"):
        registration = a_registration(ServiceKind.REWARD, incarnation, address="http://0.0.0.0:8000")
        await gateway.fleet.register(registration)

    assert len(gateway.registry) == 2


async def test_a_data_plane_that_is_away_is_asked_again() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    asked: list[str] = []

    async def look() -> int:
        asked.append("looked")
        raise Unavailable("the server is unavailable")

    claims = of(gateway, experiment)
    claims.look = look  # type: ignore[method-assign]
    async with running(claims.run()) as task:
        await until(lambda: len(asked) == 1)
        gateway.fleet.left.of(experiment).fire()
        await until(lambda: len(asked) == 2)
        assert not task.done()


async def test_a_service_is_the_same_claimer_after_a_restart_of_the_gateway() -> None:
    gateway = a_gateway()
    holder = gateway.registry.get(await add_service(gateway, ServiceKind.ROLLOUT, "one")).holder

    again = a_gateway(gateway.store)  # type: ignore[arg-type]
    await again.registry.load()

    assert [each.holder for each in again.registry] == [holder]
