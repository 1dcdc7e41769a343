"""Nothing of a server outlives its owner, in whatever phase of its start that one is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import until
from tests.marked_processes import MARK, marked

OWNER = """
import asyncio, os, sys
from pathlib import Path
from flotilla.services.rollout.engines.servers.dialect import Launch
from flotilla.services.rollout.engines.servers.connection import ServerProcess

async def main(place, phases):
    servers = []
    for phase in phases:
        arguments = ("-I", "-S", str(place / "server.py"), str(place), phase)
        launch = Launch(arguments, {"PATH": os.defpath, sys.argv[2]: str(place)}, "http://127.0.0.1:1")
        server = ServerProcess(Path(sys.executable), launch, place, name="fake", variable="FAKE_PYTHON")
        servers.append(server)
        await server.start()
        (place / f"{phase} started").touch()
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), sys.argv[3:]))
"""
SERVER = """
import os, signal, sys, time
from multiprocessing import shared_memory
from pathlib import Path

place, stops_at = Path(sys.argv[1]), sys.argv[2]

def reach(phase):
    if phase == stops_at:
        (place / phase).touch()
        while True:
            time.sleep(100)

reach("loading")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    reach("has a child")
    memory = shared_memory.SharedMemory(create=True, size=1000)
    (place / f"memory of {stops_at}").write_text(memory.name)
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        reach("has a child of a child that is gone")
        reach("has ended but for those")
    os._exit(0)
if stops_at == "has ended but for those":
    os._exit(0)
time.sleep(1000)
"""
PHASES = ["loading", "has a child", "has a child of a child that is gone", "has ended but for those"]


def an_owner(place: Path, *phases: str) -> subprocess.Popen[bytes]:
    (place / "server.py").write_text(SERVER)
    return subprocess.Popen([sys.executable, "-P", "-c", OWNER, str(place), MARK, *phases])


@pytest.mark.parametrize("phases", [PHASES, ["at once"]], ids=["once it runs", "at once"])
def test_an_owner_that_is_killed_leaves_nothing_of_its_servers(tmp_path: Path, phases: list[str]) -> None:
    owner = an_owner(tmp_path, *phases)
    reached = [tmp_path / (f"{phase} started" if phase == "at once" else phase) for phase in phases]
    until(lambda: all(each.exists() for each in reached), 20, "every phase to be reached")
    assert len(marked(tmp_path)) >= len(phases)

    owner.kill()
    owner.wait()

    until(lambda: not marked(tmp_path), 20, "everything of its servers to end")
    made = [Path("/dev/shm", each.read_text()) for each in tmp_path.glob("memory of *")]
    # One that is killed at once may be as far as that, on a machine that is idle.
    assert len(made) == 2 or phases != PHASES
    assert not [each for each in made if each.exists()], "shared memory is left"
