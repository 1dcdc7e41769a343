"""Two experiments on one fleet: whatever happens to one, the other's data and its progress are untouched."""

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from flotilla.cli.redis_server import LocalRedis
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.streams.redis.connection import connect
from tests.fleet import make_experiment, running_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

MIB = 1024**2
ONE = {"min": 1, "max": 1}
BROKEN = "def score(sample):\n    raise RuntimeError('out of order')\n"
LASTING = {":tasks", ":generated", ":scored", ":ledger", ":state"}
"""Keys of an experiment at work; the others come and go with what they hold."""
MOST_SECONDS_WITHOUT_A_STEP = 30.0


class Watched:
    """The experiment that nothing may touch, watched all the time."""

    def __init__(self, client: GatewayClient, redis: Redis, experiment_id: str) -> None:
        self.client = client
        self.redis = redis
        self.id = experiment_id
        self.step = 0
        self.looks = 0
        self.moved_at = time.monotonic()
        self.longest_pause = 0.0
        self.slowest_answer = 0.0

    async def run(self) -> None:
        """Ask all the time: it progresses, its ledger balances, and it is never said to have a problem."""
        while True:
            started = time.monotonic()
            view = await self.client.call("GET", f"/v1/experiments/{self.id}", deadline_seconds=30)
            ledger = await self.client.call("GET", f"/v1/experiments/{self.id}/ledger", deadline_seconds=30)
            now = time.monotonic()
            self.slowest_answer = max(self.slowest_answer, now - started)
            assert (view["state"], view["problem"]) == ("running", None), view["problem"]
            assert ledger["train"]["balanced"]
            if view["step"] > self.step:
                self.step, self.moved_at = view["step"], now
            self.longest_pause = max(self.longest_pause, now - self.moved_at)
            assert self.longest_pause < MOST_SECONDS_WITHOUT_A_STEP
            self.looks += 1
            await asyncio.sleep(0.1)

    async def further(self, steps: int) -> None:
        """Wait until it has made some more steps."""
        goal = self.step + steps
        async with asyncio.timeout(120):
            while self.step < goal:
                await asyncio.sleep(0.1)


async def start(client: GatewayClient, spec: dict[str, Any]) -> str:
    view = await client.call("POST", "/v1/experiments", body=spec, params={"start": True}, deadline_seconds=60)
    return str(view["id"])


async def until(client: GatewayClient, experiment_id: str, condition: Any, seconds: float = 150) -> dict[str, Any]:
    """Wait until an experiment's view is as wanted."""
    end = time.monotonic() + seconds
    while True:
        view: dict[str, Any] = await client.call("GET", f"/v1/experiments/{experiment_id}", deadline_seconds=60)
        if condition(view):
            return view
        assert time.monotonic() < end, view
        await asyncio.sleep(0.1)


async def all_of(client: GatewayClient, path: str) -> list[dict[str, Any]]:
    """All pages of a list."""
    items: list[dict[str, Any]] = []
    after: dict[str, Any] = {}
    while True:
        page = await client.call("GET", path, params={"limit": 1000, **after})
        items += page["items"]
        if page["next"] is None:
            return items
        after = {"after": page["next"]}


async def keys_of(redis: Redis) -> dict[str, set[str]]:
    """All keys of the server by experiment; short-lived markers of ended claims are left out."""
    found: dict[str, set[str]] = {}
    async for key in redis.scan_iter(count=1000):
        tag, brace, name = key.decode().partition("}")
        assert brace and tag.startswith("{exp:"), f"a key of no experiment: {key!r}"
        if ":done:" not in name:
            found.setdefault(tag.removeprefix("{exp:"), set()).add(name)
    return found


async def kill_trainer_and_rollout(client: GatewayClient, experiment_id: str) -> None:
    for kind in ("trainer", "rollout"):
        services = (await client.call("GET", "/v1/services", params={"kind": kind}))["items"]
        mine = [each for each in services if each["experiment_id"] == experiment_id]
        os.kill(mine[0]["pid"], signal.SIGKILL)


async def end_and_delete(client: GatewayClient, redis: Redis, experiment_id: str) -> dict[str, Any]:
    """Bring an experiment to its end, delete it, and see that nothing of it is left; gives its last ledger."""
    view = await client.call("GET", f"/v1/experiments/{experiment_id}")
    if view["state"] not in {"failed", "stopped", "completed"}:
        await client.call("POST", f"/v1/experiments/{experiment_id}/stop")

    async def is_deleted() -> bool:
        view = await client.call("GET", f"/v1/experiments/{experiment_id}")
        if view["state"] not in {"failed", "stopped"} or view["services"]:
            return False
        await client.call("DELETE", f"/v1/experiments/{experiment_id}")
        return True

    ledger: dict[str, Any] = {}
    async with asyncio.timeout(90):
        while True:
            ledger = (await client.call("GET", f"/v1/experiments/{experiment_id}/ledger"))["train"]
            if await is_deleted():
                break
            await asyncio.sleep(0.2)
    assert experiment_id not in await keys_of(redis)
    return ledger


