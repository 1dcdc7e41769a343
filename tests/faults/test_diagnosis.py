"""Each bottleneck is made in turn on one running fleet, and the diagnosis names it while it lasts."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from flotilla.connection import FleetInfo
from tests.faults.test_kill import until_step
from tests.faults.trial import Trial, waited
from tests.fleet import RunningFleet, make_experiment, running_fleet
from tests.prometheus import parse_page, value_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

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


@pytest.mark.parametrize(
    "components",
    [
        pytest.param(("reward", "generation"), id="reward, generation"),
        pytest.param(("trainer", "publication"), id="trainer, publication", marks=pytest.mark.long),
    ],
)
async def test_each_bottleneck_is_named_while_it_lasts(tmp_path: Path, components: tuple[str, ...]) -> None:
    """On-policy, nothing overlaps: unless something is slow, admission keeps the stages apart."""
    spec = make_experiment(
        tmp_path,
        optimisation={"steps": 100_000},
        asynchrony={"staleness_threshold": 0.0, "on_weight_update": "drain", "publication": {"transport": "gloo"}},
        checkpoint={"every_steps": 1000},
    )
    marks = tmp_path / "marks"
    with running_fleet(tmp_path / "fleet", FLOTILLA_FAULTS="; ".join([f"marks={marks}", *FAULTS])) as fleet:
        async with fleet.client() as client:
            trial = await Trial.start(fleet, client, spec)
            await until_step(client, trial.id, 1)
            await until_named(trial, "admission", keeps_the_stages_apart)
            for component in components:
                switch = marks / f"slow-{component}"
                switch.touch()
                await until_named(trial, component, SWITCHED[component])
                await waited(partial(page_names, fleet, trial, component), NAMED_SECONDS, f"{component} on the page")
                switch.unlink()
            async with slow_server(fleet):
                await until_named(trial, "redis", lambda e: e["redis/round_trip_seconds"] > 0.1)
