"""Weight groups of real processes: transfers, and every way that a member can fail in one."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from flotilla.shared.errors import Conflict, DeadlineExceeded, NotFound, WeightTransferFailed
from flotilla.shared.schemas.publication import Rendezvous
from flotilla.shared.weights.group.endpoint_client import EndpointClient
from flotilla.shared.weights.image.image import WeightImage
from tests.integration.weights.processes import (
    Fleet,
    Receiver,
    a_fleet,
    endpoint_processes,
    images_of_this_process,
    member_process,
)

DEADLINE = 60.0
SHORT_DEADLINE = 5.0
SLACK_SECONDS = 10.0
"""What a crowded machine may add to a deadline, without reaching the next longer one."""
NEXT_EPOCH_SECONDS = 30.0
"""Less than the deadline of a group that waits for a dead member; how fast it is, whole fleets show."""
PAUSE_SECONDS = 2.0
"""How long a transfer is held after its first slice, so that a fault meets it half done on any machine."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the switches of faults are."""
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
async def clients(marks: Path) -> AsyncIterator[list[EndpointClient]]:
    """Four services' endpoints, which the tests use one after the other; at the end nothing of them may be left."""
    made = [EndpointClient() for _ in range(4)]
    with pytest.MonkeyPatch.context() as patched:
        pause = f"weights.send slow in=weights slices=1 seconds={PAUSE_SECONDS} while=pause"
        patched.setenv("FLOTILLA_FAULTS", f"marks={marks}; {pause}")
        await asyncio.gather(*(client.start() for client in made))
    yield made
    for client in made:
        await client.close()
    assert endpoint_processes() == []
    assert images_of_this_process() == set()


@pytest.fixture
def paused(marks: Path) -> Iterator[None]:
    """Let a transfer pause after its first slice."""
    switch = marks / "pause"
    switch.touch()
    yield
    switch.unlink()


@pytest.mark.parametrize("num_receivers", [1, 3])
async def test_every_receiver_gets_the_image_and_its_checksum(
    clients: list[EndpointClient], num_receivers: int
) -> None:
    async with a_fleet(clients, num_receivers, num_megabytes=20) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)

        for _ in range(2):
            checksums = await fleet.transfer(1, fleet.receivers, DEADLINE)

        assert checksums == [fleet.manifest.checksum] * num_receivers
        for receiver in fleet.receivers:
            assert receiver.image.view == fleet.source.view


async def test_a_receiver_tells_how_much_has_arrived(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, num_receivers=1, num_megabytes=20) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        [receiver], manifest = fleet.receivers, fleet.manifest
        told: list[int] = []
        facts = (1, receiver.image.path, manifest.image_bytes, manifest.slice_bytes, DEADLINE)

        await asyncio.gather(fleet.send(1, DEADLINE), receiver.client.receive(*facts, told.append))
        await asyncio.gather(fleet.send(1, DEADLINE), receiver.client.receive(*facts))

    slices = range(manifest.slice_bytes, manifest.image_bytes, manifest.slice_bytes)
    assert told == [*slices, manifest.image_bytes]


async def _fail(fleet: Fleet, epoch: int, survivors: list[Receiver], deadline_seconds: float) -> list[object]:
    """Transfer to the survivors while another member is missing; all of them must fail in time."""
    started = time.monotonic()
    results = await asyncio.gather(
        fleet.send(epoch, deadline_seconds),
        *(fleet.receive(receiver, epoch, deadline_seconds) for receiver in survivors),
        return_exceptions=True,
    )
    assert time.monotonic() - started < deadline_seconds + SLACK_SECONDS
    return results


async def _assert_next_epoch_works(fleet: Fleet, failed: int, receivers: list[Receiver]) -> None:
    started = time.monotonic()
    await fleet.close_epoch(failed)
    await fleet.form(failed + 1, receivers, DEADLINE)
    checksums = await fleet.transfer(failed + 1, receivers, DEADLINE)
    assert checksums == [fleet.manifest.checksum] * len(receivers)
    assert time.monotonic() - started < NEXT_EPOCH_SECONDS


