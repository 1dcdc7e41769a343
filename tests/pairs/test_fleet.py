"""Each row of the fleet's table is trained to its end over its event; no task is lost, counted twice or left over."""

import asyncio
import copy
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.redis_server import LocalRedis
from flotilla.services.gateway.settings import GatewaySettings
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import WorkState
from flotilla.shared.streams.hop import StreamsConfig
from tests.integration.gateway.fleet import (
    TOKEN,
    LentRollout,
    Scripted,
    ScriptedReward,
    ScriptedRollout,
    ScriptedTrainer,
    a_gateway,
    a_spec,
    until,
)
from tests.integration.gateway.test_faults import wait_for
from tests.pairs.covering import Row, covering_rows
from tests.pairs.documents import changes_of, document_of
from tests.pairs.table import FLEET, FLEET_STATES, HELD

pytestmark = pytest.mark.long

STEPS, GROUPS, HELD_ROWS = 4, 2, 3
EVALUATED = {"none": 0, "of each version": 2 * HELD_ROWS, "of sets, sampled": HELD_ROWS + 2}
LEASES = StreamsConfig(lease_seconds=8.0)
"""Claims of before a lost tail are waited for as long as this, once for each hop."""
UNTIL_STEP = 2
"""The event finds the experiment with so many steps, and its trainer waits until it is over."""
ROWS = covering_rows({name: list(values) for name, values in FLEET.items()}, FLEET_STATES.values())


