"""Each bottleneck is made in turn on one running fleet, and the diagnosis names it while it lasts.

So is a process that stands still without dying: it is named on the experiment, and forgotten once it goes on.
"""

import asyncio
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from flotilla.connection import FleetInfo
from flotilla.shared.net.client.client import GatewayClient
from tests.faults.test_kill import patiently, until_step
from tests.faults.trial import Trial, waited
from tests.fleet import RunningFleet, make_experiment, running_fleet
from tests.prometheus import parse_page, value_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(580)]

NAMED_SECONDS = 90
"""What a crowded machine may take; about 8 on one that is free."""
FAULTS = (
    "engine.step slow in=engine seconds=0.1 while=slow-generation",
    "reward.score slow in=reward seconds=2.5 while=slow-reward",
    "trainer.step slow in=trainer-worker seconds=4 while=slow-trainer",
    "weights.receive slow in=weights seconds=2.5 while=slow-publication",
)
"""Each many times as slow as all the rest of a step together, also where the rest is slow because the machine is."""
PAUSE_SECONDS = 0.5
STALL_SECONDS = 8
"""Longer than a step takes under any of the faults."""
ANSWER_SECONDS = 5
"""Less than the gateway waits for a data plane that does not answer."""
VICTIMS = (
    ("flotilla.services.rollout.engines.process.child", "rollout", ""),
    ("flotilla.services.reward", "reward", ""),
    ("flotilla.services.trainer.worker", "trainer", ""),
    ("valkey-server", "redis", "the data plane does not answer"),
)
"""Program, the component that is named, what the cause says."""

Evidence = Mapping[str, float]
IsShownBy = Callable[[Evidence], bool]
SWITCHED: Mapping[str, IsShownBy] = {
    "trainer": lambda e: e["trainer/wait_share"] < 0.15,
    "publication": lambda e: e["publication/holding_share"] > 0.5,
    "reward": lambda e: e["generated/groups"] > e["tasks/groups"] and e["generated/oldest_seconds"] > 0.2,
    "generation": lambda e: e["rollout/idle_share"] < 0.15 < e["trainer/wait_share"] and e["tasks/groups"] > 1,
}
"""What the evidence has to show for each; in an order in which the steps of one soon outlast those before."""


def keeps_the_stages_apart(evidence: Evidence) -> bool:
    """Whether the budget is used up, and trainer and rollouts wait in turn."""
    return (
        evidence["admission/full_share"] > 0.5
        and evidence["rollout/idle_share"] > 0.15
        and evidence["trainer/wait_share"] > 0.15
    )


@asynccontextmanager
async def slow_server(fleet: RunningFleet) -> AsyncIterator[None]:
    """Let the Redis server answer half a second late, most of the time."""

    async def pause() -> None:
        while True:
            await redis.execute_command("CLIENT", "PAUSE", round(1000 * PAUSE_SECONDS), "ALL")
            await asyncio.sleep(PAUSE_SECONDS + 0.01)

    async with Redis.from_url(FleetInfo.read(fleet.data).redis_url) as redis:
        pausing = asyncio.create_task(pause())
        try:
            yield
            assert not pausing.done(), pausing
        finally:
            pausing.cancel()
            await asyncio.wait([pausing])


async def until_named(trial: Trial, component: str, is_shown_by: IsShownBy) -> None:
    """Wait until the diagnosis names a component and its evidence shows it: the window may hold older looks, too."""
    asked, seen = time.monotonic(), []
    while True:
        found: dict[str, Any] = await trial.client.call("GET", f"{trial.path}/diagnosis", deadline_seconds=30)
        evidence: Evidence = defaultdict(lambda: math.nan, found["evidence"])
        if found["component"] == component and is_shown_by(evidence):
            print(f"{component} was named after {time.monotonic() - asked:.1f} s: {found['cause']}")
            assert found["cause"] and found["advice"]
            return
        if found["cause"] not in seen:
            seen.append(found["cause"])
        assert time.monotonic() < asked + NAMED_SECONDS, f"{component} was not shown, but {seen}; last {found}"
        await asyncio.sleep(0.2)


