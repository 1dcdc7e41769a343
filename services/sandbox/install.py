"""Putting the guard where every uid can read it, and finding out which isolation works here by using it."""

import asyncio
import base64
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from flotilla.services.sandbox.cgroups import ControlGroups
from flotilla.services.sandbox.executor import Executor, Program
from flotilla.services.sandbox.fork_servers import Groups, SandboxFailed
from flotilla.services.sandbox.guard.job import EXITED, Phase
from flotilla.services.sandbox.isolation import START, Isolation, Place, Slot, why_not
from flotilla.services.sandbox.limits import Limits
from flotilla.services.sandbox.processors import ProcessorGroups
from flotilla.shared.children.processes import reap
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.control_groups import find_mounts
from flotilla.shared.schemas.sandbox import IsolationLevel

SELF_TEST = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)
    print("reaches the network")
except OSError:
    pass
try:
    open(sys.argv[3]).read()
    print("reads the host's files")
except OSError:
    pass
print("contained")
"""
SELF_TEST_SECONDS = 20.0


def install_guard(target: Path) -> None:
    """Copy the guard's modules below ``target``, as packages of the same names and readable by everybody.

    The program of the checkout itself may lie where other uids, and a private root, cannot see it.
    """
    source = Path(__file__).parent
    package = target / "flotilla" / "services" / "sandbox"
    (target / START).mkdir(mode=0o755, parents=True)
    for file in (source / "limits.py", *sorted((source / "guard").rglob("*.py"))):
        shutil.copyfile(file, package / file.relative_to(source))
    for directory in (target / "flotilla", package.parent, package):
        (directory / "__init__.py").touch()
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


async def compile_guard(place: Place) -> None:
    """Compile the guard's modules once, so that it starts faster; a failure costs only time."""
    command = [place.python, "-I", "-S", "-m", "compileall", "-q", place.code]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env={}
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(SELF_TEST_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await reap(process)


async def try_level(
    level: IsolationLevel,
    place: Place,
    limits: Limits,
    slot: Slot,
    marker: Path,
    processors: ProcessorGroups | None = None,
) -> Executor:
    """Make the executor of a level after a program has shown that it works and holds.

    Args:
        level: which.
        place: what programs get.
        limits: what they may use.
        slot: a free one.
        marker: a file outside, readable by everybody, that the program must not be able to read.
        processors: where shares of the processors are made; None leaves them out.

    Raises:
        Unavailable: the level does not work here; the detail has the reason.
    """
    if (reason := why_not(level)) is not None:
        raise Unavailable(reason)
    bounds = ControlGroups.find(find_mounts()) if level is IsolationLevel.A else None
    executor = Executor(Isolation(level, place, limits), Groups(bounds, processors))
    try:
        await _test(executor, slot, marker)
    except BaseException:
        await executor.close()
        raise
    return executor


async def _test(executor: Executor, slot: Slot, marker: Path) -> None:
    """Run a program that tries to get out.

    Raises:
        Unavailable: it could not be run, or got out.
    """
    python = executor.isolation.place.python
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections are not accepted
        host, port = server.getsockname()
        argv = (python, "-s", "-B", "test.py", host, str(port), str(marker))
        program = Program(
            files={"test.py": base64.b64encode(SELF_TEST.encode()).decode()},
            phases=(Phase("run", argv, SELF_TEST_SECONDS),),
            fetch=(),
            limits=executor.isolation.limits,
        )
        try:
            result = (await executor.run(slot, program)).phases[0]
            await executor.settled(slot)
        except SandboxFailed as error:
            raise Unavailable(error.detail) from error
    stdout, stderr = result.output()
    if result.outcome != EXITED or result.return_code != 0:
        raise Unavailable(f"the self-test failed: {result.detail or stderr.strip()[-300:]}")
    if executor.isolation.level is not IsolationLevel.D and stdout.split("\n")[0] != "contained":
        raise Unavailable(f"the self-test was not contained: it {stdout.split(chr(10))[0]}")
