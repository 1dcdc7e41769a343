"""SQL, the data plane, checkpoints and shared memory, each older than the others: a trainer that comes back goes on.

The data plane is the in-memory twin, the control plane remembers what the gateway's record does, checkpoints lie in a
folder. Each may be put back to what it was some steps earlier, alone or together with another.
"""

import asyncio
import copy
import itertools
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from flotilla.shared.checkpoints.folders import complete
from flotilla.shared.checkpoints.lineage import Published
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import ModelError
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.streams.plans import LOST_WITH_CHECKPOINT
from tests.integration.trainer.fleet import ScriptedFleet, YesGateway, a_session, a_spec, save_tiny_model, train

pytestmark = pytest.mark.long

STEPS = 9
R = 2
STORES = ("sql", "redis", "checkpoints", "images")


class WaitingFleet(ScriptedFleet):
    """Samples nothing before it can be given the weights of the current version, as a rollout that was started now."""

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            version = self.gateway.version
            if version == 0 or self.gateway.images.get(version):
                await self.turn()
            await asyncio.sleep(0.002)


class World:
    """The four stores, and a trainer that works on them for some steps at a time."""

    def __init__(self, tmp_path: Path, **sections: Any) -> None:
        self.directory = tmp_path / "run"
        self.earlier = tmp_path / "earlier"
        optimisation = {"steps": STEPS, "groups_per_mini_batch": R, "learning_rate": 1e-3}
        sections = {"checkpoint": {"every_steps": 2}} | sections
        self.spec: ExperimentSpec = a_spec(save_tiny_model(tmp_path / "model"), optimisation=optimisation, **sections)
        self.plane = MemoryDataPlane()
        self.gateway = YesGateway(self.plane)

    async def train_until(self, step: int) -> None:
        """Train, and crash as soon as this many steps are done, published and, if that is due, durable."""
        self.gateway.metrics.clear()
        fleet = WaitingFleet(self.spec, self.plane, self.gateway)
        async with a_session(self.spec, self.directory, self.plane, self.gateway) as (session, _), asyncio.timeout(120):
            tasks = [asyncio.create_task(fleet.run()), asyncio.create_task(session.run())]
            while step not in self.gateway.metrics or not session.publisher.is_idle:
                assert not tasks[0].done(), tasks[0]
                await asyncio.sleep(0.002)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> bool:
        """Train to the end."""
        return await train(self.spec, self.directory, self.plane, self.gateway, WaitingFleet)

    def save(self) -> None:
        """Keep a copy of every store."""
        self.kept = {
            "sql": (self.gateway.committed, self.gateway.version),
            "redis": _copy_of(self.plane),
            "images": dict(self.gateway.images),
        }
        shutil.copytree(self.directory, self.earlier)

    def put_back(self, stores: Collection[str]) -> None:
        """Let some of the stores be as they were."""
        if "sql" in stores:
            self.gateway.committed, self.gateway.version = self.kept["sql"]
        if "redis" in stores:
            _restore(self.plane, self.kept["redis"])
        if "images" in stores:
            self.gateway.images = {0: b""} | self.kept["images"]
        if "checkpoints" in stores:
            shutil.rmtree(self.directory)
            shutil.copytree(self.earlier, self.directory)

    async def lineage(self) -> list[Any]:
        """Read what every step trained."""
        queue = self.plane.trainer("reader")
        return [await queue.lineage(step) for step in range(1, STEPS + 1)]


def _copy_of(plane: MemoryDataPlane) -> dict[str, Any]:
    store = plane._store
    names = [name for name in store.__slots__ if name not in {"clock", "_changed", "streams"}]
    kept = {name: copy.deepcopy(getattr(store, name)) for name in names}
    streams = {
        hop: copy.deepcopy((stream._next_number, stream.entries, stream.undelivered, stream.pending))
        for hop, stream in store.streams.items()
    }
    return kept | {"streams": streams}


