"""Two experiments on the groups of one rollout, over a real gateway and Redis: whoever dies, both ledgers balance."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.state import GatewayState
from flotilla.shared.errors import InvalidSpec, NotFound
from flotilla.shared.net.client.client import GatewayClient
from tests.integration.gateway.fleet import ScriptedReward, ScriptedRollout, ScriptedTrainer, a_fleet, a_spec, until
from tests.integration.gateway.test_faults import optimisation, wait_for

GROUPS = 2


@dataclass
class Pair:
    """The paths of a source and a subscriber that were created, and whoever works for them."""

    client: GatewayClient
    source: str
    taker: str
    trainer: ScriptedTrainer
    """The subscriber's."""

    async def ledgers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        found = [(await self.client.call("GET", f"{path}/ledger"))["train"] for path in (self.source, self.taker)]
        assert all(each["balanced"] for each in found)
        return found[0], found[1]


@asynccontextmanager
async def a_pair(
    url: str, redis_url: str, client: GatewayClient, folder: Path, *, steps: int = 3, taker_steps: int | None = None
) -> AsyncIterator[Pair]:
    """Create both, let the subscriber wait for groups, and start the source."""
    spec = a_spec(folder, optimisation=optimisation(steps))
    created = await client.call("POST", "/v1/experiments", body=spec)
    taken = {"data": {"from": "tiny"}, "name": "taker", "optimisation": optimisation(taker_steps or steps)}
    async with a_fleet(url, redis_url, ScriptedTrainer) as [trainer]:
        begun = await client.call("POST", "/v1/experiments", body=spec | taken, params={"start": True})
        assert begun["spec"]["data"]["from"] == created["id"], "by its id, whatever is called so later"
        pair = Pair(client, f"/v1/experiments/{created['id']}", f"/v1/experiments/{begun['id']}", trainer)
        await wait_for(client, pair.taker, "running")
        async with a_fleet(url, redis_url, ScriptedRollout, ScriptedReward, ScriptedTrainer):
            await client.call("POST", f"{pair.source}/start")
            yield pair


async def test_both_train_every_group(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, _ = served
    async with a_pair(url, redis_url, client, tmp_path) as pair:
        await wait_for(client, pair.source, "completed")
        view = await wait_for(client, pair.taker, "completed")

        of_source, of_taker = await pair.ledgers()

    assert of_source["trained"] == of_taker["trained"] == 3 * GROUPS
    assert sorted(sum(pair.trainer.trained, ())) == list(range(3 * GROUPS)), "under the ids that they have"
    assert view["policy_version"] == 3, "versions of its own"
    assert set(view["services"]) <= {"trainer"}


async def test_a_subscriber_whose_trainer_dies_trains_no_group_twice(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, _ = served
    async with a_pair(url, redis_url, client, tmp_path, steps=6) as pair:
        pair.trainer.waits_before = 3
        await until(lambda: pair.trainer.step == 2)
        async with a_fleet(url, redis_url, ScriptedTrainer):
            await pair.trainer.die()
            await wait_for(client, pair.source, "completed")
            await wait_for(client, pair.taker, "completed")

            of_source, of_taker = await pair.ledgers()
            # Whoever is free takes over: the trainer of the source, too, once that is complete.
            steps = [await client.call("GET", f"{pair.taker}/steps/{step}") for step in range(1, 7)]

    assert of_source["trained"] == of_taker["trained"] == 6 * GROUPS
    trained = [group for step in steps for group in step["group_ids"]]
    assert all(step["is_committed"] for step in steps)
    assert len(trained) == len(set(trained)) == 6 * GROUPS
    assert of_taker["dropped"] == {}


async def test_a_subscriber_stops_where_its_source_ends(
    served: tuple[str, GatewayState], client: GatewayClient, redis_url: str, tmp_path: Path
) -> None:
    url, gateway = served
    async with a_pair(url, redis_url, client, tmp_path, steps=2, taker_steps=5) as pair:
        await wait_for(client, pair.source, "completed")
        view = await wait_for(client, pair.taker, "stopped")
        events = (await client.call("GET", f"{pair.taker}/log", params={"types": "source_ended"}))["items"]
        assert (view["step"], view["problem"]) == (2, None)
        [ended] = [each["data"] for each in events]
        assert ended == {"step": 2, "source": pair.source.rpartition("/")[2], "state": "completed"}
        source = gateway.repository.get(pair.source.rpartition("/")[2])
        assert await source.train.sharing.subscribers() == {}

        await client.call("POST", f"{pair.source}/extend", body={"steps": 9})
        await client.call("POST", f"{pair.taker}/resume")
        await wait_for(client, pair.source, "completed")
        view = await wait_for(client, pair.taker, "completed", "stopped")

        of_source, of_taker = await pair.ledgers()

    assert of_source["trained"] == 9 * GROUPS
    # What the source sampled before the subscriber was back it never asked for.
    assert of_taker["trained"] == view["step"] * GROUPS


async def test_what_cannot_be_subscribed_to_is_refused(
    served: tuple[str, GatewayState], client: GatewayClient, tmp_path: Path
) -> None:
    spec = a_spec(tmp_path)
    with pytest.raises(NotFound, match="there is no experiment tiny"):
        await client.call("POST", "/v1/experiments", body=spec | {"data": {"from": "tiny"}})
    created = await client.call("POST", "/v1/experiments", body=spec)
    taker = await client.call("POST", "/v1/experiments", body=spec | {"name": "taker", "data": {"from": created["id"]}})

    with pytest.raises(InvalidSpec, match="samples no groups"):
        await client.call("POST", "/v1/experiments", body=spec | {"data": {"from": taker["id"]}})
    with pytest.raises(InvalidSpec, match=r"rollout\.group_size is 3"):
        body = spec | {"data": {"from": created["id"]}, "rollout": {"group_size": 3}}
        await client.call("POST", "/v1/experiments", body=body)
    await client.call("DELETE", f"/v1/experiments/{created['id']}")
    with pytest.raises(NotFound):
        await client.call("POST", f"/v1/experiments/{taker['id']}/start")
