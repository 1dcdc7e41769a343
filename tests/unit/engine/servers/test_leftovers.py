"""What a killed server left in shared memory is removed, by whoever is left; nothing of another's ever is."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flotilla.services.rollout.engines.servers import leftovers
from flotilla.services.rollout.engines.servers.connection import ServerProcess
from flotilla.services.rollout.engines.servers.dialect import Launch
from flotilla.services.rollout.engines.servers.model import PREFIX, sweep_places

PREFIXES = ("made_up_loads_",)
MAPPING = """
import mmap, os, sys, time
names = []
for name in sys.argv[2:]:
    descriptor = os.open(f"{sys.argv[1]}/{name}", os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, 4096)
    names.append(mmap.mmap(descriptor, 4096))
open("ready", "w").close()
time.sleep(1000)
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes the place of ``/dev/shm``."""
    made = tmp_path / "shm"
    made.mkdir()
    for function in (leftovers.note, leftovers.remove):
        assert function.__kwdefaults__ is not None
        monkeypatch.setitem(function.__kwdefaults__, "directory", made)
    return made


async def started(place: Path, directory: Path, *names: str) -> ServerProcess:
    """Start what maps files of these names."""
    place.mkdir()
    launch = Launch(
        ("-c", MAPPING, str(directory), *names), {"PATH": os.defpath}, "http://127.0.0.1:1", shared_memory=PREFIXES
    )
    server = ServerProcess(Path(sys.executable), launch, place, name="SGLang", variable="FLOTILLA_SGLANG_PYTHON")
    await server.start()
    async with asyncio.timeout(20):
        while not (place / "ready").exists():
            await asyncio.sleep(0.01)
    return server


@contextmanager
def of_another(directory: Path) -> Iterator[Path]:
    """Let somebody else's server have a file with such a name mapped."""
    cwd = directory.parent / "another"
    cwd.mkdir()
    command = [sys.executable, "-c", MAPPING, str(directory), "made_up_loads_theirs"]
    with subprocess.Popen(command, cwd=cwd, start_new_session=True) as theirs:
        try:
            while not (cwd / "ready").exists():
                assert theirs.poll() is None
            yield directory / "made_up_loads_theirs"
        finally:
            theirs.kill()


async def test_what_a_server_had_mapped_goes_when_it_is_dead(tmp_path: Path, directory: Path) -> None:
    with of_another(directory) as theirs:
        server = await started(tmp_path / "place", directory, "made_up_loads_1", "image-of-ours")
        await server.note_leftovers()
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGKILL)
        await server.ended()

        await server.close(1.0)

        assert {path.name for path in directory.iterdir()} == {theirs.name, "image-of-ours"}


async def test_a_server_that_ends_by_itself_leaves_nothing_either(tmp_path: Path, directory: Path) -> None:
    server = await started(tmp_path / "place", directory, "made_up_loads_1")

    await server.close(1.0)

    assert not list(directory.iterdir())


async def test_a_server_is_ended_though_nothing_can_be_noted(tmp_path: Path, directory: Path) -> None:
    server = await started(tmp_path / "place", directory, "made_up_loads_1")
    (tmp_path / "place" / leftovers.NOTES).mkdir()  # as on a full disk: it cannot be written

    await server.close(1.0)

    assert server.process_id is None


async def test_the_next_start_removes_what_is_left_where_the_rollout_was_killed(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    place = tmp_path / f"{PREFIX}{int(ended.stdout)}-abc"
    server = await started(place, directory, "made_up_loads_1")
    await server.note_leftovers()
    notes = (place / leftovers.NOTES).read_text()
    assert server.process_id is not None
    os.killpg(server.process_id, signal.SIGKILL)
    await server.ended()

    with of_another(directory) as theirs:
        assert sweep_places() == [place]

        assert notes == "made_up_loads_1\n"
        assert list(directory.iterdir()) == [theirs]
    await server.close(1.0)


def test_a_note_that_is_half_written_removes_nothing(tmp_path: Path, directory: Path) -> None:
    (directory / "made_up_loads_1").touch()
    (directory / "made_up_loads_12").touch()
    (tmp_path / leftovers.NOTES).write_text("made_up_loads_12\nmade_up_loads_1")

    assert leftovers.remove(tmp_path) == ["made_up_loads_12"]
    assert [path.name for path in directory.iterdir()] == ["made_up_loads_1"]