@dataclass
class Fleet:
    """Scripted services around a gateway, and an experiment on it."""

    url: str
    folder: Path
    server: LocalRedis
    client: GatewayClient
    stack: AsyncExitStack
    num_evaluated: int
    """Groups of the evaluations before ``UNTIL_STEP``."""
    path: str = ""
    rollouts: list[ScriptedRollout] = field(default_factory=list)
    rewards: list[ScriptedReward] = field(default_factory=list)
    trainers: list[ScriptedTrainer] = field(default_factory=list)

    async def join(self, kind: type[Scripted]) -> Any:
        """Let a service join."""
        joined = await self.stack.enter_async_context(kind(self.url, self.server.url))
        if kind is not ScriptedTrainer:  # which holds what it claims until a step is full
            joined.streams = LEASES
        for each, members in (
            (ScriptedRollout, self.rollouts),
            (ScriptedReward, self.rewards),
            (ScriptedTrainer, self.trainers),
        ):
            if isinstance(joined, each):
                members.append(joined)  # type: ignore[attr-defined]
        return joined

    async def may_go_on(self) -> bool:
        """Whether all groups of the step that the trainer waits for are there, and what was to be evaluated is."""
        ledgers = await self.ledgers()
        train, evaluation = ledgers["train"], ledgers["evaluation"]
        scored = train["waiting"]["scored"] + train["claimed"]["scored"]
        return bool(scored >= GROUPS and evaluation["trained"] >= self.num_evaluated)

    async def ledgers(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.client.call("GET", f"{self.path}/ledger")
        return found


async def nothing(fleet: Fleet) -> None:
    """Let the fleet be."""


async def pause(fleet: Fleet) -> None:
    await fleet.client.call("POST", f"{fleet.path}/pause")
    await wait_for(fleet.client, fleet.path, "paused")
    await fleet.client.call("POST", f"{fleet.path}/resume")


async def rollout_joins(fleet: Fleet) -> None:
    joined = await fleet.join(ScriptedRollout)
    await until(lambda: joined.state is WorkState.RUNNING)


async def rollout_dies(fleet: Fleet) -> None:
    await rollout_joins(fleet)
    await fleet.rollouts.pop(0).die()


async def reward_dies(fleet: Fleet) -> None:
    await fleet.rewards.pop(0).die()
    await fleet.join(ScriptedReward)


async def trainer_dies(fleet: Fleet) -> None:
    second = await fleet.join(ScriptedTrainer)
    await fleet.trainers[0].die()
    await until(lambda: second.experiment_id is not None)


async def redis_dies(fleet: Fleet) -> None:
    fleet.server.kill()
    await asyncio.to_thread(fleet.server.start)


async def log_loses_its_tail(fleet: Fleet) -> None:
    [log] = (fleet.folder / "redis" / "appendonlydir").glob("*.incr.aof")
    size = log.stat().st_size
    for each in fleet.rollouts:
        each.is_stuck = False
    await until(lambda: log.stat().st_size > size)
    fleet.server.kill()
    os.truncate(log, size)
    await asyncio.to_thread(fleet.server.start)


EVENTS: Mapping[str, Callable[[Fleet], Awaitable[None]]] = {
    "none": nothing,
    "paused": pause,
    "a rollout joins": rollout_joins,
    "a rollout dies": rollout_dies,
    "a reward dies": reward_dies,
    "the trainer dies": trainer_dies,
    "redis dies": redis_dies,
    "the log loses its tail": log_loses_its_tail,
}


def spec_of(row: Row, folder: Path) -> dict[str, Any]:
    """Make the spec of a row as a client writes it."""
    usual = a_spec(folder, optimisation={"steps": STEPS, "groups_per_mini_batch": GROUPS})
    places = {HELD: str(folder / "heldout.jsonl")}
    changed = copy.deepcopy(document_of(changes_of(row, FLEET)))
    sets = changed.get("evaluation", {}).get("sets", ())
    for each in [changed.get("evaluation", {}), *sets]:
        if "path" in each:
            each["path"] = places[each["path"]]
    return {
        **usual,
        **{
            name: {**usual.get(name, {}), **section} if isinstance(section, dict) else section
            for name, section in changed.items()
        },
    }


async def subscribe(fleet: Fleet, source: str) -> tuple[str, ScriptedTrainer]:
    """Start another experiment on the groups of one that has not begun, with a trainer of its own; return its path."""
    trainer: ScriptedTrainer = await fleet.stack.enter_async_context(ScriptedTrainer(fleet.url, fleet.server.url))
    usual = a_spec(fleet.folder, optimisation={"steps": STEPS, "groups_per_mini_batch": GROUPS})
    body = {**usual, "name": "subscriber", "data": {"from": source}}
    created = await fleet.client.call("POST", "/v1/experiments", body=body, params={"start": True})
    path = f"/v1/experiments/{created['id']}"
    await wait_for(fleet.client, path, "running")
    return path, trainer


def marks_of(row: Row) -> list[pytest.MarkDecorator]:
    """Claims of before a lost tail are waited for as long as leases last."""
    return [pytest.mark.slow] if row["event"] == "the log loses its tail" else []


@pytest.mark.parametrize("row", [pytest.param(row, marks=marks_of(row), id=str(n)) for n, row in enumerate(ROWS)])
async def test_every_task_is_accounted_for_whatever_happens_to_the_fleet(row: Row, tmp_path: Path) -> None:
    print(row)
    async with AsyncExitStack() as stack:
        server = stack.enter_context(LocalRedis(tmp_path / "redis"))
        settings = GatewaySettings(
            token=TOKEN,
            redis_url=server.url,
            data=tmp_path / "data",
            lease_seconds=2.0,
            rest_seconds=1.0,
            grace_seconds=8.0,
            publication_seconds=1.5,
            teardown_seconds=5.0,
            heartbeat_seconds=0.2,
        )
        url, _ = await stack.enter_async_context(a_gateway(settings))
        client = await stack.enter_async_context(GatewayClient(url, TOKEN))
        fleet = Fleet(url, tmp_path, server, client, stack, EVALUATED[row["evaluation"]])
        created = await client.call("POST", "/v1/experiments", body=spec_of(row, tmp_path))
        fleet.path = f"/v1/experiments/{created['id']}"
        subscriber = await subscribe(fleet, created["id"]) if row["subscriber"] == "one" else None
        kinds: list[type[Scripted]] = [ScriptedRollout, ScriptedReward, ScriptedTrainer]
        for kind in kinds + [ScriptedRollout] * (row["rollouts"] == "two"):
            await fleet.join(kind)
        if row["turns"] == "lent":
            await fleet.join(LentRollout)
        trainer = fleet.trainers[0]
        trainer.waits_before = UNTIL_STEP
        await client.call("POST", f"{fleet.path}/start")
        await until(fleet.may_go_on)
        for each in fleet.rollouts:
            each.is_stuck = row["event"] == "the log loses its tail"
        trainer.waits_before = UNTIL_STEP + 1
        await until(lambda: trainer.step == UNTIL_STEP)

        await EVENTS[row["event"]](fleet)
        trainer.waits_before = None

        view = await wait_for(client, fleet.path, "completed", "failed")
        ledgers = await fleet.ledgers()
        metrics = (await client.call("GET", f"{fleet.path}/metrics", params={"limit": 1000}))["items"]
        if subscriber is not None:
            its_view = await wait_for(client, subscriber[0], "completed", "stopped", "failed")
            of_subscriber = (await client.call("GET", f"{subscriber[0]}/ledger"))["train"]
            assert its_view["state"] == "completed", (of_subscriber, subscriber[1].trained, its_view["problem"])
            assert of_subscriber["balanced"] and of_subscriber["trained"] == STEPS * GROUPS
            theirs = [group for step in subscriber[1].trained for group in step]
            assert len(theirs) == len(set(theirs)) == STEPS * GROUPS
    assert view["state"] == "completed", view["problem"]
    assert view["step"] == STEPS
    for lane in ("train", "evaluation"):
        assert ledgers[lane]["balanced"] and ledgers[lane]["outstanding"] == 0
    assert ledgers["train"]["trained"] == STEPS * GROUPS
    groups = [group for each in fleet.trainers for step in each.trained for group in step]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    turns = [shift for each in fleet.trainers for shift in each.turns]
    assert (len(turns) >= STEPS and all(shift % 2 for shift in turns)) if row["turns"] != "none" else turns == []
    accuracy = {each["version"]: each["value"] for each in metrics if each["name"] == "evaluation/accuracy"}
    if row["evaluation"] == "none":
        assert accuracy == {} and ledgers["evaluation"]["issued"] == 0
    else:
        assert {0, STEPS} <= accuracy.keys()
        assert set(accuracy.values()) == {0.5 if row["evaluation"] == "of sets, sampled" else 1.0}
