"""One suite over every way that a version takes: whole, checked and committed, or not served at all."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.publications.transports import MOST_IN_GROUP
from flotilla.shared.config.sections.publication import PublicationConfig
from flotilla.shared.schemas.publication import ReceiveState
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from tests.contract.weights.fleet import EXPERIMENT, PHASE_SECONDS, Fleet, a_fleet, a_rollout
from tests.integration.weights.processes import images_of_this_process

SHORT_PHASE_SECONDS = 3.0
"""Where somebody fails and his deadline has to pass."""
SLACK_SECONDS = 12.0
"""What a crowded machine may add."""
WAYS: dict[str, dict[str, Any]] = {
    "group": {"transport": "group"},
    "gloo delta": {"transport": "gloo", "delta": {"block_kilobytes": 4}},
    "gloo bfloat16": {"transport": "gloo", "wire_dtype": "bfloat16"},
    "shared_memory": {"transport": "shared_memory"},
    "shared_memory bfloat16": {"transport": "shared_memory", "wire_dtype": "bfloat16"},
    "pull": {"transport": "pull"},
    "relay": {"transport": "gloo", "most_in_group": 1},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def endpoints() -> AsyncIterator[list[EndpointClient]]:
    """The trainer's endpoint and those of three rollouts, for all tests: one takes seconds to start."""
    made = [EndpointClient() for _ in range(4)]
    await asyncio.gather(*(endpoint.start() for endpoint in made))
    yield made
    for endpoint in made:
        await endpoint.close()


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@asynccontextmanager
async def running(
    way: dict[str, Any], endpoints: list[EndpointClient], num_rollouts: int = 2, phase_seconds: float = PHASE_SECONDS
) -> AsyncIterator[Fleet]:
    before = images_of_this_process()
    keys = dict(way)
    most_in_group = keys.pop("most_in_group", MOST_IN_GROUP)
    async with a_fleet(PublicationConfig(**keys), endpoints, num_rollouts, phase_seconds, most_in_group) as fleet:
        yield fleet
    assert images_of_this_process() == before


async def test_every_rollout_serves_the_very_bytes_of_each_version(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    async with running(way, endpoints) as fleet:
        for version in (1, 2, 3, 4):
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)

        assert fleet.transports() == ({"gloo" if way["transport"] == "group" else way["transport"]} - {"pull"})
        assert any(each.is_relayed_to for each in fleet.last_members()) == ("most_in_group" in way)
        assert {rollout.pulls for rollout in fleet.rollouts} == ({4} if way["transport"] == "pull" else {0})


async def test_few_changed_blocks_take_few_bytes(endpoints: list[EndpointClient]) -> None:
    async with running(WAYS["gloo delta"], endpoints) as fleet:
        await fleet.train_and_publish(1)
        await fleet.everybody_serves(1)
        whole = fleet.publisher.last_sent_bytes
        fleet.rows_to_train = 22  # 44 of 1024 KB: with those at the edges at most 5 % of the blocks

        for version in (2, 3):
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)

            assert fleet.publisher.last_sent_bytes <= 0.05 * whole
        assert [rollout.pulls for rollout in fleet.rollouts] == [0, 0]


async def test_much_change_is_sent_whole(endpoints: list[EndpointClient]) -> None:
    async with running(WAYS["gloo delta"], endpoints) as fleet:
        for version in (1, 2):
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)

        assert fleet.publisher.last_sent_bytes > 1 << 20


async def test_a_rollout_with_another_base_makes_a_publication_whole_once(endpoints: list[EndpointClient]) -> None:
    async with running(WAYS["gloo delta"], endpoints) as fleet:
        fleet.rows_to_train = 22
        await fleet.train_and_publish(1)
        await fleet.everybody_serves(1)
        new = await a_rollout(fleet, "new", endpoints[3])
        new.receiver._images.keep(None)  # it serves what it pulled, and holds nothing to be patched

        sent = []
        for version in (2, 3):
            await new.settle()
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)
            sent.append(fleet.publisher.last_sent_bytes)

        assert sent[0] > 1 << 20 > 20 * sent[1]
        assert new.pulls == 1


async def test_a_rollout_that_pulled_is_patched_next(endpoints: list[EndpointClient]) -> None:
    async with running(WAYS["gloo delta"], endpoints) as fleet:
        fleet.rows_to_train = 22
        await fleet.train_and_publish(1)
        new = await a_rollout(fleet, "new", endpoints[3])
        await new.settle()

        await fleet.train_and_publish(2)

        await fleet.everybody_serves(2)
        assert (new.pulls, fleet.publisher.last_sent_bytes < 1 << 16) == (1, True)


