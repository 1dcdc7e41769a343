"""A version is served only when it is complete, right and committed; what is missed is pulled."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.engines.scripted import ScriptedTransfer
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import Conflict, NotFound, WeightsDiverged, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.publication import (
    Manifest,
    PublicationOrder,
    PublicationPhase,
    ReceiveState,
    Rendezvous,
    Transport,
)
from flotilla.shared.schemas.service import DesiredState, ServedWeights, WorkState
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.mapped.locate import LocatedImage
from flotilla.shared.weights.pull.source import OnArrived, Reuse

CHECKSUM = "00000000deadbeef"


class RecordingEngine:
    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.paths: list[Path] = []
        self.transfers: list[ScriptedTransfer] = []
        self.is_dead = self.is_loading = self.is_asleep = False
        self.may_load = asyncio.Event()
        self.may_load.set()

    @property
    def prepared(self) -> list[int]:
        return [each.version for each in self.transfers if each.end == "complete"]

    def begin_transfer(self, image: Path, version: int) -> ScriptedTransfer:
        self.transfers.append(ScriptedTransfer(image, version))
        return self.transfers[-1]

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        self.is_loading = True
        await self.may_load.wait()
        if self.is_dead:
            raise WorkerDied("killed by SIGKILL")
        if not image.exists():
            raise WeightTransferFailed(f"cannot open {image}")
        self.loaded.append(version)
        self.paths.append(image)
        self.is_asleep = False

    async def sleep(self) -> None:
        self.is_asleep = True


class ScriptedEndpoint:
    """Receives whatever ``checksum`` says, unless ``fails``."""

    def __init__(self) -> None:
        self.checksum = CHECKSUM
        self.fails: str | None = None
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.paths: list[Path] = []

    async def open_receiver(self, rendezvous: Rendezvous, rank: int, timeout_seconds: float) -> None:
        self.opened.append(rendezvous.epoch)

    async def joined(self, epoch: int, deadline_seconds: float) -> None:
        return None

    async def receive(
        self,
        epoch: int,
        image_path: Path,
        image_bytes: int,
        slice_bytes: int,
        deadline: float,
        on_arrived: Callable[[int], None] | None = None,
    ) -> str:
        self.paths.append(image_path)
        if not image_path.exists():
            raise WeightTransferFailed(f"cannot open {image_path}")
        if on_arrived is not None:
            on_arrived(slice_bytes)
        if self.fails:
            raise WeightTransferFailed(self.fails)
        return self.checksum

    async def close_epoch(self, epoch: int) -> None:
        self.closed.append(epoch)


class World:
    def __init__(self, directory: Path, engine: RecordingEngine) -> None:
        self.engine, self.gate, self.endpoint = engine, VersionGate(), ScriptedEndpoint()
        self.asked: list[str] = []
        self.pulled: list[int] = []
        self.inodes: list[int] = []
        self.begun_anew = 0
        self.breaks_off = False
        self.may_pull = True
        self.located: LocatedImage | None = None
        self.told = 0
        self.deaths: list[WorkerDied] = []
        self.directory = directory
        self.receiver = WeightReceiver(
            self.engine,  # type: ignore[arg-type]
            self.gate,
            self.endpoint,  # type: ignore[arg-type]
            MissedVersions(self.pull, self.locate),
            OnWeightUpdate.DRAIN,
            self.tell,
            self.deaths.append,
        )

    async def locate(self, url: str | None, checksum: str | None, peers: Sequence[str]) -> LocatedImage | None:
        return self.located

    def tell(self) -> None:
        self.told += 1

    async def pull(
        self,
        url: str | None,
        version: int,
        directory: Path | None,
        deadline_seconds: float,
        *,
        checksum: str | None,
        peers: Sequence[str],
        kept_in: Path | None,
        reuse: Reuse | None,
        on_arrived: OnArrived | None,
    ) -> Path:
        if not self.may_pull:
            raise NotFound("not there")
        self.asked.append(str(url))
        if str(url).startswith("http://dead/"):
            await asyncio.sleep(deadline_seconds)
        self.pulled.append(version)
        assert reuse is not None
        if (free := reuse(1)) is not None:
            path = free.hand_over()
        else:
            path = self.directory / f"pulled-{version}"
            path.write_bytes(b"x")
        self.inodes.append(path.stat().st_ino)
        assert on_arrived is not None
        for number in range(self.begun_anew, -1, -1):
            on_arrived(path.with_name(f"given-up-{number}") if number else path, 1)
        if self.breaks_off:
            raise WeightTransferFailed("the pulled image has another checksum")
        return path

    def want(self, version: int, order: PublicationOrder | None = None, **fields: Any) -> None:
        self.receiver.take(
            DesiredState(tag="t", state=WorkState.RUNNING, policy_version=version, publication=order, **fields)
        )

    async def until(self, condition: "Any") -> None:
        async with asyncio.timeout(3):
            while not condition():
                await asyncio.sleep(0.001)

    def reports(self, state: ReceiveState) -> bool:
        return self.receiver.report is not None and self.receiver.report.state is state


class ProvingEngine(RecordingEngine):
    """Finds other weights in its memory as often as ``wrong`` says."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong = wrong
        self.digests: list[str] = []

    async def load_proved(self, image: Path, version: int, on_update: OnWeightUpdate, digest: str) -> bool:
        await self.load_weights(image, version, on_update)
        self.digests.append(digest)
        self.wrong -= 1
        if self.wrong >= 0:
            raise WeightsDiverged(f"version {version}: 1 of 2 tensors differ")
        return True


