"""Compare the sandbox's throughput with one plain bwrap call per program, in turns within one run.

    python -m benchmarks.sandbox [--levels A,B,C] [--seconds 5] [--program 'print(1)'] [--floor]

At each level and number of programs at a time, rounds of both alternate, so that whatever else the machine does weighs
on both. bwrap is called with the same namespaces and the same interpreter and flags, without filter, Landlock, limits
or control group. The ratio is the result; programs per second are this machine's. Where this process may make a control
group that counts processor time (``cpuacct``), that of all processes of a run is printed too, for both: other work of
the machine changes it little. ``--floor`` measures in place of the
sandbox what a run of level A or B cannot do without: a warm interpreter forks into the namespaces of a run, and makes
its file systems; there are no messages, limits, filters, control groups and programs.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from flotilla.services.sandbox.executor import Executor, Program
from flotilla.services.sandbox.guard import namespaces
from flotilla.services.sandbox.install import compile_guard, install_guard
from flotilla.services.sandbox.isolation import Place
from flotilla.services.sandbox.isolation import bwrap_command as isolated_command
from flotilla.services.sandbox.languages import find_languages, find_python, python_command
from flotilla.services.sandbox.routes.run_code import make_program
from flotilla.services.sandbox.settings import SandboxSettings
from flotilla.services.sandbox.state import SandboxState, open_state
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.control_groups import find_mounts
from flotilla.shared.schemas.sandbox import IsolationLevel, RunCodeRequest

WANTED_RATIO = 3.0
ROUNDS = 4
USUAL = SandboxSettings(token=SecretStr("x" * 32)).concurrency


def bwrap_command(python: str, program: str) -> list[str]:
    """Make one plain call: a private root and namespaces, nothing else."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        command += ["--symlink", f"usr/{name}", f"/{name}"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/work", "--chdir", "/work"]
    return [*command, "--", *python_command(python)[:-1], "-c", program]


async def call_bwrap(command: list[str]) -> None:
    """Run one program in a bwrap of its own.

    Raises:
        RuntimeError: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    _, complaint = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"bwrap failed: {complaint.decode(errors='replace')[-300:]}")


async def call_sandbox(state: SandboxState, program: Program) -> None:
    """Run one program as the route does.

    Raises:
        RuntimeError: it failed.
    """
    async with state.pool.taken() as slot:
        result = await state.executor.run(slot, program)
    if result.phases[-1].return_code != 0:
        raise RuntimeError(f"the program failed: {result.phases[-1]}")


async def programs_per_second(call: Callable[[], Awaitable[None]], at_a_time: int, seconds: float) -> float:
    """Call over and over for some time, so many at a time."""
    started = time.monotonic()
    done = 0

    async def lane() -> None:
        nonlocal done
        while time.monotonic() < started + seconds:
            await call()
            done += 1

    async with asyncio.TaskGroup() as lanes:
        for _ in range(at_a_time):
            lanes.create_task(lane())
    return done / (time.monotonic() - started)


@contextmanager
def counting() -> Iterator[Callable[[], float]]:
    """Put this process into a group of its own; gives what reads the processor time of all that is started in it.

    What is read is always 0 where no such group can be made.
    """
    parent = find_mounts().controllers.get("cpuacct")
    if parent is None or not os.access(parent, os.W_OK):
        yield lambda: 0.0
        return
    group = parent / f"flotilla-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text("0")
        yield lambda: int((group / "cpuacct.usage").read_text()) / 1e9
    finally:
        (parent / "cgroup.procs").write_text("0")
        group.rmdir()


@dataclass(frozen=True)
class Measured:
    """What several rounds of one kind of call gave, each: programs per second, and processor time per program."""

    rounds: list[tuple[float, float]]

    @property
    def per_second(self) -> float:
        """Return the median."""
        return statistics.median(rate for rate, _ in self.rounds)

    @property
    def milliseconds(self) -> float:
        """Return the median processor time of one program."""
        return 1000 * statistics.median(seconds for _, seconds in self.rounds)


async def compare(
    level: IsolationLevel, at_a_time: int, source: str, seconds: float, used: Callable[[], float]
) -> tuple[Measured, Measured]:
    """Measure one level; returns the sandbox's and bwrap's rounds."""
    # Without a bound, as for programs of the sandbox's own experiment: bwrap's turns would count as others' work.
    settings = SandboxSettings(token=SecretStr("x" * 32), level=level, concurrency=at_a_time, busy_part=1.0)
    async with open_state(settings) as state:
        executor: Executor = state.executor
        language = state.languages["python"]
        directory = executor.isolation.work_directory(state.pool.slots[0])
        request = RunCodeRequest(code=source, language="python")
        command = bwrap_command(executor.isolation.place.python, source)

        async def in_sandbox() -> None:
            await call_sandbox(state, make_program(request, language, directory, state))

        async def round_of(call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
            before, started = used(), time.monotonic()
            rate = await programs_per_second(call, at_a_time, seconds / ROUNDS)
            return rate, (used() - before) / (rate * (time.monotonic() - started))

        await programs_per_second(in_sandbox, at_a_time, 0.5)  # the fork servers start
        ours, plain = Measured([]), Measured([])
        for _ in range(ROUNDS):
            plain.rounds.append(await round_of(lambda: call_bwrap(command)))
            ours.rounds.append(await round_of(in_sandbox))
    return ours, plain


FLOOR = """
import os, sys, time
from flotilla.services.sandbox.guard import namespaces
from flotilla.services.sandbox.limits import Limits