async def test_a_patch_for_an_image_that_a_member_lost_is_followed_by_the_whole_image(
    endpoints: list[EndpointClient],
) -> None:
    def forget(version: int, path: Path) -> None:
        if version == 2:
            fleet.rollouts[0].receiver._images.staged.image.view[-1] ^= 1  # type: ignore[union-attr]

    async with running(WAYS["gloo delta"], endpoints) as fleet:
        fleet.rows_to_train = 22
        await fleet.train_and_publish(1)
        await fleet.everybody_serves(1)
        fleet.before_announcing = forget

        await fleet.train_and_publish(2)

        await fleet.everybody_serves(2)
        assert [report.state for report in fleet.rollouts[0].reports][-1] is ReceiveState.FAILED
        await fleet.train_and_publish(3)
        await fleet.everybody_serves(3)


async def test_a_rollout_that_dies_before_is_not_waited_for(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    async with running(way, endpoints) as fleet:
        await fleet.train_and_publish(1)
        await fleet.everybody_serves(1)
        await fleet.rollouts.pop().die()
        started = time.monotonic()

        await fleet.train_and_publish(2)

        await fleet.everybody_serves(2)
        assert time.monotonic() - started < PHASE_SECONDS


async def test_a_rollout_that_dies_during_the_transfer_costs_at_most_a_deadline(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    async with running(way, endpoints, phase_seconds=SHORT_PHASE_SECONDS) as fleet:
        dying = fleet.rollouts.pop()
        dying.is_stalled = True
        started = time.monotonic()
        publishing = asyncio.create_task(fleet.train_and_publish(1))
        await asyncio.sleep(0.2)
        await dying.die()

        await publishing

        await fleet.everybody_serves(1)
        assert time.monotonic() - started < SHORT_PHASE_SECONDS + SLACK_SECONDS


async def test_a_rollout_that_dies_after_the_transfer_changes_nothing(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    async with running(way, endpoints) as fleet:
        await fleet.train_and_publish(1)
        await fleet.rollouts.pop().die()

        await fleet.everybody_serves(1)
        await fleet.train_and_publish(2)
        await fleet.everybody_serves(2)


async def test_a_rollout_that_hears_nothing_costs_one_deadline_and_catches_up(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    async with running(way, endpoints, phase_seconds=SHORT_PHASE_SECONDS) as fleet:
        fleet.rollouts[0].is_stalled = True
        started = time.monotonic()

        await fleet.train_and_publish(1)

        assert time.monotonic() - started < SHORT_PHASE_SECONDS + SLACK_SECONDS
        fleet.rollouts[0].is_stalled = False
        await fleet.everybody_serves(1)
        await fleet.train_and_publish(2)
        await fleet.everybody_serves(2)


async def test_bytes_that_are_not_those_announced_are_never_served(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    def corrupt(version: int, path: Path) -> None:
        if version == 1:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    async with running(way, endpoints) as fleet:
        fleet.before_announcing = corrupt

        await fleet.train_and_publish(1)
        await fleet.train_and_publish(2)

        await fleet.everybody_serves(2)
        states = {report.state for rollout in fleet.rollouts for report in rollout.reports if report.version == 1}
        assert ReceiveState.RECEIVED not in states
        assert all(list(rollout.engine.served) == [2] for rollout in fleet.rollouts)


async def test_a_rollout_that_joins_late_begins_with_the_current_version(
    way: dict[str, Any], endpoints: list[EndpointClient]
) -> None:
    async with running(way, endpoints) as fleet:
        await fleet.train_and_publish(1)
        await fleet.train_and_publish(2)

        late = await a_rollout(fleet, "late", endpoints[3])

        pulls = 0 if way["transport"] == "shared_memory" else 1
        assert (late.gate.version, list(late.engine.served), late.pulls) == (2, [2], pulls)
        await fleet.train_and_publish(3)
        await fleet.everybody_serves(3)
        assert late.pulls == (2 if way["transport"] == "pull" else pulls)


async def test_rollouts_on_the_host_map_while_others_take_part_in_the_broadcast(
    endpoints: list[EndpointClient],
) -> None:
    async with running({"transport": "auto"}, endpoints) as fleet:
        registry = fleet.gateway.registry
        elsewhere = registry.get(fleet.rollouts[0].service_id)
        elsewhere.capabilities = elsewhere.capabilities.model_copy(update={"shared_memory": "elsewhere"})

        for version in (1, 2):
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)

        assert fleet.transports() == {"gloo", "shared_memory"}


async def test_every_rollout_of_a_group_is_a_member_also_on_the_trainers_host(
    endpoints: list[EndpointClient],
) -> None:
    async with running(WAYS["group"], endpoints, num_rollouts=3) as fleet:
        for version in (1, 2):
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)

            assert fleet.transports() == {"gloo"}
            assert fleet.members() == {rollout.service_id for rollout in fleet.rollouts}
        assert [rollout.pulls for rollout in fleet.rollouts] == [0, 0, 0]


@pytest.mark.parametrize("name", ["group", "pull"])
async def test_a_rollout_that_joins_gets_the_version_from_another_rollout(
    endpoints: list[EndpointClient], name: str
) -> None:
    async with running(WAYS[name], endpoints, num_rollouts=1) as fleet:
        await fleet.train_and_publish(1)
        await fleet.everybody_serves(1)
        await fleet.rollouts[0].settle()
        fleet.published.withdraw()  # the trainer is busy starting again

        await a_rollout(fleet, "new", endpoints[3])

        await fleet.everybody_serves(1)
        assert fleet.rollouts[1].pulls == 1


async def test_a_rollout_offers_the_version_that_it_keeps_and_no_other(endpoints: list[EndpointClient]) -> None:
    async with running(WAYS["pull"], endpoints, num_rollouts=1) as fleet:
        [rollout] = fleet.rollouts
        for version in (1, 2):
            await fleet.train_and_publish(version)
            await fleet.everybody_serves(version)

            assert rollout._published.versions == (version,)


async def test_rollouts_beside_the_group_get_each_version_from_one_another(endpoints: list[EndpointClient]) -> None:
    unused = EndpointClient()  # A process that imports torch is started with the first group, and there is none.
    async with running(WAYS["relay"], endpoints, num_rollouts=1) as fleet:
        await fleet.train_and_publish(1)
        for number in range(5):
            await a_rollout(fleet, f"beside{number}", unused)
        for rollout in fleet.rollouts:
            rollout.pulls, rollout.asking.asked = 0, []
        for version in (2, 3, 4):
            await fleet.train_and_publish(version)
            assert fleet.members() == {rollout.service_id for rollout in fleet.rollouts}
            await fleet.everybody_serves(version)

        asked = [host for rollout in fleet.rollouts for host in rollout.asking.asked]
        assert len(asked) >= 5 * 3 and "trainer" not in asked
        assert {rollout.pulls for rollout in fleet.rollouts} == {0}


async def test_where_a_member_offers_something_else_the_trainer_sends_the_version(
    endpoints: list[EndpointClient],
) -> None:
    async with running(WAYS["relay"], endpoints) as fleet:
        [member] = [each for each in fleet.rollouts if await _is_in_group(fleet, each.service_id, version=1)]
        [other] = [each for each in fleet.rollouts if each is not member]
        member._published.publish = lambda *_: None  # type: ignore[method-assign]

        await fleet.train_and_publish(2)

        await fleet.everybody_serves(2)
        assert other.asking.asked[-1] == "trainer" and member.name in other.asking.asked
        assert fleet.members() == {each.service_id for each in fleet.rollouts}


async def _is_in_group(fleet: Fleet, service_id: str, version: int) -> bool:
    if not fleet.gateway.publications.committed(EXPERIMENT, version):
        await fleet.train_and_publish(version)
        await fleet.everybody_serves(version)
    [order] = [each for each in fleet.last_members() if each.service_id == service_id]
    return order.rank is not None


async def test_of_rollouts_on_another_host_one_receives_and_the_others_map_its_image(
    endpoints: list[EndpointClient],
) -> None:
    async with running({"transport": "auto"}, endpoints, num_rollouts=3) as fleet:
        for rollout in fleet.rollouts:
            service = fleet.gateway.registry.get(rollout.service_id)
            service.capabilities = service.capabilities.model_copy(update={"shared_memory": "elsewhere"})

        for version in (1, 2, 3):
            await fleet.train_and_publish(version)
            assert fleet.members() == {rollout.service_id for rollout in fleet.rollouts}
            await fleet.everybody_serves(version)

        assert fleet.transports() == {"gloo"}
        assert sorted(each.is_relayed_to for each in fleet.last_members()) == [False, True, True]
        assert sum(rollout.receiver.held_image is not None for rollout in fleet.rollouts) == 1
        assert {rollout.pulls for rollout in fleet.rollouts} == {0}
