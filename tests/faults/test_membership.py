"""Rollouts that die, join and are slow, in fleets that train by gloo meanwhile.

What a test of parts cannot show: how long the survivors of a ``kill -9`` wait for the next version.
Durations are printed (``-s``); those of docs/elasticity.md come from here.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from flotilla.connection import FleetInfo
from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.streams.codec import EntryHeader
from flotilla.shared.streams.hop import CONSUMER_GROUP, HopName, StreamKeys
from tests.faults.test_kill import watch_balance
from tests.faults.trial import (
    ENGINE,
    PATIENCE_SECONDS,
    SLOW_ENGINE,
    Trial,
    check_what_was_trained,
    joining,
    report,
    two_rollouts,
    waited,
)
from tests.fleet import RunningFleet, hold_back, make_experiment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEXT_VERSION_SECONDS = 10.0
"""From a kill to the next version on all survivors."""
ATTEMPTS = 3
SLOW_RECEIVE = "weights.receive slow in=weights slices=0 seconds=3 times=1"
NEEDED_GROUPS = 3
"""Of the six that are under way at a time: the other three do not make a step, which takes four."""


async def watch_streams(redis_url: str, experiment_id: str, claimed: dict[int, str], oldest: dict[int, int]) -> None:
    """Note all the time who samples which group, and the oldest version that sampled each."""
    keys = StreamKeys(experiment_id)
    tasks = keys.stream(HopName.TASKS)
    async with Redis.from_url(redis_url) as redis:
        while True:
            try:
                held = await redis.xpending_range(tasks, CONSUMER_GROUP, "-", "+", 200)
            except ResponseError:
                held = []  # the stream is made with the first task
            holders = {entry["message_id"]: entry["consumer"].decode() for entry in held}
            for entry_id, content in await redis.xrange(tasks):
                if entry_id in holders:
                    claimed[EntryHeader.from_bytes(content[b"header"]).group_id] = holders[entry_id]
            for hop in (HopName.GENERATED, HopName.SCORED):
                for _, content in await redis.xrange(keys.stream(hop)):
                    header = EntryHeader.from_bytes(content[b"header"])
                    oldest[header.group_id] = header.oldest_version
            await asyncio.sleep(0.02)


@pytest.mark.long
async def test_rollouts_die_join_and_are_slow(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    slow_receive = marks / "1-1"
    slow_receive.touch()  # As if it had happened: the fault is armed when the mark is removed.
    data = tmp_path / "fleet"
    balanced: list[bool] = []
    with two_rollouts(data, f"marks={marks}; {SLOW_RECEIVE}; {ENGINE}") as fleet:
        async with fleet.client() as client:
            trial = await dies_during_first_formation(fleet, client, tmp_path)
            watching = asyncio.create_task(watch_balance(client, trial.id, balanced))
            trainer = fleet.pids("flotilla.services.trainer.worker")
            with joining(data, tmp_path / "slow.log", FLOTILLA_FAULTS=SLOW_ENGINE) as slow:
                await joins_and_is_slow(trial, slow.pid)
                await dies_around_broadcasts(trial, slow.pid, slow_receive)
                assert fleet.pids("flotilla.services.trainer.worker") == trainer
                await trial.stop()
            watching.cancel()
            await check_what_was_trained(trial)
            released = await trial.num_released()

    assert released, "the dead held claims, which nobody waited for"
    print(f"{released} claims of the dead were released")
    assert len(balanced) > 50
    assert all(balanced)


def short_completions(directory: Path) -> dict[str, Any]:
    """Many quick versions."""
    return make_experiment(
        directory, optimisation={"steps": 100_000}, asynchrony={"publication": {"transport": "gloo"}}
    )


async def dies_during_first_formation(fleet: RunningFleet, client: GatewayClient, directory: Path) -> Trial:
    """The endpoint of one rollout is stopped, so that the first group cannot form; then the rollout is killed.

    Gives the experiment that goes on.
    """
    seconds: list[float] = []
    while True:
        spec = short_completions(directory)
        hold = hold_back(spec, directory, after_step=0)
        trial = await Trial.start(fleet, client, spec)
        victim = min(await trial.until_served_by(2))
        endpoint = endpoint_of(victim)
        os.kill(endpoint, signal.SIGSTOP)
        try:
            hold.unlink()
            publication = await trial.until_phase(1, "preparing")
            victims = [view.service_id for pid, view in (await trial.rollouts()).items() if pid == victim]
            assert victims[0] in [member["service_id"] for member in publication["members"]]
            await asyncio.sleep(0.5)
            assert (await trial.publication(1) or {})["phase"] == "preparing"
            seconds.append(await trial.seconds_to_next_version(victim))
        finally:
            if psutil.pid_exists(endpoint):
                os.kill(endpoint, signal.SIGKILL)
        if is_enough("killed while the first group forms", seconds):
            return trial
        await trial.stop()


def is_enough(what: str, seconds: list[float]) -> bool:
    """Whether one of the attempts was fast enough: what else the machine does may delay one, not each of them."""
    report(what, seconds[-1])
    assert min(seconds) < NEXT_VERSION_SECONDS or len(seconds) < ATTEMPTS, (what, seconds)
    return min(seconds) < NEXT_VERSION_SECONDS


def endpoint_of(pid: int) -> int:
    """Find the process that owns a rollout's end of the weight group."""
    children = psutil.Process(pid).children()
    return next(each.pid for each in children if "flotilla.shared.weights.group.endpoint" in each.cmdline())


