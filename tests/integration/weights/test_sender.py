"""The process that sends: whatever happens to it, a pull goes on, nobody waits for ever, and no lock stays behind."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flotilla.shared.net.authorisation.tokens import Credentials
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.loopback import on_half_of_the_cores
from flotilla.shared.weights.pull import sender as sender_module
from flotilla.shared.weights.pull import sending
from flotilla.shared.weights.pull.client import WeightPuller
from flotilla.shared.weights.pull.sender import ProcessSender
from flotilla.shared.weights.pull.sending import NICENESS, Priority
from tests.integration.weights.processes import an_image
from tests.integration.weights.test_direct import answer_with_ticket, until_writable
from tests.integration.weights.test_pull import DEADLINE, TOKEN, Server, a_server


@pytest.fixture
def image() -> Iterator[WeightImage]:
    with an_image(num_megabytes=4) as made:
        yield made


@pytest.fixture
def sender() -> Iterator[ProcessSender]:
    made = ProcessSender()
    yield made
    made.close()


@contextlib.asynccontextmanager
async def a_sending_server(image: WeightImage, sender: ProcessSender) -> AsyncIterator[Server]:
    async with a_server() as server:
        with server.images.served_directly("127.0.0.1", sender):
            server.images.publish(3, image.path)
            yield server


async def pulled(server: Server, directory: Path) -> Path:
    return await WeightPuller(Credentials(TOKEN))(server.url(3), 3, directory, DEADLINE)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.005)


async def a_caller(server: Server) -> socket.socket:
    """Connect with a ticket for the whole image, and take only its first bytes."""
    answer = await answer_with_ticket(server, span="bytes=0-")
    connection = socket.create_connection(("127.0.0.1", int(answer.headers["flotilla-port"])), DEADLINE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(bytes.fromhex(answer.headers["flotilla-ticket"]))
    await asyncio.to_thread(connection.recv, 100)
    return connection


async def test_a_process_that_gives_way_to_training_sends_the_image(
    image: WeightImage, tmp_path: Path, sender: ProcessSender
) -> None:
    async with a_sending_server(image, sender) as server:
        server.faults.flip = True  # it would damage what is the answer's body

        path = await pulled(server, tmp_path)

        assert path.read_bytes() == image.view
        assert set(sender.pids) == {Priority.IDLE}
        assert os.sched_getscheduler(sender.pids[Priority.IDLE]) == os.SCHED_IDLE
        await until_writable(image)
    await until(lambda: not sender.pids)


CROWDED = """
import itertools
from flotilla.shared.weights.pull import sending

