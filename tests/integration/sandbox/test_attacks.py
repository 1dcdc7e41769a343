"""Every attack at every level that this machine offers. Levels C and D need no bwrap."""

import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from flotilla.services.sandbox import executor, processors, spare_time
from flotilla.services.sandbox import state as state_module
from flotilla.services.sandbox.fork_servers import ForkServer
from flotilla.services.sandbox.guard import landlock
from flotilla.services.sandbox.guard.watch import descendants
from flotilla.services.sandbox.processors import ProcessorGroups
from flotilla.services.sandbox.slots import living_processes_of, sweep
from flotilla.services.sandbox.spare_time import SpareTime
from flotilla.services.sandbox.state import SandboxState
from flotilla.shared.host.control_groups import find_mounts
from flotilla.shared.schemas.sandbox import CommandStatus, RunStatus
from tests.integration.sandbox import attacks
from tests.integration.sandbox.attacks import SIMPLE, Simple
from tests.integration.sandbox.running import a_sandbox, run

ISOLATING = ["A", "B", "C"]
SECRET = "secret-of-the-service-7d1f"
ENDING_SECONDS = 10.0
UID_OF_ITS_OWN = 61790
SERVICE_THAT_DIES = f"""
import asyncio
from tests.integration.sandbox.running import a_sandbox, run

async def main():
    async with a_sandbox("C", concurrency=1, uid_base={UID_OF_ITS_OWN}) as state:
        await run(state, "import time; time.sleep(200)", run_timeout=200)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=ISOLATING)
async def state(request: pytest.FixtureRequest) -> AsyncIterator[SandboxState]:
    """One sandbox per level for all attacks, as in service: what one of them spoils, the others see."""
    async with a_sandbox(request.param) as opened:
        yield opened


@pytest.fixture(scope="module", params=ISOLATING)
async def one_slot(request: pytest.FixtureRequest) -> AsyncIterator[SandboxState]:
    """One sandbox per level where each program runs in the slot of the one before."""
    async with a_sandbox(request.param, concurrency=1) as opened:
        yield opened


@pytest.fixture
def host_file() -> Iterator[Path]:
    """A file that every user of the host may read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        file = Path(name, "readable")
        file.write_text("of the host")
        file.chmod(0o644)
        yield file


@pytest.mark.parametrize("attack", SIMPLE, ids=lambda attack: attack.name)
async def test_an_attack_is_stopped(state: SandboxState, attack: Simple) -> None:
    if attack.code is attacks.KERNEL and platform.machine() != "x86_64":
        pytest.skip("the attack calls the kernel by x86_64 numbers; the unit tests cover the other table")
    answer = await run(state, attack.code, run_timeout=attack.timeout)

    assert answer.status is not RunStatus.SANDBOX_ERROR, answer
    assert answer.run_result is not None
    assert "BREACH" not in (answer.run_result.stdout or ""), answer
    # It got as far as the attack: a program that fails at its first line proves nothing.
    assert "SyntaxError" not in (answer.run_result.stderr or ""), answer
    assert "NameError" not in (answer.run_result.stderr or ""), answer


@pytest.mark.parametrize("code", [attacks.DEEP, attacks.LONG_PATHS, attacks.UNREADABLE_AND_DEEP])
async def test_a_program_does_not_spoil_the_slot_for_the_next(one_slot: SandboxState, code: str) -> None:
    await run(one_slot, code)
    answer = await run(one_slot, "print('fine')")

    assert answer.status is RunStatus.SUCCESS, answer
    assert answer.run_result is not None and answer.run_result.stdout == "fine\n"
    assert one_slot.executor.num_spoiled == 0


