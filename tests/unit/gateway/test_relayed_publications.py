"""Beyond the group a version is passed on, to rollouts that know how: each is told once somebody has it."""

import asyncio

from flotilla.services.gateway.publications.transports import receivers_of
from flotilla.shared.schemas.publication import Publication, PublicationPhase, ReceiveState
from flotilla.shared.schemas.service import Capabilities
from tests.unit.gateway.builders import a_manifest, a_spec, turns
from tests.unit.gateway.test_publications import Stage
from tests.unit.gateway.test_transports import a_rollout

ABLE = Capabilities(transports=("gloo", "relay"))


async def a_stage(num_rollouts: int) -> Stage:
    stage = await Stage.of(num_rollouts)
    for service in stage.gateway.registry:
        service.capabilities = ABLE
    stage.gateway.publications.most_in_group = 1
    return stage


async def test_whoever_is_relayed_to_is_told_once_a_member_has_it_and_the_commit_waits_for_all() -> None:
    stage = await a_stage(3)
    first, second, third = stage.rollouts
    publication = await stage.announce()
    assert isinstance(publication, Publication)
    assert [each.rank for each in publication.members] == [1, None, None]
    await stage.open(1)
    assert (await stage.desired_of(second)).publication is None
    service = stage.gateway.registry.get(second)
    woken = service.changed.next

    await stage.report(first, ReceiveState.JOINED, 1)
    await stage.report(first, ReceiveState.RECEIVED, 1)

    await asyncio.wait_for(woken, 1.0)
    order = (await stage.desired_of(second)).publication
    address = stage.gateway.registry.get(first).record.address
    sender = stage.gateway.registry.get(stage.trainer).record.address
    assert order is not None and order.is_relayed_to and not order.may_map
    assert order.sources == (f"{address}/v1/weights/1", f"{sender}/v1/weights/1")
    await stage.report(second, ReceiveState.RECEIVED, 1)
    assert await stage.phase() is PublicationPhase.TRANSFERRING
    await stage.report(third, ReceiveState.RECEIVED, 1)
    assert await stage.phase() is PublicationPhase.COMMITTED


async def test_another_gateway_goes_on_where_members_say_what_they_have() -> None:
    stage = await a_stage(3)
    first, second, third = stage.rollouts
    await stage.announce()
    await stage.open(1)
    await stage.report(first, ReceiveState.JOINED, 1)
    await stage.report(first, ReceiveState.RECEIVED, 1)
    await stage.report(second, ReceiveState.RECEIVED, 1)

    await stage.restart()
    await stage.report(second, ReceiveState.RECEIVED, 1)

    order = (await stage.desired_of(third)).publication
    assert order is not None and len(order.sources) == 2
    await stage.report(third, ReceiveState.RECEIVED, 1)
    assert await stage.phase() is PublicationPhase.TRANSFERRING
    await stage.report(first, ReceiveState.RECEIVED, 1)
    assert await stage.phase() is PublicationPhase.COMMITTED


async def test_a_rollout_beside_the_group_joins_and_leaves_without_a_new_epoch() -> None:
    stage = await a_stage(3)
    first, second, third = stage.rollouts
    await stage.announce()
    await stage.open(1)
    for each in (first, second, third):
        await stage.report(each, ReceiveState.JOINED, 1)
        await stage.report(each, ReceiveState.RECEIVED, 1)
    await stage.gateway.fleet.leave(third, reason="its lease ended")
    await turns()

    publication = await stage.announce(2)

    assert isinstance(publication, Publication)
    assert (publication.epoch, publication.rendezvous is not None) == (1, True)
    assert [each.service_id for each in publication.members] == [first, second]


async def test_the_time_of_a_transfer_grows_with_the_waves() -> None:
    stage = await a_stage(3)
    first, *_ = stage.rollouts
    await stage.announce()
    await stage.open(1)
    await stage.report(first, ReceiveState.JOINED, 1)
    await stage.report(first, ReceiveState.RECEIVED, 1)
    clock = stage.gateway.clock

    clock.advance(15.0)  # type: ignore[attr-defined]
    await stage.gateway.publications.check_deadlines()
    assert await stage.phase() is PublicationPhase.TRANSFERRING
    clock.advance(6.0)  # type: ignore[attr-defined]
    await stage.gateway.publications.check_deadlines()

    assert await stage.phase() is PublicationPhase.COMMITTED
    events = await stage.gateway.store.events(stage.experiment.id, after=0, limit=100)
    [committed] = [each for each in events if each.type == "publication_committed"]
    assert committed.data["members"] == [first] and "in time" in committed.data["reason"]


def test_a_trainer_or_a_rollout_of_an_earlier_release_is_in_the_group_in_any_case() -> None:
    rollouts = [a_rollout(f"r{number}") for number in range(3)]
    for each in rollouts:
        each.observed = each.observed.model_copy(update={"experiment_id": each.experiment_id, "state": "running"})
        each.capabilities = ABLE
    rollouts[2].capabilities = Capabilities(transports=("gloo",))
    facts = {"has_image": a_manifest().image_path is not None, "most_in_group": 1}

    found = receivers_of(a_spec(), ABLE, rollouts, (), **facts)  # type: ignore[arg-type]
    assert set(found.beside.relayed) == {"r0", "r1"} and found.ways == ["gloo", "relay"]

    earlier = receivers_of(a_spec(), rollouts[2].capabilities, rollouts, (), **facts)  # type: ignore[arg-type]
    assert set(earlier.beside.relayed) == set() and earlier.ways == ["gloo"]