async def test_a_receiver_killed_before_the_transfer_is_left_out_of_the_next_epoch(
    clients: list[EndpointClient],
) -> None:
    async with a_fleet(clients, 3, num_megabytes=40) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        survivors = fleet.receivers[:2]
        member_process(fleet.receivers[2].client, 1).kill()

        results = await _fail(fleet, 1, survivors, SHORT_DEADLINE)

        assert any(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in results)
        await _assert_next_epoch_works(fleet, 1, survivors)


@pytest.mark.usefixtures("paused")
async def test_a_receiver_killed_in_the_middle_is_left_out_of_the_next_epoch(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 3, num_megabytes=40) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        *survivors, victim = fleet.receivers
        dying = asyncio.create_task(fleet.receive(victim, 1, DEADLINE))
        failing = asyncio.create_task(_fail(fleet, 1, survivors, SHORT_DEADLINE))
        await _begun(victim.image)
        process = member_process(victim.client, 1)

        process.kill()

        with pytest.raises(WeightTransferFailed, match="ended with code -9"):
            await dying
        assert any(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in await failing)
        await _assert_next_epoch_works(fleet, 1, survivors)


@pytest.mark.usefixtures("paused")
async def test_a_stopped_receiver_costs_one_deadline(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 2, num_megabytes=40) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        survivor, victim = fleet.receivers
        stuck = asyncio.create_task(fleet.receive(victim, 1, SHORT_DEADLINE))
        failing = asyncio.create_task(_fail(fleet, 1, [survivor], SHORT_DEADLINE))
        await _begun(victim.image)

        member_process(victim.client, 1).suspend()

        results = await failing
        with pytest.raises(DeadlineExceeded):
            await stuck
        assert any(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in results)
        await _assert_next_epoch_works(fleet, 1, [survivor])


@pytest.mark.usefixtures("paused")
async def test_a_killed_sender_fails_its_receivers_and_sends_again(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 2, num_megabytes=40) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        failing = asyncio.create_task(_fail(fleet, 1, fleet.receivers, SHORT_DEADLINE))
        await _begun(fleet.receivers[0].image)

        member_process(fleet.sender, 1).kill()

        sent, *received = await failing
        assert isinstance(sent, WeightTransferFailed)
        assert "ended with code -9" in str(sent)
        assert all(isinstance(result, WeightTransferFailed | DeadlineExceeded) for result in received)
        await _assert_next_epoch_works(fleet, 1, fleet.receivers)


async def _begun(image: WeightImage) -> None:
    """Wait until the first slice of a transfer is there."""
    async with asyncio.timeout(DEADLINE):
        while not any(image.view[:8]):
            await asyncio.sleep(0.001)