def an_order(version: int, epoch: int = 1, phase: PublicationPhase = PublicationPhase.PREPARING) -> PublicationOrder:
    return PublicationOrder(
        version=version,
        epoch=epoch,
        rank=1,
        phase=phase,
        rendezvous=Rendezvous(host="127.0.0.1", port=1, epoch=epoch, world_size=2),
        manifest=Manifest(version=version, image_bytes=64, slice_bytes=64, checksum=CHECKSUM, tensors=()),
        deadline_seconds=1.0,
    )


@asynccontextmanager
async def a_world(
    directory: Path, serving: int | None = 0, engine: RecordingEngine | None = None
) -> AsyncIterator[World]:
    world = World(directory, engine or RecordingEngine())
    await world.gate.set(serving)
    running = asyncio.create_task(world.receiver.run())
    try:
        yield world
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await world.receiver.close()
    assert not any(path.exists() for path in world.endpoint.paths)


async def test_a_received_version_is_served_only_after_its_commit(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order(1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        assert world.engine.loaded == []

        world.want(1)

        await world.until(lambda: world.gate.version == 1)
        assert (world.engine.loaded, world.pulled) == ([1], [])


async def test_a_version_that_the_engine_cannot_take_is_told_of_once_it_is_no_passing_matter(tmp_path: Path) -> None:
    class Refusing(RecordingEngine):
        is_refusing, times = True, 0

        async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
            self.times += 1
            if self.is_refusing:
                raise WeightTransferFailed("adapters of another base")
            await super().load_weights(image, version, on_update)

    engine = Refusing()
    async with a_world(tmp_path, engine=engine) as world:
        world.want(1, weights_url="http://t")
        await world.until(lambda: engine.times == 1)
        assert world.receiver.refusal is None, "it is tried again"

        await world.until(lambda: world.receiver.refusal is not None)

        assert world.receiver.refusal == "version 1 cannot be served: adapters of another base" and world.told
        engine.is_refusing = False
        world.want(2, weights_url="http://t")
        await world.until(lambda: world.gate.version == 2)
        assert world.receiver.refusal is None


class DiscardingEngine(RecordingEngine):
    """One that can read weights over those that it has; writes down how many transfers there were by then."""

    def __init__(self) -> None:
        super().__init__()
        self.discarded_at: list[int] = []
        self.num_woken = 0

    async def discard_weights(self) -> None:
        self.discarded_at.append(len(self.transfers))

    async def wake(self) -> None:
        self.num_woken += 1


@asynccontextmanager
async def a_discarding_world(directory: Path, serving: int | None) -> AsyncIterator[tuple[World, DiscardingEngine]]:
    engine = DiscardingEngine()
    async with a_world(directory, serving, engine) as world:
        yield world, engine


async def test_a_rollout_that_joins_has_its_first_version_read_over_the_weights_it_began_with(tmp_path: Path) -> None:
    async with a_discarding_world(tmp_path, None) as (world, engine):
        world.want(3, weights_url="http://t/v1/weights/3")
        await world.until(lambda: world.gate.version == 3)
        world.want(4, weights_url="http://t/v1/weights/4")
        await world.until(lambda: world.gate.version == 4)

    assert engine.loaded == [3, 4]
    assert engine.discarded_at == [0]  # before the transfer of the first began, and not again: the first was sampled


async def test_weights_that_may_be_sampled_are_not_read_over(tmp_path: Path) -> None:
    async with a_discarding_world(tmp_path, 0) as (world, engine):
        world.want(3, weights_url="http://t/v1/weights/3")
        await world.until(lambda: world.gate.version == 3)

    assert engine.discarded_at == []


async def test_a_rollout_that_joins_serves_the_initial_weights_again_where_these_are_committed(tmp_path: Path) -> None:
    async with a_discarding_world(tmp_path, None) as (world, engine):
        world.breaks_off = True
        world.want(3, weights_url="http://t/v1/weights/3")
        await world.until(lambda: len(world.pulled) > 1)
        assert engine.discarded_at == [0]

        world.want(0)

        await world.until(lambda: world.gate.version == 0)
    assert (engine.num_woken, engine.loaded) == (1, [])


async def test_a_mapped_first_version_is_read_over_the_weights_a_rollout_began_with(
    tmp_path: Path, theirs: WeightImage
) -> None:
    async with a_discarding_world(tmp_path, None) as (world, engine):
        world.located = LocatedImage(theirs.path, theirs.image_bytes, theirs.checksum())
        world.want(3, weights_url="http://t/v1/weights/3", policy_checksum=theirs.checksum())
        await world.until(lambda: world.gate.version == 3)

    assert (engine.discarded_at, world.pulled) == ([0], [])


async def test_a_version_is_announced_before_the_engine_waits_for_its_samples(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.may_load.clear()
        world.want(0, an_order(1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        world.want(1)

        async with asyncio.timeout(3):
            await world.gate.comes(1)

        assert (world.gate.version, world.engine.loaded) == (0, [])
        world.engine.may_load.set()


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[WeightImage]:
    """An image of the trainer, of 64 bytes."""
    with WeightImage.create(64, directory=tmp_path) as image:
        image.view[:] = bytes(range(64))
        yield image


def an_order_to_map(image: WeightImage, version: int, epoch: int = 1) -> PublicationOrder:
    manifest = Manifest(
        version=version,
        image_bytes=64,
        slice_bytes=64,
        checksum=image.checksum(),
        tensors=(),
        image_path=str(image.path),
    )
    order = an_order(version, epoch, PublicationPhase.TRANSFERRING)
    changes = {"transport": Transport.SHARED_MEMORY, "rank": None, "rendezvous": None, "manifest": manifest}
    return order.model_copy(update=changes)


async def test_an_image_of_this_host_is_mapped_and_let_go_once_it_serves(tmp_path: Path, theirs: WeightImage) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order_to_map(theirs, 1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        with pytest.raises(Conflict), theirs.writing():
            pass
        assert world.engine.loaded == []

        world.want(1)

        await world.until(lambda: world.gate.version == 1)
        assert (world.engine.paths, world.pulled, world.endpoint.opened) == ([theirs.path], [], [])
        with theirs.writing():
            pass


async def test_a_mapped_image_whose_bytes_changed_is_never_served(tmp_path: Path, theirs: WeightImage) -> None:
    order = an_order_to_map(theirs, 1)
    theirs.view[63] ^= 1
    async with a_world(tmp_path) as world:
        world.want(0, order)

        await world.until(lambda: world.reports(ReceiveState.FAILED))

        assert "the manifest says" in str(world.receiver.report.detail)
        with theirs.writing():
            pass


async def test_a_mapped_image_is_reported_again_in_the_next_epoch(tmp_path: Path, theirs: WeightImage) -> None:
    async with a_world(tmp_path) as world:
        order = an_order_to_map(theirs, 1)
        world.want(0, order)
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        theirs.view[63] ^= 1  # it is not read again: what was verified is held

        world.want(0, order.model_copy(update={"epoch": 2}))

        await world.until(lambda: world.receiver.report.epoch == 2)
        assert world.reports(ReceiveState.RECEIVED)


async def test_a_mapped_spare_whose_file_is_gone_is_pulled(tmp_path: Path, theirs: WeightImage) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order_to_map(theirs, 1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        theirs.path.unlink()

        world.want(1, weights_url="http://trainer/v1/weights/1")

        await world.until(lambda: world.gate.version == 1)
        assert (world.engine.loaded, world.pulled) == ([1], [1])


async def test_an_image_whose_file_is_gone_is_mapped_no_more(tmp_path: Path, theirs: WeightImage) -> None:
    async with a_world(tmp_path) as world:
        order = an_order_to_map(theirs, 1)
        world.want(0, order)
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        theirs.path.unlink()

        world.want(0, order.model_copy(update={"epoch": 2}))

        await world.until(lambda: world.receiver.report.epoch == 2)
        assert world.reports(ReceiveState.FAILED)


async def test_another_image_of_the_same_version_is_not_served(tmp_path: Path) -> None:
    """A trainer died over a publication, and its successor published another image as this version."""
    async with a_world(tmp_path) as world:
        world.want(0, an_order(1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))

        world.want(1, policy_checksum="0" * 16, weights_url="http://trainer/v1/weights/1")

        await world.until(lambda: world.gate.version == 1)
        assert (world.engine.loaded, world.pulled) == ([1], [1])


async def test_the_image_that_was_committed_is_served(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order(1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))

        world.want(1, policy_checksum=CHECKSUM, weights_url="http://trainer/v1/weights/1")

        await world.until(lambda: world.gate.version == 1)
        assert (world.engine.loaded, world.pulled) == ([1], [])


async def test_nothing_is_received_into_an_image_whose_file_is_gone(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        for version in (1, 2):
            world.want(version - 1, an_order(version))
            await world.until(
                lambda v=version: world.receiver.report is not None and world.receiver.report.version == v
            )
            await world.until(lambda: world.receiver.report.state is not ReceiveState.JOINED)
            world.want(version)
            await world.until(lambda v=version: world.gate.version == v)
        for path in world.endpoint.paths:
            path.unlink(missing_ok=True)

        world.want(2, an_order(3))

        await world.until(lambda: world.receiver.report.version == 3)
        await world.until(lambda: world.receiver.report.state is not ReceiveState.JOINED)
        assert world.reports(ReceiveState.RECEIVED)


async def test_no_image_is_reserved_mapped_read_or_freed_on_the_event_loop(
    tmp_path: Path, theirs: WeightImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[str] = []

    def watch(name: str) -> None:
        original = getattr(WeightImage, name)

        def watched(*args: Any, **named: Any) -> Any:
            if asyncio._get_running_loop() is not None:
                on_loop.append(name)
            return original(*args, **named)

        monkeypatch.setattr(WeightImage, name, watched)

    order = an_order_to_map(theirs, 1)
    for name in ("create", "attach", "checksum", "close"):
        watch(name)
    async with a_world(tmp_path) as world:
        world.want(0, order)
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        world.want(1, an_order(2))
        await world.until(lambda: world.receiver.report.version == 2 and world.reports(ReceiveState.RECEIVED))
        other = an_order(3)
        manifest = other.manifest.model_copy(update={"image_bytes": 128})
        world.want(2, other.model_copy(update={"manifest": manifest}))
        await world.until(lambda: world.receiver.report.version == 3 and world.reports(ReceiveState.RECEIVED))
        world.want(5, weights_url="http://trainer/v1/weights/5")
        await world.until(lambda: world.gate.version == 5)

    assert on_loop == []


async def test_an_epoch_is_joined_once(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        for version in (1, 2, 3):
            world.want(version - 1, an_order(version))
            await world.until(
                lambda v=version: world.reports(ReceiveState.RECEIVED) and world.receiver.report.version == v
            )
            world.want(version)
            await world.until(lambda v=version: world.gate.version == v)

    assert world.endpoint.opened == [1]


async def test_a_wrong_checksum_is_reported_and_never_served(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.endpoint.checksum = "0" * 16
        world.want(0, an_order(1))

        await world.until(lambda: world.reports(ReceiveState.FAILED))

        assert (world.engine.loaded, world.endpoint.closed) == ([], [1])


async def test_a_new_epoch_replaces_the_failed_one(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.endpoint.fails = "connection closed by peer"
        world.want(0, an_order(1, epoch=1))
        await world.until(lambda: world.reports(ReceiveState.FAILED))

        world.endpoint.fails = None
        world.want(0, an_order(1, epoch=2))

        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        assert world.endpoint.opened == [1, 2]


async def test_the_engine_hears_of_each_slice_and_of_the_end(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.endpoint.fails = "connection closed by peer"
        world.want(0, an_order(1, epoch=1))
        await world.until(lambda: world.reports(ReceiveState.FAILED))
        world.endpoint.fails, world.endpoint.checksum = None, "0" * 16
        world.want(0, an_order(1, epoch=2))
        await world.until(lambda: world.receiver.report.epoch == 2 and world.reports(ReceiveState.FAILED))
        world.endpoint.checksum = CHECKSUM
        world.want(0, an_order(1, epoch=3))
        await world.until(lambda: world.engine.prepared)

    told = [(each.version, each.bytes_arrived, each.end) for each in world.engine.transfers]
    assert told == [
        (1, 64, "connection closed by peer"),
        (1, 64, f"checksum is {'0' * 16}, the manifest says {CHECKSUM}"),
        (1, 64, "complete"),
    ]


async def test_a_version_that_waits_to_be_served_is_not_pushed_out_of_the_engine(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order(1))
        await world.until(lambda: world.engine.prepared == [1])

        world.want(0, an_order(2))
        await world.until(lambda: world.engine.prepared == [1, 2])

    assert [each.bytes_arrived for each in world.engine.transfers] == [64, 0], "the second was whole when it began"


async def test_versions_that_are_pulled_one_after_the_other_take_turns_in_two_images(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        for version in (1, 2, 3, 4):
            world.want(version, weights_url=f"http://trainer/v1/weights/{version}")
            await world.until(lambda v=version: world.gate.version == v)

        assert world.pulled == [1, 2, 3, 4]
        assert world.inodes[2:] == world.inodes[:2]


async def test_the_engine_reads_a_version_while_it_is_pulled(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.begun_anew = 1
        world.want(4, weights_url="http://trainer/v1/weights/4")
        await world.until(lambda: world.gate.version == 4)

        first, second = world.engine.transfers
        assert (first.bytes_arrived, first.end) == (1, "it is pulled again")
        assert (second.bytes_arrived, second.end) == (1, "complete")
        assert [second.image] == world.engine.paths


async def test_what_the_engine_has_read_of_a_wrong_image_is_given_up(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.breaks_off = True
        world.want(4, weights_url="http://trainer/v1/weights/4")
        await world.until(lambda: len(world.engine.transfers) == 1 and world.engine.transfers[0].end)

        assert "checksum" in str(world.engine.transfers[0].end)
        assert world.engine.loaded == []


async def test_a_missed_version_is_pulled(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(4, weights_url="http://trainer")

        await world.until(lambda: world.gate.version == 4)

    assert (world.pulled, world.engine.loaded) == ([4], [4])
    assert list(tmp_path.iterdir()) == []


async def test_a_missed_version_that_is_on_this_host_is_mapped(tmp_path: Path, theirs: WeightImage) -> None:
    async with a_world(tmp_path, serving=None) as world:
        checksum = theirs.checksum()
        world.located = LocatedImage(theirs.path, theirs.image_bytes, checksum)

        world.want(4, weights_url="http://trainer/v1/weights/4", policy_checksum=checksum)

        await world.until(lambda: world.gate.version == 4)
        assert (world.engine.paths, world.pulled) == ([theirs.path], [])
        with theirs.writing():  # it is held no longer than it takes to load
            pass


def rewritten(image: WeightImage) -> None:
    image.view[63] ^= 1


def withdrawn(image: WeightImage) -> None:
    image.path.unlink()


@pytest.mark.parametrize("change", [rewritten, withdrawn])
async def test_a_located_image_that_is_not_there_any_more_is_pulled(
    tmp_path: Path, theirs: WeightImage, change: Callable[[WeightImage], None]
) -> None:
    async with a_world(tmp_path, serving=None) as world:
        world.located = LocatedImage(theirs.path, theirs.image_bytes, theirs.checksum())
        change(theirs)

        world.want(4, weights_url="http://trainer/v1/weights/4")

        await world.until(lambda: world.gate.version == 4)
        assert (world.engine.loaded, world.pulled) == ([4], [4])
        with theirs.writing():
            pass


async def test_a_located_image_that_is_being_written_is_pulled(tmp_path: Path, theirs: WeightImage) -> None:
    async with a_world(tmp_path, serving=None) as world:
        world.located = LocatedImage(theirs.path, theirs.image_bytes, theirs.checksum())
        with theirs.writing():
            world.want(4, weights_url="http://trainer/v1/weights/4")

            await world.until(lambda: world.gate.version == 4)

    assert (world.engine.loaded, world.pulled) == ([4], [4])


async def test_a_pull_from_a_trainer_that_died_is_given_up_when_another_serves(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(4, weights_url="http://dead/v1/weights/4")
        await world.until(lambda: world.asked)
        world.want(4, weights_url="http://alive/v1/weights/4")

        await world.until(lambda: world.gate.version == 4)

    assert world.pulled == [4]


async def test_a_version_that_cannot_be_pulled_yet_is_tried_again(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=None) as world:
        world.may_pull = False
        world.want(4, weights_url="http://trainer")
        await asyncio.sleep(0.01)
        assert world.gate.version is None

        world.may_pull = True

        await world.until(lambda: world.gate.version == 4)


async def test_an_engine_that_never_loads_a_version_is_told_to_sleep_all_the_same(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.may_load.clear()
        world.want(4, weights_url="http://trainer")
        await world.until(lambda: world.engine.is_loading)

        async with asyncio.timeout(3):
            await world.receiver.sleep()
        assert (world.engine.is_asleep, world.gate.version, world.receiver.version) == (True, None, 0)

        world.engine.may_load.set()
        world.receiver.wake()
        await world.until(lambda: world.gate.version == 4)
        assert world.engine.loaded == [4]


async def test_an_engine_with_the_initial_weights_serves_version_0(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=None) as world:
        world.want(0)

        await world.until(lambda: world.gate.version == 0)
        assert world.engine.loaded == []


async def test_a_held_version_is_not_left(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=3) as world:
        world.want(4, weights_url="http://trainer", hold_version=3)
        await asyncio.sleep(0.01)
        assert world.gate.version == 3

        world.want(4, weights_url="http://trainer")

        await world.until(lambda: world.gate.version == 4)


async def test_an_engine_that_begins_again_under_an_evaluation_of_the_initial_weights_serves_them(
    tmp_path: Path,
) -> None:
    async with a_discarding_world(tmp_path, None) as (world, engine):
        world.want(2, weights_url="http://trainer", hold_version=0)
        await world.until(lambda: world.gate.version == 0)
        assert (engine.num_woken, engine.loaded, engine.discarded_at) == (0, [], [])

        world.want(2, weights_url="http://trainer")

        await world.until(lambda: world.gate.version == 2)


async def test_an_engine_that_begins_again_under_an_evaluation_of_weights_that_are_gone_serves_the_newest(
    tmp_path: Path,
) -> None:
    async with a_world(tmp_path, serving=None) as world:
        world.want(3, weights_url="http://trainer", hold_version=2)

        await world.until(lambda: world.gate.version == 3)


async def test_a_version_is_received_while_an_older_one_is_loaded(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.may_load.clear()
        world.want(0, an_order(1))
        await world.until(lambda: world.reports(ReceiveState.RECEIVED))
        world.want(1, an_order(2))
        await world.until(lambda: world.receiver.report.version == 2 and world.reports(ReceiveState.RECEIVED))
        world.want(2, an_order(3))
        await world.until(lambda: world.receiver.report.version == 3 and world.reports(ReceiveState.RECEIVED))
        assert len(set(world.endpoint.paths)) == 3
        world.want(3)

        world.engine.may_load.set()

        await world.until(lambda: world.gate.version == 3)
        assert world.engine.loaded == [1, 3]


async def test_an_older_version_is_never_served_again(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=5) as world:
        world.want(4, weights_url="http://trainer")
        await asyncio.sleep(0.01)

        assert world.gate.version == 5
        assert world.pulled == []


async def test_an_engine_that_dies_while_it_loads_is_told_once(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.is_dead = True
        world.want(4, weights_url="http://trainer")

        await world.until(lambda: world.deaths)

        assert [death.detail for death in world.deaths] == ["killed by SIGKILL"]
        assert world.gate.version == 0


async def test_the_next_versions_image_is_never_served_as_the_one_before(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        looking, may_find = asyncio.Event(), asyncio.Event()

        async def slowly(url: str | None, checksum: str | None, peers: Sequence[str]) -> None:
            looking.set()
            await may_find.wait()

        world.receiver._switcher._missed = MissedVersions(world.pull, slowly)
        world.want(4, weights_url="http://trainer/v1/weights/4")
        await looking.wait()
        world.want(5, weights_url="http://trainer/v1/weights/5")
        may_find.set()
        await world.until(lambda: world.gate.version == 5)

        assert world.asked[0].endswith("/4")


async def test_an_engine_with_other_weights_is_out_of_service_until_it_has_loaded_again(tmp_path: Path) -> None:
    engine = ProvingEngine(wrong=1)
    async with a_world(tmp_path, engine=engine) as world:
        engine.may_load.clear()
        world.want(3, weights_url="http://t/v1/weights/3", policy_digest="d3")
        await world.until(lambda: engine.is_loading)
        engine.may_load.set()
        await world.until(lambda: world.receiver.served is not None)

        assert world.gate.version is world.receiver.version is None
        assert world.receiver.served == ServedWeights(version=3, diverged=1, detail="version 3: 1 of 2 tensors differ")
        await world.until(lambda: world.gate.version == 3)
        assert world.receiver.served == ServedWeights(version=3, digest="d3")
        assert (engine.digests, world.deaths) == (["d3", "d3"], [])


async def test_one_that_keeps_other_weights_is_ended(tmp_path: Path) -> None:
    async with a_world(tmp_path, engine=ProvingEngine(wrong=100)) as world:
        world.want(3, weights_url="http://t/v1/weights/3", policy_digest="d3")
        await world.until(lambda: world.deaths)

        assert world.gate.version is None
        assert world.deaths[0].detail == "3 times in a row: version 3: 1 of 2 tensors differ"
