"""Services on several hosts: a trainer of two nodes, one rank each, learns what one host's two ranks learn.

What it publishes reaches the rollouts of other hosts, adapters merged.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla.shared.net.authorisation.access import PassKey
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.weights.image.files import HOST_ID
from tests.faults.test_kill import until_completed, until_step
from tests.faults.test_ranks import NAMED_SECONDS, TOLERANCE, an_experiment, check_ledger, curve_of, start
from tests.fleet import ROOT, RunningFleet, running_fleet

FEW_STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(580)]


class SecondHost:
    """A service that says that it is on another host; a trainer is started again whenever it is gone."""

    def __init__(self, fleet: RunningFleet, data: Path, kind: ServiceKind) -> None:
        redis_url = json.loads((fleet.data / "fleet.json").read_text())["redis_url"]
        self._environment = {
            **os.environ,
            HOST_ID: data.name,
            "FLOTILLA_GATEWAY_URL": fleet.url,
            "FLOTILLA_TOKEN": PassKey(fleet.token).joining(kind),
            "FLOTILLA_REDIS_URL": redis_url,
            "FLOTILLA_DATA": str(data),
            "FLOTILLA_PORT": "0",
        }
        self._command = [sys.executable, "-P", "-m", f"flotilla.services.{kind.value}"]
        self._log = data.with_suffix(".log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def rank(self) -> psutil.Process:
        """Find its training process."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "flotilla.services.trainer.worker" in child.cmdline() and "RANK" in child.environ():
                    return child
        raise AssertionError("no rank runs on the second host")


@contextmanager
def second_host(fleet: RunningFleet, data: Path, kind: ServiceKind = ServiceKind.TRAINER) -> Iterator[SecondHost]:
    host = SecondHost(fleet, data, kind)
    try:
        yield host
    finally:
        host.process.send_signal(signal.SIGTERM)
        try:
            host.process.wait(20)
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()


async def until_said(client: GatewayClient, experiment_id: str, *phrases: str) -> float:
    """Wait until a training job's end is named with all these phrases; returns when."""
    causes = []
    async with asyncio.timeout(60):
        async for line in client.lines(f"/v1/experiments/{experiment_id}/events", headers={}, silence_seconds=30):
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "training_job_ended":
                causes.append(event["data"]["cause"])
                if all(phrase in causes[-1] for phrase in phrases):
                    return time.monotonic()
    raise AssertionError(causes)


async def compare(client: GatewayClient, expected: dict[Any, float], experiment_id: str) -> None:
    found = await curve_of(client, experiment_id)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), key