sending._waited_seconds = itertools.count(0, 1000).__next__
sending.serve(sending.Sender)
"""
"""A process that has waited a thousand seconds for a core whenever it looks."""


async def test_where_no_core_is_idle_another_process_goes_on_within_a_range(
    image: WeightImage, tmp_path: Path, sender: ProcessSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "COMMAND", [sys.executable, "-c", CROWDED])
    async with a_sending_server(image, sender) as server:
        path = await pulled(server, tmp_path)

        assert path.read_bytes() == image.view
        assert set(sender.pids) == {Priority.IDLE, Priority.LOW}
        low = sender.pids[Priority.LOW]
        assert os.sched_getscheduler(low) == os.SCHED_OTHER
        assert psutil.Process(low).nice() == min(psutil.Process().nice() + NICENESS, 19)
        os.kill(sender.pids[Priority.IDLE], signal.SIGKILL)
        path.unlink()
        assert (await pulled(server, tmp_path)).read_bytes() == image.view
        assert set(sender.pids) == {Priority.LOW}, "for a while no idle core is looked for"


@pytest.mark.parametrize(
    ("waits", "expected"),
    [(0.0, (4 << 20, False)), (sending.ALLOWED_SECONDS + 0.1, (sending.FIRST_BYTES, True))],
)
def test_who_needs_an_idle_core_stops_where_it_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: float, expected: tuple[int, bool]
) -> None:
    waited = iter([0.0, waits, waits, waits, waits])
    monkeypatch.setattr(sending, "_waited_seconds", lambda: next(waited))
    monkeypatch.setattr(sending, "SEND_BYTES", 1 << 20)
    (tmp_path / "image").write_bytes(bytes(4 << 20))

    with (tmp_path / "image").open("rb") as image, (tmp_path / "copy").open("xb") as target:
        sent = sending.send_range(target.fileno(), image.fileno(), range(4 << 20), needs_idle_core=True)

    assert sent == expected
    assert (tmp_path / "copy").stat().st_size == expected[0]


@pytest.mark.parametrize(("counts", "expected"), [("5 2000000000 1\n", 2.0), ("0 0 0\n", 7.0), (None, 7.0)])
def test_where_waiting_for_a_core_is_not_counted_all_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: str | None, expected: float
) -> None:
    monkeypatch.setattr(sending, "SCHEDULING", tmp_path / "schedstat")
    monkeypatch.setattr(sending.time, "monotonic", lambda: 7.0)
    if counts is not None:
        (tmp_path / "schedstat").write_text(counts)

    assert sending._waited_seconds() == expected


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no halves")
def test_on_loopback_both_ends_have_cores_of_their_own_until_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = os.sched_getaffinity(0)
    waited = iter([0.0, 0.0, sending.ON_HALF_SECONDS + 0.1, 9.0])
    seen = list[set[int]]()

    def next_waited() -> float:
        seen.append(os.sched_getaffinity(0))
        return next(waited)

    monkeypatch.setattr(sending, "_waited_seconds", next_waited)
    monkeypatch.setattr(sending, "SEND_BYTES", 1 << 20)
    (tmp_path / "image").write_bytes(bytes(3 << 20))

    with (tmp_path / "image").open("rb") as image, (tmp_path / "copy").open("xb") as target:
        sending.send_range(target.fileno(), image.fileno(), range(3 << 20), is_local=True)
    with on_half_of_the_cores(sends=False):
        receives = os.sched_getaffinity(0)

    before, half, still, after = seen
    assert before == after == os.sched_getaffinity(0) == everywhere
    assert half == still and half.isdisjoint(receives) and half | receives == everywhere


async def test_a_pull_goes_on_when_the_process_is_killed_within_a_range(
    image: WeightImage, tmp_path: Path, sender: ProcessSender
) -> None:
    async with a_sending_server(image, sender) as server:
        with await a_caller(server):
            first = sender.pids[Priority.IDLE]

            os.kill(first, signal.SIGKILL)
            path = await pulled(server, tmp_path)

        assert path.read_bytes() == image.view
        assert sender.pids[Priority.IDLE] != first
        await until_writable(image)


async def test_a_caller_that_takes_nothing_is_cut_off_and_the_lock_ends(
    image: WeightImage, sender: ProcessSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla.shared.weights.pull.direct.SILENCE_SECONDS", 0.2)
    async with a_sending_server(image, sender) as server:
        with await a_caller(server):
            await until_writable(image)


async def test_a_process_that_stands_still_is_given_up(
    image: WeightImage, tmp_path: Path, sender: ProcessSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "RANGE_SECONDS", 0.5)
    async with a_sending_server(image, sender) as server:
        with await a_caller(server):
            os.kill(sender.pids[Priority.IDLE], signal.SIGSTOP)

            path = await pulled(server, tmp_path)

        assert path.read_bytes() == image.view
        await until_writable(image)


async def test_closing_the_server_ends_the_process_and_what_it_sends(image: WeightImage, sender: ProcessSender) -> None:
    async with a_sending_server(image, sender) as server:
        connection = await a_caller(server)
        process = psutil.Process(sender.pids[Priority.IDLE])
    with connection:
        await until(lambda: not process.is_running())
        await until_writable(image)


async def test_where_no_process_can_be_started_a_thread_sends(
    image: WeightImage, tmp_path: Path, sender: ProcessSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "COMMAND", ["/no/such/program"])
    async with a_sending_server(image, sender) as server:
        path = await pulled(server, tmp_path)

    assert path.read_bytes() == image.view
    assert sender.pids == {}


def test_the_process_ends_with_its_service() -> None:
    program = (
        "import tempfile\n"
        "from pathlib import Path\n"
        "from flotilla.shared.weights.image.image import WeightImage\n"
        "from flotilla.shared.weights.pull.sender import ProcessSender\n"
        "import time\n"
        "sender = ProcessSender()\n"
        "with tempfile.TemporaryDirectory() as folder, WeightImage.create(4096, directory=Path(folder)) as image:\n"
        "    with open(Path(folder) / 'copy', 'xb', buffering=0) as file:\n"
        "        sender.copy(file, image)\n"
        "print(*sender.pids.values(), flush=True)\n"
        "time.sleep(60)\n"
    )
    service = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert service.stdout is not None
    process = psutil.Process(int(service.stdout.readline()))

    service.kill()

    service.communicate()
    _, alive = psutil.wait_procs([process], timeout=DEADLINE)
    assert alive == []


def test_an_image_is_copied_to_a_file_and_a_full_disk_is_an_error(
    image: WeightImage, tmp_path: Path, sender: ProcessSender
) -> None:
    with (tmp_path / "copy").open("xb", buffering=0) as file:
        sender.copy(file, image)
    assert (tmp_path / "copy").read_bytes() == image.view

    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="of"):
        sender.copy(full, image)


def test_many_threads_may_send_at_once(image: WeightImage, tmp_path: Path, sender: ProcessSender) -> None:
    def copy(number: int) -> None:
        with (tmp_path / str(number)).open("xb", buffering=0) as file:
            sender.copy(file, image)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    ends_at = time.monotonic() + DEADLINE
    for thread in threads:
        thread.join(ends_at - time.monotonic())

    assert all((tmp_path / str(number)).read_bytes() == image.view for number in range(8))
