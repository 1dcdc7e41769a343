"""A trainer of two nodes on two hosts: one is out of reach for a while, and training goes on."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.fleet import ThreeHosts, a_trial, three_hosts
from tests.netns.hosts import Hosts, both_ways, hosts

pytestmark = [pytest.mark.netns, pytest.mark.timeout(880)]

NAMED_SECONDS = 15.0
FORMED_SECONDS = 180.0
"""From the mend to the next step: two processes import torch, on cores that all hosts share."""
NODES = {"ranks": 2, "nodes": 2}


@pytest.fixture
def network() -> Iterator[Hosts]:
    with hosts("hub", "sampler", "learner", "second") as made:
        yield made


@pytest.fixture
def fleet(network: Hosts, tmp_path: Path) -> Iterator[ThreeHosts]:
    with three_hosts(network, tmp_path, rollouts=("sampler",), trainers=("learner", "second")) as made:
        yield made


async def test_a_trainer_of_two_hosts_outlives_the_loss_of_one(fleet: ThreeHosts, tmp_path: Path) -> None:
    second = fleet.hosts.address("second")
    async with a_trial(fleet, tmp_path, transport="auto", parallelism=NODES) as watch:
        cut_at = time.monotonic()
        fleet.hosts.cut(*both_ways("second", "hub", "sampler", "learner"))
        await asyncio.sleep(20)
        fleet.hosts.cut()
        mended = await watch.until_step_after(time.monotonic(), FORMED_SECONDS)
        named = [when - cut_at for when, cause in watch.causes if second in cause]
        print(f"\nnamed after {min(named, default=-1):.1f} s, next step {mended:.1f} s after the mend; {watch.causes}")
        assert min(named, default=NAMED_SECONDS + 1) <= NAMED_SECONDS, watch.causes
