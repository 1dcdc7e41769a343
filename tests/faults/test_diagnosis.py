"""Each bottleneck is made in turn on one running fleet, and the diagnosis names it while it lasts."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from cli.fleet import FleetInfo
from tests.faults.test_kill import until_step
from tests.faults.trial import Trial, waited
from tests.fleet import RunningFleet, make_experiment, running_fleet
from tests.prometheus import parse_page, value_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMED_SECONDS = 40
"""What a crowded machine may take; about 8 on one that is free."""
FAULTS = (
    "engine.step slow in=engine seconds=0.04 while=slow-generation",
    "reward.score slow in=reward seconds=0.8 while=slow-reward",
    "trainer.step slow in=trainer-worker seconds=2 while=slow-trainer",
    "weights.receive slow in=weights seconds=1 while=slow-publication",
)
PAUSE_SECONDS = 0.5

Evidence = Mapping[str, float]
SWITCHED: Mapping[str, Callable[[Evidence], bool]] = {
    "generation": lambda e: e["rollout/idle_share"] < 0.15 < e["trainer/wait_share"] and e["tasks/groups"] > 1,
    "reward": lambda e: e["generated/groups"] > e["tasks/groups"] and e["generated/oldest_seconds"] > 0.2,
    "trainer": lambda e: e["trainer/wait_share"] < 0.15,
    "publication": lambda e: e["publication/holding_share"] > 0.5,
}
"""What the evidence has to show for each."""


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


async def until_named(trial: Trial, component: str) -> Evidence:
    """Wait until the diagnosis names a component; give its evidence."""
    asked, seen = time.monotonic(), []
    while True:
        found: dict[str, Any] = await trial.client.call("GET", f"{trial.path}/diagnosis", deadline_seconds=30)
        if found["component"] == component:
            print(f"{component} was named after {time.monotonic() - asked:.1f} s: {found['cause']}")
            assert found["cause"] and found["advice"]
            evidence: Evidence = found["evidence"]
            return evidence
        if found["cause"] not in seen:
            seen.append(found["cause"])
        assert time.monotonic() < asked + NAMED_SECONDS, f"{component} was not named, but {seen}"
        await asyncio.sleep(0.2)


async def page_names(fleet: RunningFleet, trial: Trial, component: str) -> bool:
    """Whether the gateway's page for Prometheus names it too, and counts the lags and the waits meanwhile."""
    async with httpx.AsyncClient(base_url=fleet.url) as http:
        series = parse_page((await http.get("/metrics")).text)
    assert value_of(series, "flotilla_experiment_trained_token_lag_count", experiment=trial.id)
    assert value_of(series, "flotilla_experiment_admission_wait_seconds_total", experiment=trial.id)
    assert (
        value_of(series, "flotilla_experiment_stream_oldest_seconds", experiment=trial.id, stream="tasks") is not None
    )
    return value_of(series, "flotilla_experiment_bottleneck", experiment=trial.id, component=component) == 1


async def test_each_bottleneck_is_named_while_it_lasts(tmp_path: Path) -> None:
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
            evidence = await until_named(trial, "admission")
            assert evidence["admission/full_share"] > 0.5
            assert evidence["rollout/idle_share"] > 0.15 < evidence["trainer/wait_share"]
            for component, is_shown_by in SWITCHED.items():
                switch = marks / f"slow-{component}"
                switch.touch()
                evidence = await until_named(trial, component)
                await waited(partial(page_names, fleet, trial, component), NAMED_SECONDS, f"{component} on the page")
                switch.unlink()
                assert is_shown_by(evidence), (component, evidence)
            async with slow_server(fleet):
                evidence = await until_named(trial, "redis")
            assert evidence["redis/round_trip_seconds"] > 0.1
