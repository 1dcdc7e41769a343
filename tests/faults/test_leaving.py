"""Rollouts that join a fleet, are drained by command, and are told to end: what they have begun is handed over."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.schemas.service import ServiceView
from tests.cloud import GCP_PREEMPTED, Cloudlike, cloudlike
from tests.faults.test_kill import until_step, watch_balance
from tests.faults.trial import (
    PATIENCE_SECONDS,
    Trial,
    check_what_was_trained,
    joining,
    report,
    two_rollouts,
    waited,
)
from tests.fleet import FLOTILLA, ROOT, is_running, make_experiment

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

NOTICE_SECONDS = 6.0
UNHURRIED = "unhurried"
FAULTS = ("engine.step slow in=engine seconds=0.025", f"engine.step slow in=engine seconds=0.3 while={UNHURRIED}")
"""An answer takes 4 s, so that engines that load meanwhile get their share of few cores; 48 s while somebody leaves: it
is not finished by the third report of tokens, which come every 10 s, and a notice later."""


async def test_rollouts_join_and_leave(tmp_path: Path) -> None:
    data, marks = tmp_path / "fleet", tmp_path / "marks"
    faults = "; ".join([f"marks={marks}", *FAULTS])
    balanced: list[bool] = []
    with two_rollouts(data, faults) as fleet, cloudlike() as cloud:
        spot = {"FLOTILLA_NOTICES": "gcp", "FLOTILLA_METADATA_URL": cloud.url, "FLOTILLA_POOL": "spot"}
        async with fleet.client() as client:
            trial = await Trial.start(fleet, client, long_completions(tmp_path))
            watching = asyncio.create_task(watch_balance(client, trial.id, balanced))
            options = ("--notice", str(NOTICE_SECONDS))
            with joining(data, tmp_path / "first.log", *options, FLOTILLA_FAULTS=faults, **spot) as first:
                await trial.until_served_by(3)
                own = min(set(await trial.rollouts()) - {first.pid})
                async with amid_answers(trial, own, marks / UNHURRIED) as view:
                    await is_drained(trial, view)
                async with amid_answers(trial, first.pid, marks / UNHURRIED) as view:
                    await ends_with_its_machine(trial, first, view, cloud)
            with joining(data, tmp_path / "second.log", "--notice", "120", FLOTILLA_FAULTS=faults) as second:
                async with amid_answers(trial, second.pid, marks / UNHURRIED) as view:
                    await ends_at_second_sigterm(trial, second, view)
            resumed = await waited(trial.num_resumed, PATIENCE_SECONDS, "tokens that were handed over to be trained")
            await until_step(client, trial.id, 1)  # its metrics may come before the word that it is done
            await trial.stop()
            watching.cancel()
            usage = await client.call("GET", f"/v1/experiments/{trial.id}/usage")
            await check_what_was_trained(trial)

    print(f"trained {resumed:.0f} tokens that were handed over")
    print(usage)
    assert usage["saved_tokens"] > 0
    assert {(each["pool"], each["kind"]) for each in usage["uses"]} >= {("spot", "rollout"), ("on-demand", "trainer")}
    assert sum(usage["trained_by_pool"].values()) == usage["trained_tokens"] - usage["saved_tokens"]
    assert len(balanced) > 25
    assert all(balanced)


def long_completions(directory: Path) -> dict[str, Any]:
    """Completions that take longer than a notice while somebody leaves."""
    return make_experiment(
        directory,
        name="long",
        rollout={
            "group_size": 2,
            "sampling": {"max_new_tokens": 160, "ignore_eos": True},
            "engine": {"slots": 8, "context_tokens": 260},
        },
        optimisation={"steps": 100_000, "groups_per_mini_batch": 6},
        asynchrony={"publication": {"transport": "gloo"}},
    )


async def seconds_to_end(process: "subprocess.Popen[bytes]", deadline_seconds: float) -> float:
    """Measure how long a process goes on."""
    started = time.monotonic()

    async def has_ended() -> bool:
        return process.poll() is not None

    await waited(has_ended, deadline_seconds, f"the end of process {process.pid}", pause_seconds=0.01)
    return time.monotonic() - started


async def is_gone(pid: int) -> bool:
    return not is_running(pid)


@asynccontextmanager
async def amid_answers(trial: Trial, pid: int, unhurried: Path) -> AsyncIterator[ServiceView]:
    """Let the answers that a rollout has just begun last until it has left."""
    await trial.until_it_claims(pid)
    unhurried.touch()
    try:
        yield await trial.until_it_samples(pid)
    finally:
        unhurried.unlink()


async def is_drained(trial: Trial, view: ServiceView) -> None:
    """A rollout of the fleet's own is drained by command: it is gone within the notice and not started again."""
    log = trial.fleet.data.parent / f"{trial.fleet.data.name}.log"
    command = [*FLOTILLA, "drain", view.service_id, "--data", str(trial.fleet.data), "--notice", str(NOTICE_SECONDS)]
    drain = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        await waited(lambda: trial.has_begun_to_leave(view.service_id), 30, "the drain")
        drained = time.monotonic()
        await waited(lambda: is_gone(view.pid), NOTICE_SECONDS + 10, "the end of what is drained")
        seconds = time.monotonic() - drained
        said, _ = await asyncio.to_thread(drain.communicate, timeout=30)
    finally:
        drain.kill()
        drain.wait()
    report(f"drained with {NOTICE_SECONDS:.0f} s notice", seconds)
    print(said)
    assert drain.returncode == 0
    assert seconds <= NOTICE_SECONDS
    event = await trial.left(view.service_id)
    assert event["tokens_handed_over"] > 0
    assert "rollout-0 has left" in log.read_text() or "rollout-1 has left" in log.read_text()
    assert len(trial.fleet.pids("flotilla.services.rollout")) == 1


async def ends_with_its_machine(
    trial: Trial, process: "subprocess.Popen[bytes]", view: ServiceView, cloud: Cloudlike
) -> None:
    """The cloud gives 30 s, then shuts the machine down: the signal shortens the notice, and ends it no sooner."""
    assert view.capabilities.pool == "spot"
    cloud.answers = {GCP_PREEMPTED: (200, "TRUE")}
    await waited(lambda: trial.has_begun_to_leave(view.service_id), 30, "the notice to be heard")
    process.send_signal(signal.SIGTERM)
    # Far below what the cloud gives, whatever else computes here.
    seconds = await seconds_to_end(process, NOTICE_SECONDS + 12)
    report(f"a cloud's notice, then SIGTERM with {NOTICE_SECONDS:.0f} s notice", seconds)
    assert process.returncode == 0
    assert (await trial.left(view.service_id))["tokens_handed_over"] > 0


async def ends_at_second_sigterm(trial: Trial, process: "subprocess.Popen[bytes]", view: ServiceView) -> None:
    """A second signal does not wait for the notice."""
    process.send_signal(signal.SIGTERM)
    await waited(lambda: trial.has_begun_to_leave(view.service_id), 30, "the drain")
    await asyncio.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    seconds = await seconds_to_end(process, 30)
    report("second SIGTERM", seconds)
    assert process.returncode == 0
