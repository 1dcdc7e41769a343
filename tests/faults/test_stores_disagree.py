"""SQL, the data plane, checkpoints and shared memory come back older than each other: the run goes on to its end.

Whatever was lost, a group is trained once on the lineage that survives, the ledger balances, and no version's number
comes twice.
"""

import asyncio
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.test_kill import ids_of, until_completed, until_step
from tests.fleet import hold_back, make_experiment
from tests.survival.faults import Fleet, delete_images

# Each wait ends where nothing gets on: the rest is for a machine with ten times as much to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVERY_STEPS = 3
FIRST_HELD_STEPS = 7
"""Two checkpoints, and a step that none contains."""
FURTHER_STEPS = 2 * EVERY_STEPS
"""From the checkpoint before the newest, which a loss may lead back to: always further than the run has been."""
SPARE_STEPS = 5
"""Groups that a loss takes with it, though they were issued after it."""
GROUPS_PER_STEP = 4
Loss = Callable[[Fleet], Awaitable[None]]
LOST_BYTES = 300_000
"""More than the log grows in the seconds before a power cut."""


async def lose_tail(fleet: Fleet) -> None:
    await fleet.cut_power()
    logs = sorted((fleet.data / "redis" / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
    size = logs[-1].stat().st_size
    os.truncate(logs[-1], max(size // 2, size - LOST_BYTES))
    await fleet.up()


async def lose_newest_checkpoint(fleet: Fleet) -> None:
    newest = (await fleet.checkpoints())[-1]
    await asyncio.to_thread(shutil.rmtree, newest)
    fleet.running.kill("flotilla.services.trainer.worker")


async def lose_every_checkpoint(fleet: Fleet) -> None:
    await fleet.cut_power()
    for path in fleet.data.glob("experiments/*/checkpoints"):
        await asyncio.to_thread(shutil.rmtree, path)
    await fleet.up()


async def damage_newest_checkpoint(fleet: Fleet) -> None:
    weights = (await fleet.checkpoints())[-1] / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    fleet.running.kill("flotilla.services.trainer.worker")


async def lose_images(fleet: Fleet) -> None:
    for _ in range(5):
        await delete_images(fleet, None)  # type: ignore[arg-type]
        await asyncio.sleep(0.3)


async def lose_every_recent_transaction(fleet: Fleet) -> None:
    """Let the database be older than a trainer that has taken over since."""
    database, copy = fleet.data / "gateway.sqlite", fleet.data / "earlier.sqlite"
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    before = set(fleet.running.pids("flotilla.services.trainer.worker"))
    fleet.running.kill("flotilla.services.trainer")
    async with asyncio.timeout(120):
        while not set(fleet.running.pids("flotilla.services.trainer.worker")) - before or not await works(
            fleet, "trainer"
        ):
            await asyncio.sleep(0.1)
    await fleet.cut_power()
    for path in fleet.data.glob("gateway.sqlite*"):
        path.unlink()
    copy.rename(database)
    await fleet.up()


async def works(fleet: Fleet, kind: str) -> bool:
    """Whether a service of this kind says that it runs the experiment."""
    listed = await fleet.client.call("GET", "/v1/services", params={"kind": kind}, deadline_seconds=30)
    return any(each["observed"]["state"] == "running" for each in listed["items"])


async def until_checkpoints(fleet: Fleet, num: int) -> None:
    async with asyncio.timeout(240):
        while len(await fleet.checkpoints()) < num:
            await asyncio.sleep(0.1)


async def go_further(fleet: Fleet, hold: Path) -> None:
    """Let the run go on for some steps, which have to be new ones."""
    before = int((await fleet.checkpoints())[-2].name.removeprefix("step-"))
    ledger = await fleet.client.call("GET", f"{fleet.path}/ledger", deadline_seconds=60)
    hold.write_text(str(ledger["train"]["issued"] + (FURTHER_STEPS + SPARE_STEPS) * GROUPS_PER_STEP))
    await until_step(fleet.client, fleet.experiment_id, before + FURTHER_STEPS)


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param((lose_images, damage_newest_checkpoint, lose_tail), id="images, checkpoint, log"),
        *(
            pytest.param((lose,), id=lose.__name__, marks=pytest.mark.long)
            for lose in (
                lose_tail,
                lose_newest_checkpoint,
                lose_every_checkpoint,
                damage_newest_checkpoint,
                lose_images,
                lose_every_recent_transaction,
            )
        ),
    ],
)
async def test_a_run_goes_on_whatever_was_lost(tmp_path: Path, losses: tuple[Loss, ...]) -> None:
    """One loss after the other, each under a run that waits for the next group's grade."""
    steps = FIRST_HELD_STEPS + (len(losses) - 1) * (FURTHER_STEPS + 2 * SPARE_STEPS) + FURTHER_STEPS
    optimisation = {"steps": steps, "groups_per_mini_batch": GROUPS_PER_STEP}
    spec = make_experiment(tmp_path, optimisation=optimisation, checkpoint={"every_steps": EVERY_STEPS})
    hold = hold_back(spec, tmp_path, after_step=FIRST_HELD_STEPS)
    async with Fleet(tmp_path, rollouts=1, only_kills=True) as fleet:
        await fleet.start(spec)
        await until_step(fleet.client, fleet.experiment_id, FIRST_HELD_STEPS)
        await until_checkpoints(fleet, 2)
        await losses[0](fleet)
        for lose in losses[1:]:
            await go_further(fleet, hold)
            await lose(fleet)
        hold.unlink()
        await until_completed(fleet.client, fleet.experiment_id)
        ledger = (await fleet.client.call("GET", f"{fleet.path}/ledger"))["train"]
        checkpoint = (await fleet.checkpoints())[-1]
        plans = [await fleet.client.call("GET", f"{fleet.path}/steps/{step}") for step in range(1, steps + 1)]

    assert ledger["balanced"]
    assert ledger["outstanding"] == ledger["planned"] == 0
    trained = Counter(group for plan in plans for group in plan["group_ids"])
    assert max(trained.values()) == 1
    assert len(trained) == ledger["trained"] == steps * GROUPS_PER_STEP
    versions = [plan["version"] for plan in plans]
    assert versions == sorted(set(versions))
    assert ids_of(json.loads((checkpoint / "state.json").read_text())["trained"]) == set(trained)