async def test_a_slot_that_cannot_be_cleaned_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(5, f"the disk does not answer for {path}")

    servers: list[int] = []

    async def observed(uid: int, python: str) -> None:
        servers.append(len(state.executor.servers()))
        await sweep(uid, python)

    async with a_sandbox("C", concurrency=1) as state:
        with monkeypatch.context() as patched:
            patched.setattr(executor, "remove_tree", fail)
            patched.setattr(executor, "sweep", observed)
            first = await run(state, "import os; os.mkdir('left'); print(os.getcwd())")
        second = await run(state, "import os; print(os.getcwd())")

        # What is known of the program stays true, and its slot is not handed out again.
        assert first.status is second.status is RunStatus.SUCCESS
        assert first.run_result is not None and second.run_result is not None
        assert first.run_result.stdout != second.run_result.stdout
        assert (state.executor.num_spoiled, state.pool.num_out_of_use) == (1, 0)
        # A server's next guard has the uid that is swept, and there would always be another one.
        assert set(servers) <= {0}


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives programs a uid of their own")
async def test_a_slot_whose_processes_live_waits_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(uid: int, python: str) -> None:
        raise TimeoutError(f"{uid}, {python}")

    async def is_not_empty(self: ForkServer) -> bool:
        return False

    async with a_sandbox("C", concurrency=1, queue_seconds=5.0) as state:
        with monkeypatch.context() as patched:
            patched.setattr(executor, "sweep", fail)
            patched.setattr(ForkServer, "is_empty", is_not_empty)
            await run(state, "print('first')")
            assert state.pool.num_out_of_use == 1
        answer = await run(state, "print('second')")

        assert answer.status is RunStatus.SUCCESS
        assert state.pool.num_out_of_use == 0


async def test_who_comes_next_does_not_wait_for_a_server_that_a_program_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_not_empty(self: ForkServer) -> bool:
        return False

    async with a_sandbox("C", concurrency=1) as state:
        (before,) = state.executor.servers()
        with monkeypatch.context() as patched:
            patched.setattr(ForkServer, "is_empty", is_not_empty)
            await run(state, "print('first')")
        (after,) = state.executor.servers()

        assert before is not after
        assert (before.is_usable, after.is_usable, after.num_runs) == (False, True, 0)
    assert not after.is_usable


async def test_time_that_others_take_does_not_count() -> None:
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]
    code = "import time\nwhile time.process_time() < 0.6: pass\nprint('done')"
    try:
        async with a_sandbox("C", concurrency=1) as state:
            answer = await run(state, code, run_timeout=2.0)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()

    assert answer.status is RunStatus.SUCCESS, answer


async def test_time_in_which_a_program_is_bounded_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    if ProcessorGroups.find(find_mounts(), shares=2, processors=1, spare=cast(SpareTime, None)) is None:
        pytest.skip("this service may not make groups of the processors")
    # Others want all of the machine, and each caller has used much at once.
    monkeypatch.setattr(state_module, "read_busy_seconds", lambda: 2.0 * time.monotonic() * (os.cpu_count() or 1))
    monkeypatch.setattr(spare_time, "SCARCE_PART", 1e-6)
    monkeypatch.setattr(spare_time, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(processors, "LONG_PART", 1)  # what this machine does otherwise is not to hold it, too
    right = "import time\nwhile time.process_time() < 0.4: pass\nprint('done')"

    async with a_sandbox("C", concurrency=1, busy_part=0.001) as state:
        answer = await run(state, right, run_timeout=1.0)

    assert answer.status is RunStatus.SUCCESS, answer
    assert answer.run_result is not None
    assert (answer.run_result.execution_time or 0.0) > 1.0, "it was bounded"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives programs a uid of their own")
async def test_a_program_ends_with_the_service() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE_THAT_DIES, stdin=asyncio.subprocess.PIPE
    )
    try:
        await asyncio.wait_for(_until(lambda: len(living_processes_of(UID_OF_ITS_OWN)) >= 2), 60)
    finally:
        process.kill()
        await process.wait()

    await asyncio.wait_for(_until(lambda: not living_processes_of(UID_OF_ITS_OWN)), ENDING_SECONDS)


async def _until(is_so: Callable[[], object]) -> None:
    while not await asyncio.to_thread(is_so):
        await asyncio.sleep(0.05)


async def test_the_network_is_closed(state: SandboxState) -> None:
    connections = 0

    def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    abstract = uuid.uuid4().hex
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(f"\0{abstract}")
        listening.listen()
        async with server:
            counted_before = connections
            answer = await run(state, attacks.NETWORK, stdin=f"{host} {port} {abstract}")

    stdout = answer.run_result.stdout if answer.run_result else None
    assert stdout is not None and "BREACH" not in stdout
    assert stdout.count("stopped") == 5
    assert connections == counted_before