async def test_two_nodes_are_killed_and_learn_what_one_learns(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            alone = await start(client, an_experiment(tmp_path, ranks=2))
            await until_completed(client, alone)
            expected = await curve_of(client, alone)
            spec = an_experiment(tmp_path, ranks=2, nodes=2)
            several = await start(client, spec)
            with second_host(fleet, tmp_path / "second") as host:
                await until_step(client, several, 3)
                killed = time.monotonic()
                host.rank().kill()
                assert await until_said(client, several, "rank 1 of 2 was ended by SIGKILL") - killed < NAMED_SECONDS

                await until_step(client, several, 6)
                killed = time.monotonic()
                host.process.kill()
                host.process.wait()
                assert await until_said(client, several, "node 2 of 2", "is gone") - killed < NAMED_SECONDS
                host.start()

                await until_step(client, several, 9)
                killed = time.monotonic()
                fleet.kill("flotilla.services.trainer.worker")
                assert await until_said(client, several, "rank 0 of 2 was ended by SIGKILL") - killed < NAMED_SECONDS
                await until_completed(client, several)
                await compare(client, expected, several)
                await check_ledger(client, several, spec)


async def test_the_host_that_leads_is_lost_and_the_other_one_leads(tmp_path: Path) -> None:
    spec = an_experiment(tmp_path, ranks=2, nodes=2)
    # The rollout does not see the shared memory of the host that leads then.
    spec["asynchrony"]["publication"] = {"transport": "auto"}
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            experiment = await start(client, spec)
            with second_host(fleet, tmp_path / "second") as host:
                await until_step(client, experiment, 3)
                before = host.rank()
                killed = time.monotonic()
                fleet.kill("flotilla.services.trainer")
                named = await until_said(client, experiment, "node 1 of 2", "is gone")
                assert named - killed < NAMED_SECONDS
                await until_step(client, experiment, 6)
                assert not before.is_running()
                assert host.rank().environ()["RANK"] == "0"
                await until_completed(client, experiment)
                await check_ledger(client, experiment, spec)


async def test_adapters_of_two_hosts_reach_a_rollout_of_a_third_one(tmp_path: Path) -> None:
    publication = {"transport": "auto"}

    def adapted(rollouts: int, **parallelism: int) -> dict[str, Any]:
        spec = an_experiment(tmp_path, **parallelism)
        spec["model"]["lora"] = {"rank": 4}
        spec["asynchrony"]["publication"] = publication
        spec["optimisation"]["steps"] = FEW_STEPS
        spec["resources"] = {"rollouts": {"min": rollouts, "max": rollouts}}
        return spec

    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            alone = await start(client, adapted(1, ranks=2))
            await until_completed(client, alone)
            expected = await curve_of(client, alone)
            spec = adapted(2, ranks=2, nodes=2)
            with (
                second_host(fleet, tmp_path / "second"),
                second_host(fleet, tmp_path / "third", ServiceKind.ROLLOUT),
            ):
                several = await start(client, spec)
                await until_completed(client, several)
                published = await client.call("GET", f"/v1/experiments/{several}/publications")
            await compare(client, expected, several)
            await check_ledger(client, several, spec)

    assert [each["phase"] for each in published["items"]] == ["committed"] * FEW_STEPS
    for each in published["items"]:
        assert sorted(member["transport"] for member in each["members"]) == ["gloo", "shared_memory"]


async def watch_turns(client: GatewayClient, experiment_id: str, seen: set[tuple[str, str]]) -> None:
    """Look until cancelled who has the devices: never a trainer and a rollout at the same time."""
    while True:
        listed = await client.call("GET", "/v1/services", params={"limit": 100}, deadline_seconds=60)
        holders = {
            (each["kind"], each["service_id"])
            for each in listed["items"]
            if each["observed"]["experiment_id"] == experiment_id and (each["observed"]["device"] or {}).get("is_held")
        }
        assert len({kind for kind, _ in holders}) <= 1, holders
        seen |= holders
        await asyncio.sleep(0.02)


async def test_trainers_and_rollouts_of_two_hosts_take_turns_and_a_rank_is_killed(tmp_path: Path) -> None:
    def shared(**parallelism: int) -> dict[str, Any]:
        spec = an_experiment(tmp_path, **parallelism)
        spec["asynchrony"]["publication"] = {"transport": "auto"}
        spec["optimisation"]["steps"] = 6
        return spec

    seen: set[tuple[str, str]] = set()
    with running_fleet(tmp_path / "fleet") as fleet:
        async with fleet.client() as client:
            alone = await start(client, shared(ranks=2))
            await until_completed(client, alone)
            expected = await curve_of(client, alone)
            spec = shared(ranks=2, nodes=2)
            spec["resources"] = {"sharing": "time", "rollouts": {"min": 2, "max": 2}}
            with (
                second_host(fleet, tmp_path / "second") as host,
                second_host(fleet, tmp_path / "of" / "second", ServiceKind.ROLLOUT),
            ):
                several = await start(client, spec)
                watching = asyncio.create_task(watch_turns(client, several, seen))
                try:
                    await until_step(client, several, 2)
                    host.rank().kill()
                    await until_completed(client, several)
                    assert not watching.done(), await watching
                finally:
                    watching.cancel()
            await compare(client, expected, several)
            await check_ledger(client, several, spec)

    # Both trainers and both rollouts have had the devices.
    assert sorted(kind for kind, _ in seen) == ["rollout", "rollout", "trainer", "trainer"]
