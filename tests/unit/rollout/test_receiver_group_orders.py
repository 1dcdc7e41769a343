"""An engine that is a member of weight groups itself: it follows an order to the commit, or gives it up."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.rollout.engines.base import GroupBroken
from flotilla.services.rollout.engines.scripted import ScriptedTransfer
from flotilla.services.rollout.weights import receiver
from flotilla.services.rollout.weights.missed import MissedVersions
from flotilla.services.rollout.weights.receiver import WeightReceiver
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.concurrency.cancelling import until_done
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import NotFound, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.publication import (
    Manifest,
    PublicationOrder,
    PublicationPhase,
    ReceiveState,
    Rendezvous,
    Transport,
)
from flotilla.shared.schemas.service import DesiredState, WorkState

CHECKSUM = "00000000deadbeef"
PREPARING, TRANSFERRING, *_ = PublicationPhase


class MemberEngine:
    """Does as it is told: fails with ``error``, stays in ``join`` or ``receive`` until it may go on."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.loaded: list[int] = []
        self.received: int | None = None
        self.is_paused = self._is_lost = False
        self.is_asked = self.ends_what_it_began = False
        self.error: Exception | None = None
        self.may_join, self.may_receive, self.may_load = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_serve = asyncio.Event()
        for each in (self.may_join, self.may_receive, self.may_load, self.may_serve):
            each.set()

    async def join(self, order: PublicationOrder, on_update: OnWeightUpdate) -> None:
        self.is_asked = True
        if self.ends_what_it_began:
            await until_done(asyncio.ensure_future(self.may_join.wait()))
        await self.may_join.wait()
        self.did.append(f"join {order.epoch}")
        self.is_paused = True

    async def receive(self, order: PublicationOrder) -> None:
        self._is_lost, self.received = True, None
        await self.may_receive.wait()
        self.did.append(f"receive {order.version}")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.received, self._is_lost = order.version, False

    async def serve(self) -> None:
        await self.may_serve.wait()
        self.did.append(f"serve {self.received}")
        self.received, self.is_paused = None, False

    async def give_up(self) -> bool:
        if not self.is_paused:
            return True
        self.did.append("give up")
        self._is_lost |= self.received is not None
        self.received = None
        self.is_paused = self._is_lost
        return not self._is_lost

    def begin_transfer(self, image: Path, version: int) -> ScriptedTransfer:
        return ScriptedTransfer(image, version)

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        await self.may_load.wait()
        self.loaded.append(version)
        self._is_lost = self.is_paused = False

    async def wake(self) -> None:
        self.loaded.append(0)
        self._is_lost = self.is_paused = False


class World:
    """A receiver with such an engine."""

    def __init__(self, directory: Path) -> None:
        self.engine, self.gate = MemberEngine(), VersionGate()
        self.directory = directory
        self.deaths: list[WorkerDied] = []
        self.receiver = WeightReceiver(
            self.engine,  # type: ignore[arg-type]
            self.gate,
            None,  # type: ignore[arg-type]
            MissedVersions(self.pull),
            OnWeightUpdate.INTERRUPT,
            lambda: None,
            self.deaths.append,
        )

    async def pull(self, url: str | None, version: int, *_: Any, peers: Sequence[str] = (), **__: Any) -> Path:
        if url is None:
            raise NotFound("nobody serves it")
        path = self.directory / "pulled"
        path.write_bytes(b"x")
        return path

    def want(self, version: int, order: PublicationOrder | None = None, **fields: Any) -> None:
        facts = {"weights_url": "http://trainer/1", **fields}
        self.receiver.take(
            DesiredState(tag="t", state=WorkState.RUNNING, policy_version=version, publication=order, **facts)
        )

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(3):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_reported(self, state: ReceiveState, version: int = 1, epoch: int = 1) -> None:
        def is_reported() -> bool:
            report = self.receiver.report
            return report is not None and (report.state, report.version, report.epoch) == (state, version, epoch)

        await self.until(is_reported)