async def test_the_hosts_files_cannot_be_read(state: SandboxState, host_file: Path) -> None:
    here = str(Path(__file__).resolve())
    paths = ["/etc/shadow", "/etc/passwd", str(host_file), here, "/proc/1/maps", "/sys/kernel/vmcoreinfo"]
    if state.executor.isolation.level.value in "AB":
        # A private root may have an own file of that name; what counts is that it is not the host's.
        paths.remove("/proc/1/maps")

    answer = await run(state, attacks.FILES, stdin="\n".join(paths))

    stdout = answer.run_result.stdout if answer.run_result else None
    assert stdout is not None and "BREACH" not in stdout
    assert stdout.count("stopped") == len(paths)


async def test_no_environment_holds_a_secret(state: SandboxState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", SECRET)

    answer = await run(state, attacks.ENVIRONMENT)

    assert answer.status is RunStatus.SUCCESS
    assert SECRET not in answer.model_dump_json()
    assert "PATH" in (answer.run_result.stdout or "") if answer.run_result else False


async def test_foreign_processes_cannot_be_signalled(state: SandboxState) -> None:
    victim = await asyncio.create_subprocess_exec("sleep", "60", env={})
    try:
        # In a process namespace these numbers mean other processes or none; the victim's survival is the test.
        pids = f"{victim.pid} {os.getpid()}"
        await run(state, attacks.SIGNALS, stdin=pids)
        await run(state, "import os; os.kill(-1, 9)", run_timeout=5)
        after = await run(state, "print('works')")
    finally:
        survived = victim.returncode is None
        if survived:
            victim.kill()
        await victim.wait()

    assert survived
    assert after.status is RunStatus.SUCCESS


async def test_an_endless_loop_ends_at_its_time(state: SandboxState) -> None:
    started = time.monotonic()
    # Less than after which a program takes long: a busy machine gives it that much at once.
    answer = await run(state, attacks.ENDLESS, run_timeout=0.2)

    assert answer.run_result is not None
    assert answer.run_result.status is CommandStatus.TIME_LIMIT_EXCEEDED
    assert answer.status is RunStatus.FAILED
    assert 0.2 <= answer.run_result.execution_time <= 20
    assert time.monotonic() - started < 30


async def test_a_fork_bomb_ends_and_leaves_nothing(state: SandboxState) -> None:
    answer = await run(state, attacks.FORK_BOMB, run_timeout=1.5)
    after = await run(state, "print('works')")

    assert answer.status is RunStatus.FAILED
    assert after.status is RunStatus.SUCCESS
    assert await survivors_of(state) == []


async def test_a_daemonised_orphan_is_ended(state: SandboxState) -> None:
    name = f"orphan-{uuid.uuid4().hex}"

    answer = await run(state, attacks.ORPHAN, stdin=name)

    assert answer.run_result is not None
    assert answer.run_result.stdout == "started\n", answer
    assert processes_called(name) == []


async def test_a_program_that_kills_its_guard_fails(state: SandboxState) -> None:
    answer = await run(state, attacks.KILL_GUARD, run_timeout=8)

    stdout = (answer.run_result.stdout or "") if answer.run_result else ""
    assert answer.status is RunStatus.FAILED or "stopped" in stdout, answer
    assert await survivors_of(state) == []


async def test_the_guards_answer_cannot_be_forged(state: SandboxState) -> None:
    answer = await run(state, attacks.FORGE)

    assert answer.status is RunStatus.FAILED
    assert answer.run_result is not None
    assert answer.run_result.return_code == -9
    assert "BREACH" not in (answer.run_result.stdout or "")


@pytest.mark.parametrize("level", ["A", "B"])
async def test_the_namespaces_first_process_cannot_be_read(level: str) -> None:
    if landlock.version() == 0:
        pytest.skip("the kernel has no Landlock")
    async with a_sandbox(level) as state:
        answer = await run(state, attacks.FILES, stdin="/proc/1/maps /proc/1/environ /proc/1/auxv")

    assert answer.run_result is not None
    assert (answer.run_result.stdout or "").count("stopped") == 3


@pytest.mark.parametrize("level", ISOLATING)
async def test_output_is_cut(level: str) -> None:
    async with a_sandbox(level, limits={"output_bytes": 1000}) as state:
        answer = await run(state, attacks.FLOOD)

    assert answer.status is RunStatus.SUCCESS
    assert answer.run_result is not None
    assert answer.run_result.stdout == "x" * 1000 + "\n[output cut after 1000 bytes]\n"
    assert answer.run_result.stderr == "y" * 1000 + "\n[output cut after 1000 bytes]\n"


async def test_fetching_follows_no_link(state: SandboxState) -> None:
    wanted = ("link", "directory/passwd", "pipe", "real", "real/file", "missing")

    answer = await run(state, attacks.LINKS, fetch_files=wanted)

    assert answer.files == {"real/file": "bWluZQ=="}
    for path in ("link", "directory/passwd", "pipe", "real"):
        assert f"{path} was not fetched" in answer.message


async def test_one_program_finds_nothing_of_the_one_before(one_slot: SandboxState) -> None:
    leave = "import os\nopen('left', 'w').write('x')\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.chmod('d', 0)"

    await run(one_slot, leave)
    answer = await run(one_slot, "import os\nprint(sorted(os.listdir('.')))")

    assert answer.run_result is not None
    assert answer.run_result.stdout == "['main.py']\n"


async def test_programs_at_the_same_time_do_not_meet(state: SandboxState) -> None:
    look = (
        "import os, time\ntime.sleep(0.3)\nopen('mine', 'w').close()\ntime.sleep(0.3)\nprint(sorted(os.listdir('.')))"
    )

    answers = await asyncio.gather(run(state, look), run(state, attacks.FORK_BOMB, run_timeout=1.0))

    assert answers[0].run_result is not None
    assert answers[0].run_result.stdout == "['main.py', 'mine']\n", answers[0]


async def test_without_isolation_the_attacks_do_get_through(host_file: Path) -> None:
    # The control: what the other tests see stopped is not stopped by a mistake in the attack.
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        async with a_sandbox("D") as state:
            network = await run(state, attacks.NETWORK, stdin=f"{host} {port} x")
            files = await run(state, attacks.FILES, stdin=str(host_file))
            kernel = await run(state, attacks.KERNEL)

    outputs = [(answer.run_result.stdout or "") if answer.run_result else "" for answer in (network, files, kernel)]
    assert "BREACH tcp" in outputs[0]
    assert "BREACH" in outputs[1]
    if platform.machine() == "x86_64":
        assert "BREACH memfd" in outputs[2]
        assert "BREACH not dumpable" in outputs[2]


async def test_level_d_still_limits_and_cleans_up() -> None:
    name = f"orphan-{uuid.uuid4().hex}"

    async with a_sandbox("D") as state:
        huge = await run(state, attacks.ONE_HUGE_PROCESS)
        endless = await run(state, attacks.ENDLESS, run_timeout=0.5)
        await run(state, attacks.ORPHAN, stdin=name)

        assert huge.status is RunStatus.FAILED
        assert endless.run_result is not None
        assert endless.run_result.status is CommandStatus.TIME_LIMIT_EXCEEDED
        assert processes_called(name) == []


def processes_called(name: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and name.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


async def survivors_of(state: SandboxState) -> list[int]:
    """List what lives of the slots' uids besides idle fork servers; the last program's may just be about to end."""
    uids = [slot.uid for slot in state.pool.slots if slot.uid is not None]
    end = time.monotonic() + ENDING_SECONDS
    while True:
        idle = {pid for server in state.executor.servers() for pid in _tree(server.process.pid)}
        found = [pid for uid in uids for pid in living_processes_of(uid) if pid not in idle]
        # Of each server: bwrap twice, the server, its guard, and two processes of the next run.
        if (not found and len(idle) <= 6 * len(state.executor.servers())) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.05)


def _tree(pid: int) -> list[int]:
    return [pid, *descendants(pid)]