async def test_closing_an_epoch_frees_a_stuck_member_at_once(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        stuck = asyncio.create_task(fleet.receive(fleet.receivers[0], 1, DEADLINE))
        await asyncio.sleep(0.1)  # into the collective; that it is stuck there cannot be seen from outside
        process = member_process(fleet.receivers[0].client, 1)
        started = time.monotonic()

        await fleet.receivers[0].client.close_epoch(1)

        assert time.monotonic() - started < SLACK_SECONDS
        assert has_ended(process)
        with pytest.raises(WeightTransferFailed, match="was closed"):
            await stuck


async def test_a_member_that_is_missing_is_a_deadline_exceeded(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        rendezvous = await fleet.sender.open_sender(1, 3, DEADLINE)
        await fleet.receivers[0].client.open_receiver(rendezvous, 1, DEADLINE)

        with pytest.raises(DeadlineExceeded):
            await fleet.sender.joined(1, 1.0)


async def test_a_store_that_is_not_there_fails_the_joining(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        nowhere = Rendezvous(host="127.0.0.1", port=1, epoch=1, world_size=2)
        await fleet.receivers[0].client.open_receiver(nowhere, 1, 1.0)

        with pytest.raises((WeightTransferFailed, DeadlineExceeded)):
            await fleet.receivers[0].client.joined(1, 3.0)


async def test_an_image_of_another_size_is_refused_by_the_member(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)

        with pytest.raises(WeightTransferFailed, match="the manifest says 5"):
            await fleet.sender.send(1, fleet.source.path, 5, 5, DEADLINE)
        with pytest.raises(WeightTransferFailed, match="the manifest says 5"):
            await fleet.send(1, DEADLINE)


async def test_epochs_open_once_and_only_open_ones_can_be_used(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        await fleet.sender.open_sender(1, 2, DEADLINE)

        with pytest.raises(Conflict):
            await fleet.sender.open_sender(1, 2, DEADLINE)
        with pytest.raises(NotFound):
            await fleet.send(2, DEADLINE)
        await fleet.sender.close_epoch(2)


async def test_the_store_listens_on_the_bound_address_alone(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)

        for client in (fleet.sender, fleet.receivers[0].client):
            listening = [c for c in member_process(client, 1).net_connections() if c.status == psutil.CONN_LISTEN]
            assert listening
            assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


async def test_a_sender_on_all_interfaces_is_reached_at_its_advertised_address() -> None:
    async with EndpointClient(bind_host="0.0.0.0", advertise_host="127.0.0.1") as sender, EndpointClient() as receiver:
        rendezvous = await sender.open_sender(1, 2, DEADLINE)
        assert rendezvous.host == "127.0.0.1"
        await receiver.open_receiver(rendezvous, 1, DEADLINE)

        await asyncio.gather(sender.joined(1, DEADLINE), receiver.joined(1, DEADLINE))


async def test_a_closed_epoch_frees_its_port(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        rendezvous = await fleet.sender.open_sender(1, 2, DEADLINE)
        _, writer = await asyncio.open_connection(rendezvous.host, rendezvous.port)
        writer.close()

        await fleet.sender.close_epoch(1)

        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(rendezvous.host, rendezvous.port)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or waits for a new parent to take note of its end."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_an_endpoint_that_died_is_started_again(clients: list[EndpointClient]) -> None:
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        process = member_process(fleet.sender, 1)
        process.parent().kill()

        with pytest.raises(WeightTransferFailed, match="endpoint ended"):
            await fleet.send(1, DEADLINE)
        await _assert_next_epoch_works(fleet, 1, fleet.receivers)
        assert has_ended(process)


async def test_a_stopped_endpoint_can_be_closed(clients: list[EndpointClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.shared.weights.group.endpoint_client.KILL_SECONDS", 0.3)
    async with a_fleet(clients, 1, num_megabytes=1) as fleet:
        await fleet.form(1, fleet.receivers, DEADLINE)
        member_process(fleet.sender, 1).parent().suspend()

        await fleet.sender.close_epoch(1)


async def test_everything_ends_with_its_service() -> None:
    program = (
        "import asyncio\n"
        "from flotilla.shared.weights.group.endpoint_client import EndpointClient\n"
        "async def main():\n"
        "    client = EndpointClient()\n"
        "    await client.open_sender(1, 2, 60)\n"
        "    print(client.member_pid(1), flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert service.stdout is not None
    member = psutil.Process(int(await service.stdout.readline()))
    endpoint = member.parent()
    member.suspend()

    os.kill(service.pid, signal.SIGKILL)

    await service.wait()
    _, alive = psutil.wait_procs([member, endpoint], timeout=DEADLINE)
    assert alive == []


async def test_the_client_imports_no_torch() -> None:
    program = "import sys; from flotilla.shared.weights.group import endpoint_client; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)

    assert await process.wait() == 0


async def test_a_client_that_never_started_can_be_closed() -> None:
    before = endpoint_processes()

    await EndpointClient().close()

    assert endpoint_processes() == before
