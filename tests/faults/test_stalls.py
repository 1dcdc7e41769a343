"""Processes that stand still without dying: each is named on the experiment, and forgotten once it goes on."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from shared.client import GatewayClient
from tests.faults.test_kill import patiently, until_step
from tests.fleet import RunningFleet, make_experiment, running_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

STALL_SECONDS = 5
NAMED_SECONDS = 60
ANSWER_SECONDS = 5
"""Less than the gateway waits for a data plane that does not answer."""
PATIENCE_SECONDS = 240
VICTIMS = (
    ("services.rollout.engines.process.child", "rollout", ""),
    ("services.reward", "reward", ""),
    ("services.trainer.worker", "trainer", ""),
    ("valkey-server", "redis", "the data plane does not answer"),
)
"""Program, the component that is named, what the cause says."""


class Watch:
    """Asks for the diagnosis all the time, and keeps how long each answer took."""

    def __init__(self, client: GatewayClient, experiment_id: str) -> None:
        self._client = client
        self._path = f"/v1/experiments/{experiment_id}/diagnosis"
        self.seconds: list[float] = []
        self.problems: list[str | None] = []
        self.evidence: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            asked = time.monotonic()
            found = await self._client.call("GET", self._path, deadline_seconds=30)
            self.seconds.append(time.monotonic() - asked)
            problem = found["problem"] and found["problem"]["component"]
            if not self.problems or self.problems[-1] != problem:
                self.problems.append(problem)
            for name, value in found["evidence"].items():
                self.evidence[name] = max(value, self.evidence.get(name, 0.0))
            await asyncio.sleep(0.1)


@asynccontextmanager
async def stopped(fleet: RunningFleet, name: str) -> AsyncIterator[None]:
    """Stop every process of the fleet that runs a program, while the block lasts."""
    pids = fleet.pids(name)
    assert pids, f"nothing runs {name}"
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def until_seen(watch: Watch, component: str, num_before: int) -> None:
    """Wait until the diagnosis has the problem too, after so many others."""
    async with asyncio.timeout(NAMED_SECONDS):
        while component not in watch.problems[num_before:]:
            await asyncio.sleep(0.05)


async def until_problem(client: GatewayClient, experiment_id: str, component: str | None, seconds: float) -> Any:
    """Wait until this component, or none, is named; return the problem."""
    end, seen = time.monotonic() + seconds, []
    while True:
        view = await patiently(client, f"/v1/experiments/{experiment_id}")
        assert view["state"] == "running", view["problem"]
        problem = view["problem"]
        if (problem and problem["component"]) == component:
            return problem
        if problem not in seen:
            seen.append(problem)
        assert time.monotonic() < end, f"{component} was not named, but {seen}"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    "victims",
    [pytest.param((0, 3), id="rollout, redis"), pytest.param((1, 2), id="reward, trainer", marks=pytest.mark.long)],
)
async def test_who_stands_still_is_named_until_it_goes_on(tmp_path: Path, victims: tuple[int, ...]) -> None:
    spec = make_experiment(tmp_path, optimisation={"steps": 5000}, checkpoint={"every_steps": 5})
    with running_fleet(tmp_path / "fleet", FLOTILLA_STALL_SECONDS=str(STALL_SECONDS)) as fleet:
        async with fleet.client() as client:
            experiment_id = (await client.call("POST", "/v1/experiments", body=spec, deadline_seconds=60))["id"]
            path = f"/v1/experiments/{experiment_id}"
            await client.call("POST", f"{path}/start", deadline_seconds=60)
            await until_step(client, experiment_id, 3)
            watch = Watch(client, experiment_id)
            watching = asyncio.create_task(watch.run())
            for program, component, cause in (VICTIMS[index] for index in victims):
                await until_problem(client, experiment_id, None, NAMED_SECONDS)
                num_asked, num_seen = len(watch.seconds), len(watch.problems)
                async with stopped(fleet, program):
                    problem = await until_problem(client, experiment_id, component, NAMED_SECONDS)
                    assert cause in problem["cause"]
                    await until_seen(watch, component, num_seen)
                seconds = median(watch.seconds[num_asked:])
                assert seconds < ANSWER_SECONDS, "the diagnosis answers whoever stands still"
                step = (await patiently(client, path))["step"]
                await until_problem(client, experiment_id, None, NAMED_SECONDS)
                await until_step(client, experiment_id, step + 3)
            assert not watching.done(), watching
            watching.cancel()
            await client.call("POST", f"{path}/stop", deadline_seconds=60)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await patiently(client, path))["state"] != "stopped":
                    await asyncio.sleep(0.2)
            ledger = (await patiently(client, f"{path}/ledger"))["train"]

    assert max(watch.evidence[f"{hop}/oldest_seconds"] for hop in ("tasks", "generated", "scored")) > STALL_SECONDS
    assert ledger["balanced"]
    assert ledger["outstanding"] == ledger["planned"] == 0
    for kind in ("filtered", "dropped", "failed"):
        lengths = {reason: sum(found.values()) for reason, found in ledger["lengths"].get(kind, {}).items()}
        assert lengths == ledger[kind]