async def test_whatever_happens_to_one_experiment_leaves_the_other_untouched(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    alone = {"optimisation": {"steps": 50_000}, "checkpoint": {"every_steps": 5}}
    steady = make_experiment(tmp_path, name="steady", resources={"rollouts": ONE, "rewards": ONE}, **alone)
    other = {"resources": {"rollouts": {"min": 1, "max": 2}, "rewards": ONE, "stream_bytes": MIB}, **alone}
    killed = make_experiment(tmp_path, name="killed", **other)
    flood = make_experiment(tmp_path, name="flood", asynchrony={"staleness_threshold": 1e6}, **other)
    component = {"kind": "custom", "path": f"{tmp_path / 'broken.py'}:score"}
    failing = make_experiment(tmp_path, name="failing", **other)
    failing["reward"] = {"components": [component], "max_consecutive_failures": 4}

    with LocalRedis(tmp_path / "redis") as server:
        fleet_of = {"rollouts": 3, "trainers": 2, "rewards": 2}
        with running_fleet(tmp_path / "fleet", FLOTILLA_REDIS_URL=server.url, **fleet_of) as fleet:  # type: ignore[arg-type]
            redis = connect(server.url)
            async with fleet.client() as client, asyncio.TaskGroup() as tasks:
                first = await start(client, steady)
                await until(client, first, lambda view: view["step"] >= 1)
                watched = Watched(client, redis, first)
                watching = tasks.create_task(watched.run())
                served_by = (await client.call("GET", f"/v1/experiments/{first}"))["services"]

                second = await start(client, killed)
                await until(client, second, lambda view: view["step"] >= 2)
                await kill_trainer_and_rollout(client, second)
                at = (await client.call("GET", f"/v1/experiments/{second}"))["step"]
                await until(client, second, lambda view: view["step"] >= at + 6)
                await watched.further(2)
                ledger = await end_and_delete(client, redis, second)
                assert ledger["balanced"]

                third = await start(client, flood)
                view = await until(client, third, lambda view: (view["problem"] or {}).get("component") == "streams")
                assert "has reached resources.stream_bytes (1 MiB)" in view["problem"]["cause"]
                issued = (await client.call("GET", f"/v1/experiments/{third}/ledger"))["train"]["issued"]
                await watched.further(3)
                later = (await client.call("GET", f"/v1/experiments/{third}/ledger"))["train"]["issued"]
                assert later < issued + 2000 < 1e6, "the budget would admit millions"
                largest = max(
                    [await redis.memory_usage(f"{{exp:{third}}}:{hop}") or 0 for hop in ("tasks", "generated")]
                )
                assert largest < 1.5 * MIB
                ledger = await end_and_delete(client, redis, third)
                assert ledger["balanced"]

                fourth = await start(client, failing)
                view = await until(client, fourth, lambda view: view["state"] == "failed")
                assert view["problem"]["component"] == "reward"
                assert "out of order" in view["problem"]["cause"]
                await end_and_delete(client, redis, fourth)
                await watched.further(2)

                now = await keys_of(redis)
                assert set(now) == {first}
                assert now[first] >= LASTING
                watching.cancel()
                view = await client.call("GET", f"/v1/experiments/{first}")
                assert view["services"] == served_by, "nobody else ever served it"
                await client.call("POST", f"/v1/experiments/{first}/stop")
                view = await until(client, first, lambda view: view["state"] == "stopped")
                ledger = (await client.call("GET", f"/v1/experiments/{first}/ledger"))["train"]
                plans = [
                    await client.call("GET", f"/v1/experiments/{first}/steps/{n}") for n in range(1, view["step"] + 1)
                ]
                published = await all_of(client, f"/v1/experiments/{first}/publications")
            await redis.aclose()

    # Exact: each group is trained, or was in flight or behind the last checkpoint at the end.
    assert ledger["balanced"]
    assert (ledger["outstanding"], ledger["filtered"], ledger["failed"]) == (0, {}, {})
    assert set(ledger["dropped"]) <= {"experiment_ended", "no_checkpoint"}
    groups = Counter(group for plan in plans for group in plan["group_ids"])
    assert max(groups.values()) == 1
    assert len(groups) == 4 * len(plans)
    assert ledger["trained"] + ledger["planned"] + ledger["dropped"].get("no_checkpoint", 0) >= len(groups)
    assert set(groups) <= set(range(ledger["issued"]))
    committed = [each["version"] for each in published if each["phase"] == "committed"]
    assert committed == list(range(1, len(committed) + 1)) and len(committed) == view["policy_version"]
    # The members of its weight group were its own rollout and no other.
    assert {m["service_id"] for each in published for m in each["members"]} == set(served_by["rollout"])
    assert watched.looks > 50
    pause, answer = watched.longest_pause, watched.slowest_answer
    print(f"longest pause {pause:.1f} s, slowest answer {answer:.2f} s, {len(plans)} steps")