def _restore(plane: MemoryDataPlane, kept: dict[str, Any]) -> None:
    for name, value in copy.deepcopy(kept).items():
        if name != "streams":
            setattr(plane._store, name, value)
    for hop, stream in plane._store.streams.items():
        stream._next_number, stream.entries, stream.undelivered, stream.pending = copy.deepcopy(kept["streams"][hop])


async def check(world: World) -> None:
    """Hold what must be true at the end of any run against the world."""
    ledger = await world.plane.ledger()
    assert ledger.balanced
    assert (ledger.planned, ledger.trained) == (0, STEPS * R)
    plans = await world.lineage()
    trained = [group_id for plan in plans for group_id in plan.group_ids]
    assert len(set(trained)) == STEPS * R, "nothing is trained twice"
    versions = [plan.version for plan in plans]
    assert versions == sorted(versions)
    newest = next(complete(world.directory / "checkpoints"))
    assert newest.step == STEPS
    assert {g for start, end in newest.state.trained for g in range(start, end + 1)} == set(trained)


CASES = [each for count in (1, 2, 3) for each in itertools.combinations(STORES, count)]


@pytest.mark.parametrize("older", CASES, ids=" ".join)
async def test_whatever_comes_back_older_the_run_goes_on_to_its_end(tmp_path: Path, older: tuple[str, ...]) -> None:
    world = World(tmp_path)
    await world.train_until(3)
    world.save()
    await world.train_until(7)
    published = list(world.gateway.published)
    world.put_back(older)

    assert await world.finish()

    await check(world)
    if "sql" not in older:
        assert world.gateway.published[: len(published)] == published
        assert world.gateway.published == sorted(set(world.gateway.published)), "no number comes twice"


async def test_every_checkpoint_is_gone(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.train_until(5)
    shutil.rmtree(world.directory)

    assert await world.finish()

    await check(world)
    assert (await world.plane.ledger()).dropped[LOST_WITH_CHECKPOINT] >= 4 * R
    assert world.gateway.takeovers[-1].lost is not None


async def test_after_a_crash_each_step_that_no_checkpoint_contains_is_trained_again(tmp_path: Path) -> None:
    world = World(tmp_path, checkpoint={"every_steps": 4, "durability": "step"})
    await world.train_until(7)
    before = await world.plane.ledger()

    await world.train_until(8)
    after = await world.plane.ledger()

    assert before.trained == 7 * R
    assert after.dropped[LOST_WITH_CHECKPOINT] >= 3 * R
    assert await world.finish()
    await check(world)


async def test_the_budget_of_several_steps_is_free_again_after_a_crash_between_two_versions(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        asynchrony={"trigger_parameter_sync_step": 4},
        checkpoint={"every_steps": 4, "durability": "step"},
    )
    await world.train_until(7)

    assert await world.finish()

    await check(world)


def damage(world: World, name: str) -> None:
    newest = next(complete(world.directory / "checkpoints"))
    path = newest.path / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.safetensors"])
async def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, name: str) -> None:
    world = World(tmp_path)
    await world.train_until(7)
    damage(world, name)

    assert await world.finish()

    await check(world)
    assert [path.name.partition(".")[0] for path in world.directory.glob("checkpoints/*.damaged-*")] == [
        "step-00000006"
    ]


async def test_checkpoints_that_are_all_damaged_are_named(tmp_path: Path) -> None:
    world = World(tmp_path, checkpoint={"every_steps": 2, "keep": 1})
    await world.train_until(5)
    damage(world, "model/model.safetensors")

    with pytest.raises(ModelError, match=r"model/model.safetensors is not what was written"):
        await world.train_until(6)


async def test_what_a_lost_version_sampled_is_dropped(tmp_path: Path) -> None:
    world = World(tmp_path, asynchrony={"staleness_threshold": 1.0})
    await world.train_until(6)
    world.gateway.committed, world.gateway.version = Published(8, 8), 8

    assert await world.finish()

    await check(world)
    assert world.gateway.takeovers[-1].lost == 8
    assert all(plan.newest_version not in {7, 8} for plan in await world.lineage())
