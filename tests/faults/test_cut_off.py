"""Services that the gateway and Redis cannot reach for twenty seconds go on with all that they had loaded."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.netns.fleet import a_trial, three_hosts
from tests.netns.hosts import free_ports, relayed_hosts

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(280)]

CUT_SECONDS = 20.0
"""Above the leases: both services are given up meanwhile."""


async def test_rollout_and_trainer_are_cut_off_and_load_nothing_again(tmp_path: Path) -> None:
    ports = free_ports(2)
    with (
        relayed_hosts("hub", "sampler", "learner", ports=ports) as hosts,
        three_hosts(hosts, tmp_path, rollouts=("sampler",), trainers=("learner",), ports=(ports[0], ports[1])) as fleet,
    ):
        async with a_trial(fleet, tmp_path, transport="shared_memory") as watch:
            before = {host: fleet.loaded(host) for host in ("sampler", "learner")}
            ids = await watch.service_ids()

            hosts.cut(("sampler", "hub"), ("learner", "hub"))
            await asyncio.sleep(CUT_SECONDS)
            assert len(await watch.service_ids()) < len(ids), "they were not given up"
            hosts.cut()
            await watch.until_step_after(time.monotonic(), 60)

            assert {host: fleet.loaded(host) for host in ("sampler", "learner")} == before
            assert await watch.service_ids() == ids
