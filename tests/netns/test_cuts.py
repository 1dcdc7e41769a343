"""Hosts that lose each other for a while: nothing is loaded again, the next step comes soon, nobody counts twice."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import ROOT
from tests.netns.fleet import ThreeHosts, a_trial, three_hosts
from tests.netns.hosts import Hosts, both_ways, hosts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(880)]

STEP_SECONDS, ONE_WAY_STEP_SECONDS = 5.0, 10.0
"""From the mend to the next step."""
NAMED_SECONDS = 15.0
CUTS = {
    "the rollout": both_ways("sampler", "hub", "learner"),
    "the trainer": both_ways("learner", "hub", "sampler"),
    "from the rollout": [("sampler", "hub"), ("sampler", "learner")],
    "to the rollout": [("hub", "sampler"), ("learner", "sampler")],
    "from the trainer": [("learner", "hub"), ("learner", "sampler")],
    "to the trainer": [("hub", "learner"), ("sampler", "learner")],
}


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    with hosts("hub", "sampler", "learner") as made:
        yield made


@pytest.fixture(scope="module")
def fleet(network: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeHosts]:
    folder = tmp_path_factory.mktemp("fleet")
    with three_hosts(network, folder, rollouts=("sampler",), trainers=("learner",)) as made:
        yield made


@pytest.fixture
def folder(fleet: ThreeHosts, tmp_path: Path) -> Path:
    found = fleet.folder / tmp_path.name
    found.mkdir()
    return found


@pytest.mark.parametrize("seconds", [8, 20, 40])
@pytest.mark.parametrize("what", CUTS)
async def test_a_cut_costs_its_length_and_no_more(fleet: ThreeHosts, folder: Path, what: str, seconds: float) -> None:
    async with a_trial(fleet, folder, transport="auto") as watch:
        before = {host: fleet.loaded(host) for host in ("sampler", "learner")}
        assert all(before.values()), before
        cut_at = time.monotonic()
        fleet.hosts.cut(*CUTS[what])
        await asyncio.sleep(seconds)
        fleet.hosts.cut()

        took = await watch.until_step_after(time.monotonic(), 120)

        lost = fleet.hosts.address("sampler" if "rollout" in what else "learner")
        named = [when - cut_at for when, cause in watch.causes if f"no contact with {lost}" in cause]
        assert seconds < 20 or min(named, default=seconds) <= NAMED_SECONDS, watch.causes
        after = {host: fleet.loaded(host) for host in ("sampler", "learner")}
        told = f"next step after {took:.1f} s; named after {min(named, default=-1):.1f} s; kept {before == after}"
        print(f"\n{what}, {seconds} s: {told}; {watch.reads} reads of the ledger; {watch.causes}")
        assert after == before, "something was loaded again"
        assert took < (STEP_SECONDS if "the" in what.split()[0] else ONE_WAY_STEP_SECONDS)


async def examine(fleet: ThreeHosts) -> tuple[int, dict[str, Any]]:
    """Run ``flotilla doctor --fleet --json`` where the gateway is reached."""
    command = [sys.executable, "-m", "flotilla", "doctor", "--fleet", "--json", "--gateway", fleet.url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "FLOTILLA_TOKEN": fleet.token}, cwd=ROOT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, json.loads(output)


async def test_the_doctor_names_the_hosts_of_a_cut(fleet: ThreeHosts) -> None:
    sampler, learner = fleet.hosts.address("sampler"), fleet.hosts.address("learner")
    async with fleet.client() as client, asyncio.timeout(300):
        while len((await client.call("GET", "/v1/services", deadline_seconds=60))["items"]) < 3:
            await asyncio.sleep(0.2)
    whole = await examine(fleet)
    fleet.hosts.cut(*both_ways("sampler", "learner"))
    between = await examine(fleet)
    fleet.hosts.cut(*both_ways("sampler", "hub"))
    away = await examine(fleet)
    fleet.hosts.cut()

    print(whole, between, away, sep="\n")
    assert [each for each in whole[1]["findings"] if each["verdict"] == "failed"] == [] and whole[0] == 0
    failed = [each for each in between[1]["findings"] if each["verdict"] == "failed"]
    assert between[0] == 1 and {each["topic"] for each in failed} == {"reachability"}
    assert {each["host"] for each in failed} == {sampler, learner}
    assert all(sampler in each["tried"] and learner in each["tried"] for each in failed), failed
    assert away[0] == 1
    assert any(f"no contact with {sampler}" in each["found"] for each in away[1]["findings"]), away


async def test_a_slow_network_that_loses_packets_gives_nobody_up(fleet: ThreeHosts, folder: Path) -> None:
    async with a_trial(fleet, folder, transport="auto") as watch:
        before, ids = {host: fleet.loaded(host) for host in ("sampler", "learner")}, await watch.service_ids()
        fleet.hosts.slow(0.1, 0.01)

        await watch.until_step(watch.steps[-1][1] + 4, 150)

        assert {host: fleet.loaded(host) for host in ("sampler", "learner")} == before
        assert await watch.service_ids() == ids