def an_order(version: int = 1, epoch: int = 1, phase: PublicationPhase = TRANSFERRING) -> PublicationOrder:
    return PublicationOrder(
        version=version,
        epoch=epoch,
        transport=Transport.ENGINE,
        rank=1,
        phase=phase,
        rendezvous=Rendezvous(host="127.0.0.1", port=1, epoch=epoch, world_size=2),
        manifest=Manifest(version=version, image_bytes=64, slice_bytes=64, checksum=CHECKSUM, tensors=()),
        deadline_seconds=30.0,
    )


@asynccontextmanager
async def a_world(directory: Path, serving: int | None = 0) -> AsyncIterator[World]:
    world = World(directory)
    await world.gate.set(serving)
    running = asyncio.create_task(world.receiver.run())
    try:
        yield world
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await world.receiver.close()


async def test_it_joins_receives_when_all_have_joined_and_serves_when_it_is_committed(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order(phase=PREPARING))
        await world.until_reported(ReceiveState.JOINED)
        assert world.engine.did == ["join 1"]

        world.want(0, an_order())
        await world.until_reported(ReceiveState.RECEIVED)
        assert world.receiver.report is not None and world.receiver.report.checksum == CHECKSUM
        assert (world.engine.did, world.gate.version) == (["join 1", "receive 1"], 0)

        world.want(1)
        await world.until(lambda: world.gate.version == 1)
        assert world.engine.did[2:] == ["serve 1"]

        world.want(1, an_order(2))
        await world.until_reported(ReceiveState.RECEIVED, version=2)
        world.want(2)
        await world.until(lambda: world.gate.version == 2)
        assert (world.engine.loaded, world.receiver.switches) == ([], 2)