async def page_names(fleet: RunningFleet, trial: Trial, component: str) -> bool:
    """Whether the gateway's page for Prometheus names it too, and counts the lags and the waits meanwhile."""
    headers = {"Authorization": f"Bearer {fleet.token}"}
    async with httpx.AsyncClient(base_url=fleet.url, headers=headers, timeout=30) as http:
        series = parse_page((await http.get("/metrics")).text)
    return bool(
        value_of(series, "flotilla_experiment_trained_token_lag_count", experiment=trial.id)
        and value_of(series, "flotilla_experiment_admission_wait_seconds_total", experiment=trial.id)
        and value_of(series, "flotilla_experiment_stream_oldest_seconds", experiment=trial.id, stream="tasks")
        is not None
        and value_of(series, "flotilla_experiment_bottleneck", experiment=trial.id, component=component) == 1
    )


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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diagnosed")


@pytest.fixture(scope="module")
def fleet(directory: Path) -> Iterator[RunningFleet]:
    faults = "; ".join([f"marks={directory / 'marks'}", *FAULTS])
    environment = {"FLOTILLA_FAULTS": faults, "FLOTILLA_STALL_SECONDS": str(STALL_SECONDS)}
    with running_fleet(directory / "fleet", **environment) as running:
        yield running


@pytest.fixture(scope="module")
def view(fleet: RunningFleet, directory: Path) -> dict[str, Any]:
    """An experiment under way. On-policy, nothing overlaps: unless something is slow, admission keeps stages apart."""
    spec = make_experiment(
        directory,
        optimisation={"steps": 100_000},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain", "publication": {"transport": "gloo"}},
        checkpoint={"every_steps": 1000},
    )

    async def started() -> dict[str, Any]:
        async with fleet.client() as client:
            trial = await Trial.start(fleet, client, spec)
            return await until_step(client, trial.id, 1)

    return asyncio.run(started())


@pytest.mark.parametrize(
    "components",
    [
        pytest.param(("reward", "generation"), id="reward, generation"),
        pytest.param(("trainer", "publication"), id="trainer, publication"),
    ],
)
async def test_each_bottleneck_is_named_while_it_lasts(
    fleet: RunningFleet, view: dict[str, Any], directory: Path, components: tuple[str, ...]
) -> None:
    async with fleet.client() as client:
        trial = Trial(fleet, client, view)
        await until_named(trial, "admission", keeps_the_stages_apart)
        for component in components:
            switch = directory / "marks" / f"slow-{component}"
            switch.touch()
            await until_named(trial, component, SWITCHED[component])
            await waited(partial(page_names, fleet, trial, component), NAMED_SECONDS, f"{component} on the page")
            switch.unlink()
        async with slow_server(fleet):
            await until_named(trial, "redis", lambda e: e["redis/round_trip_seconds"] > 0.1)


@pytest.mark.parametrize(
    "victims",
    [pytest.param((0, 3), id="rollout, redis"), pytest.param((1, 2), id="reward, trainer")],
)
async def test_who_stands_still_is_named_until_it_goes_on(
    fleet: RunningFleet, view: dict[str, Any], victims: tuple[int, ...]
) -> None:
    experiment_id = view["id"]
    async with fleet.client() as client:
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
            step = (await patiently(client, f"/v1/experiments/{experiment_id}"))["step"]
            await until_problem(client, experiment_id, None, NAMED_SECONDS)
            await until_step(client, experiment_id, step + 3)
        assert not watching.done(), watching
        watching.cancel()

    assert max(watch.evidence[f"{hop}/oldest_seconds"] for hop in ("tasks", "generated", "scored")) > STALL_SECONDS


async def test_the_ledger_accounts_for_all_that_was_slow_or_stood_still(
    fleet: RunningFleet, view: dict[str, Any]
) -> None:
    async with fleet.client() as client:
        trial = Trial(fleet, client, view)
        await trial.stop()
        ledger = (await patiently(client, f"{trial.path}/ledger"))["train"]

    assert ledger["balanced"]
    assert ledger["outstanding"] == ledger["planned"] == 0
    for kind in ("filtered", "dropped", "failed"):
        lengths = {reason: sum(found.values()) for reason, found in ledger["lengths"].get(kind, {}).items()}
        assert lengths == ledger[kind]