def wait_for(pid):
    if os.waitpid(pid, 0)[1]:
        sys.exit("a fork failed")

prepared = namespaces.prepare()
end, forks = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    first, program = namespaces.fork(prepared.pids, lambda: None)
    if program == 0:
        namespaces.furnish(Limits(), prepared)
        os._exit(0)
    wait_for(program)
    os.kill(first, 9)
    os.waitpid(first, 0)
    forks += 1
print(forks)
"""


async def forks_per_second(place: Place, at_a_time: int, seconds: float) -> float:
    """Measure forks without anything else; see ``--floor``."""

    async def lane() -> int:
        process = await asyncio.create_subprocess_exec(
            *isolated_command(place),
            *python_command(place.python)[:-1],
            *("-c", FLOOR, str(seconds)),
            stdout=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": namespaces.CODE},
        )
        stdout, _ = await process.communicate()
        return int(stdout)

    return sum(await asyncio.gather(*[lane() for _ in range(at_a_time)])) / seconds


async def measure_floor(place: Place, source: str, seconds: float) -> None:
    """Print a line per number at a time."""
    await compile_guard(place)
    command = bwrap_command(place.python, source)
    print("at a time | forks/s | one bwrap each/s | ratio")
    for at_a_time in (1, USUAL):
        forks, plain = [], []
        for _ in range(ROUNDS):
            plain.append(await programs_per_second(lambda: call_bwrap(command), at_a_time, seconds / ROUNDS))
            forks.append(await forks_per_second(place, at_a_time, seconds / ROUNDS))
        floor, one_each = statistics.median(forks), statistics.median(plain)
        print(f"{at_a_time:9} | {floor:7.1f} | {one_each:16.1f} | {floor / one_each:5.2f}", flush=True)


async def measure(levels: list[IsolationLevel], source: str, seconds: float, used: Callable[[], float]) -> bool:
    """Print a line per level and number at a time; True if every ratio at the usual number is as wanted."""
    is_enough = True
    print("level | at a time | sandbox/s | one bwrap each/s | ratio | processor time of one: sandbox, bwrap, ratio")
    for level in levels:
        for at_a_time in (1, USUAL):
            try:
                ours, plain = await compare(level, at_a_time, source, seconds, used)
            except Unavailable as error:
                print(f"{level.value:5} | {at_a_time:9} | not available here: {error.detail}")
                continue
            ratio = ours.per_second / plain.per_second
            rates = f"{ours.per_second:9.1f} | {plain.per_second:16.1f} | {ratio:5.2f}"
            print(f"{level.value:5} | {at_a_time:9} | {rates} | {_times(ours, plain)}", flush=True)
            is_enough = is_enough and (at_a_time != USUAL or ratio >= WANTED_RATIO)
    return is_enough


def _times(ours: Measured, plain: Measured) -> str:
    if ours.milliseconds <= 0.0:
        return "not counted here"
    return f"{ours.milliseconds:.2f} ms, {plain.milliseconds:.2f} ms, {plain.milliseconds / ours.milliseconds:.2f}"


def main() -> int:
    """Read the arguments, measure; 1 if a ratio at the usual concurrency is below what is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", default="A,B,C")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each cell of the table")
    parser.add_argument("--program", default="print(1)")
    parser.add_argument("--floor", action="store_true", help="measure what no run can do without")
    arguments = parser.parse_args()
    if shutil.which("bwrap") is None:
        print("bwrap is not installed: there is nothing to compare with", file=sys.stderr)
        return 2
    if arguments.floor:
        with tempfile.TemporaryDirectory() as name:
            code = Path(name, "code")
            code.parent.chmod(0o755)
            install_guard(code)
            asyncio.run(measure_floor(Place(find_python(None), str(code)), arguments.program, arguments.seconds))
        return 0
    assert "python" in find_languages(find_python(None))
    levels = [IsolationLevel(name) for name in arguments.levels.split(",")]
    with counting() as used:
        return 0 if asyncio.run(measure(levels, arguments.program, arguments.seconds, used)) else 1


if __name__ == "__main__":
    sys.exit(main())