async def test_a_publication_that_is_given_up_before_the_first_tensor_costs_nothing(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.want(4, an_order(5, phase=PREPARING))
        await world.until_reported(ReceiveState.JOINED, version=5)

        world.want(4)

        await world.until(lambda: not world.engine.is_paused)
        assert (world.engine.did, world.engine.loaded, world.gate.version) == (["join 1", "give up"], [], 4)


@pytest.mark.parametrize("committed", [0, 4])
async def test_what_was_received_and_not_committed_is_replaced_by_what_is(tmp_path: Path, committed: int) -> None:
    async with a_world(tmp_path, serving=committed) as world:
        world.want(committed, an_order(5))
        await world.until_reported(ReceiveState.RECEIVED, version=5)

        world.want(committed)

        await world.until(lambda: world.engine.loaded == [committed])
        await world.until(lambda: world.gate.version == committed)


async def test_a_group_that_breaks_is_no_failure_of_those_who_are_left(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.error = GroupBroken("Connection closed by peer")
        world.want(0, an_order())
        await world.until(lambda: world.engine.error is None)
        assert world.receiver.report is not None and world.receiver.report.state is ReceiveState.JOINED

        world.want(0, an_order(epoch=2))
        await world.until_reported(ReceiveState.RECEIVED, epoch=2)
        world.want(1)

        await world.until(lambda: world.gate.version == 1)
        assert world.engine.did == ["join 1", "receive 1", "join 2", "receive 1", "serve 1"]
        assert world.engine.loaded == []


async def test_who_is_left_out_of_the_next_epoch_loads_what_was_committed(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.engine.error = GroupBroken("Connection closed by peer")
        world.want(4, an_order(5))
        await world.until(lambda: world.engine.error is None)

        world.want(5)

        await world.until(lambda: world.gate.version == 5)
        assert world.engine.loaded == [5]


async def test_a_member_that_fails_says_so_and_loads_what_was_committed(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.engine.error = WeightTransferFailed("no such tensor")
        world.want(4, an_order(5))

        await world.until_reported(ReceiveState.FAILED, version=5)

        await world.until(lambda: world.engine.loaded == [4])


async def test_a_version_that_is_being_loaded_is_loaded_first(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=3) as world:
        world.engine.may_load.clear()
        world.want(4, an_order(5))
        await asyncio.sleep(0.01)
        assert world.engine.did == []

        world.engine.may_load.set()
        await world.until_reported(ReceiveState.RECEIVED, version=5)
        world.want(5)

        await world.until(lambda: world.gate.version == 5)
        assert world.engine.loaded == [4]


async def test_who_cannot_stop_sampling_in_time_says_so(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.engine.may_join.clear()
        order = an_order(5, phase=PREPARING).model_copy(update={"deadline_seconds": 0.01})

        world.want(4, order)

        await world.until_reported(ReceiveState.FAILED, version=5)
        assert world.receiver.report is not None and "did not stop sampling" in (world.receiver.report.detail or "")
        assert world.gate.version == 4


async def test_weights_that_an_evaluation_holds_are_not_written_over(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.want(4, an_order(5, phase=PREPARING), hold_version=4)
        await world.until_reported(ReceiveState.FAILED, version=5)
        assert world.receiver.report is not None and "holds version 4" in (world.receiver.report.detail or "")

        world.want(5, hold_version=4)
        await asyncio.sleep(0.01)
        assert (world.engine.did, world.engine.loaded) == ([], [])
        world.want(5)

        await world.until(lambda: world.gate.version == 5)


async def test_an_engine_that_dies_in_its_group_is_told(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.error = WorkerDied("killed by SIGKILL")

        world.want(0, an_order())

        await world.until(lambda: len(world.deaths) == 1)


async def test_an_epoch_that_follows_on_another_ends_what_is_done_for_that(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.engine.may_receive.clear()
        world.want(0, an_order())
        await world.until_reported(ReceiveState.JOINED)

        world.want(0, an_order(epoch=2))
        await world.until_reported(ReceiveState.JOINED, epoch=2)
        world.engine.may_receive.set()

        await world.until_reported(ReceiveState.RECEIVED, epoch=2)
        assert world.engine.did == ["join 1", "join 2", "receive 1"]


async def test_what_is_committed_is_served_before_the_engine_joins_for_the_next_version(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order())
        await world.until_reported(ReceiveState.RECEIVED)
        world.engine.may_serve.clear()

        world.want(1, an_order(2))  # the commit and the next order are seen in one look
        await asyncio.sleep(0.01)
        assert world.engine.did == ["join 1", "receive 1"]
        world.engine.may_serve.set()

        await world.until_reported(ReceiveState.RECEIVED, version=2)
        assert world.engine.did == ["join 1", "receive 1", "serve 1", "join 1", "receive 2"]
        assert world.gate.version == 1
        world.want(2)
        await world.until(lambda: world.gate.version == 2)
        assert world.engine.loaded == []


async def test_what_is_committed_is_served_though_the_next_order_is_withdrawn_meanwhile(tmp_path: Path) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order())
        await world.until_reported(ReceiveState.RECEIVED)
        world.engine.may_serve.clear()
        world.want(1, an_order(2))
        await asyncio.sleep(0.01)

        world.want(1)
        await asyncio.sleep(0.01)
        world.engine.may_serve.set()

        await world.until(lambda: world.gate.version == 1)
        assert world.engine.did == ["join 1", "receive 1", "serve 1"]
        assert (world.engine.loaded, world.engine.is_paused) == ([], False)


@pytest.mark.parametrize("hold", [None, 1], ids=["nobody", "an evaluation"])
async def test_what_is_committed_is_served_whoever_holds_it(tmp_path: Path, hold: int | None) -> None:
    async with a_world(tmp_path) as world:
        world.want(0, an_order())
        await world.until_reported(ReceiveState.RECEIVED)
        world.engine.may_serve.clear()

        world.want(1, an_order(2), hold_version=hold)
        await asyncio.sleep(0.01)
        world.engine.may_serve.set()

        last = ReceiveState.RECEIVED if hold is None else ReceiveState.FAILED
        await world.until_reported(last, version=2)
        assert (world.gate.version, world.engine.loaded) == (1, [])


async def test_an_evaluation_that_begins_before_the_first_tensor_keeps_the_weights(tmp_path: Path) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.want(4, an_order(5, phase=PREPARING))
        await world.until_reported(ReceiveState.JOINED, version=5)

        world.want(4, an_order(5), hold_version=4)

        await world.until_reported(ReceiveState.FAILED, version=5)
        assert (world.engine.did, world.engine.is_paused, world.gate.version) == (["join 1", "give up"], False, 4)


@pytest.fixture
def silent_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for who says nothing."""
    monkeypatch.setattr(receiver, "WORD_PHASES", 0.0003)
    monkeypatch.setattr(receiver, "EPOCH_PHASES", 0.0003)


async def test_it_samples_on_where_nobody_says_that_all_have_joined(tmp_path: Path, silent_gateway: None) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.want(4, an_order(5, phase=PREPARING))

        await world.until_reported(ReceiveState.FAILED, version=5)

        assert world.receiver.report is not None and "gateway" in (world.receiver.report.detail or "")
        assert (world.engine.did, world.engine.is_paused, world.gate.version) == (["join 1", "give up"], False, 4)
        world.want(4, an_order(5))  # all have joined, as the gateway knows, which is back
        world.want(5)
        await world.until(lambda: world.gate.version == 5)
        assert world.engine.loaded == [5]


async def test_it_loads_what_is_committed_where_nobody_commits_what_it_received(
    tmp_path: Path, silent_gateway: None
) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.want(4, an_order(5))

        await world.until_reported(ReceiveState.FAILED, version=5)

        await world.until(lambda: world.engine.loaded == [4])
        await world.until(lambda: world.gate.version == 4)
        world.want(5)  # the gateway is back, and had heard that it was received
        await world.until(lambda: world.gate.version == 5)
        assert world.engine.loaded == [4, 5]


async def test_what_was_received_is_kept_while_the_sender_opens_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "WORD_PHASES", 0.0003)
    async with a_world(tmp_path, serving=4) as world:
        world.want(4, an_order(5))
        await world.until_reported(ReceiveState.RECEIVED, version=5)

        world.want(4, an_order(5, epoch=2, phase=PREPARING).model_copy(update={"rendezvous": None}))
        await asyncio.sleep(0.03)

        assert world.engine.did == ["join 1", "receive 5"], "it takes longer than all members need to join"


async def test_it_loads_what_is_committed_where_no_epoch_follows_on_one_that_broke(
    tmp_path: Path, silent_gateway: None
) -> None:
    async with a_world(tmp_path, serving=4) as world:
        world.engine.error = GroupBroken("Connection closed by peer")
        world.want(4, an_order(5))

        await world.until(lambda: world.engine.loaded == [4])

        await world.until(lambda: world.gate.version == 4)
        world.want(4, an_order(5, epoch=2))
        await world.until(lambda: world.engine.did[-1] == "receive 5")
        assert world.engine.did[:-1] == ["join 1", "receive 5", "give up", "join 2"]


async def test_a_server_that_does_not_answer_keeps_nobody_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "CLOSE_SECONDS", 0.05)
    world = World(tmp_path)
    await world.gate.set(0)
    world.engine.may_join.clear()
    world.engine.ends_what_it_began = True
    running = asyncio.create_task(world.receiver.run())
    world.want(0, an_order(phase=PREPARING))
    await world.until(lambda: world.engine.is_asked)
    running.cancel()

    async with asyncio.timeout(5):
        await world.receiver.close()

    assert not running.done(), "the engine's own end ends this"
    world.engine.may_join.set()
    with pytest.raises(asyncio.CancelledError):
        await running