async def joins_and_is_slow(trial: Trial, joiner: int) -> None:
    """It serves what was current when it registered before it samples anything; then all go on at their own pace."""
    claimed: dict[int, str] = {}
    oldest: dict[int, int] = {}
    redis_url = FleetInfo.read(trial.fleet.data).redis_url
    watching = asyncio.create_task(watch_streams(redis_url, trial.id, claimed, oldest))
    started, at_start = time.monotonic(), await trial.version()
    at_join = at_start

    async def is_registered() -> bool:
        nonlocal at_join
        current = await trial.version()
        if await trial.is_registered(joiner):
            return True
        at_join = current
        return False

    await waited(is_registered, PATIENCE_SECONDS, "the registration")
    await trial.until_served_by(3)
    report("joined: from its start until it serves", time.monotonic() - started)

    def sampled_by(pid: int) -> list[int]:
        return [group for group, holder in claimed.items() if holder.startswith(f"rollout-{pid}@") and group in oldest]

    everyone = list(await trial.rollouts())
    assert joiner in everyone

    async def all_contribute() -> bool:
        return all(len(sampled_by(pid)) >= 8 for pid in everyone)

    await waited(all_contribute, PATIENCE_SECONDS, "groups of each rollout")
    watching.cancel()

    async def version_after(num: int) -> int | None:
        version = await trial.version()
        return version if version >= at_join + num else None

    at_end = await waited(lambda: version_after(3), PATIENCE_SECONDS, "further versions")
    counts = sorted(len(sampled_by(pid)) for pid in everyone)
    print(f"version {at_start} at its start, {at_join} at its registration, {at_end} at the end; groups {counts}")
    assert min(oldest[group] for group in sampled_by(joiner)) >= at_join


async def dies_around_broadcasts(trial: Trial, slow: int, slow_receive: Path) -> None:
    """One dies between two publications, one while weights arrive, one just after the commit."""

    async def between() -> float:
        serving = await trial.until_served_by(3)
        victim = await trial.until_one_holds(NEEDED_GROUPS, set(serving) - {slow})
        return await trial.seconds_to_next_version(victim)

    async def meanwhile() -> float:
        serving = await trial.until_served_by(3)
        victim = min(set(serving) - {slow})
        publication = await until_weights_arrive(trial, slow_receive)
        assert serving[victim].service_id in [member["service_id"] for member in publication["members"]]
        return await trial.seconds_to_next_version(victim)

    async def afterwards() -> float:
        serving = await trial.until_served_by(3)
        await trial.until_phase(await trial.version() + 1, "committed")
        return await trial.seconds_to_next_version(min(set(serving) - {slow}))

    for what, kill in (
        ("killed between two broadcasts, with groups that the next version needs", between),
        ("killed while weights arrive", meanwhile),
        ("killed just after the commit", afterwards),
    ):
        seconds = [await kill()]
        while not is_enough(what, seconds):
            seconds.append(await kill())
    await trial.until_served_by(3)


async def until_weights_arrive(trial: Trial, slow_receive: Path) -> dict[str, Any]:
    """Arm the slow receiver, and wait until a publication is under way that it keeps so.

    It waits for the first slice as soon as it has joined: that may be over before the last one has. Then another time.
    """
    armed_at = -1

    async def look() -> dict[str, Any] | None:
        nonlocal armed_at
        version = await trial.version()
        if armed_at < 0 or (slow_receive.exists() and version > armed_at):
            slow_receive.unlink(missing_ok=True)
            armed_at = version
        publication = await trial.publication(version + 1)
        is_kept = publication is not None and publication["phase"] == "transferring" and slow_receive.exists()
        return publication if is_kept else None

    found: dict[str, Any] = await waited(look, PATIENCE_SECONDS, "weights to arrive slowly", pause_seconds=0.005)
    return found
