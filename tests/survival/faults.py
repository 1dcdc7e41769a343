"""What a survival run does to its fleet: kills, pauses, lost tails of logs, full disks, deleted files, clocks, packets.

Each fault is bounded in time and touches only what belongs to the fleet: its processes by pid, its data directory, its
images in shared memory, the loopback port of its gateway. A fault that this machine does not allow (no root, no
``iptables``) is not drawn; the report says so.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flotilla.shared.net.client.client import GatewayClient
from flotilla.shared.weights.image.files import SHARED_MEMORY
from tests.fleet import RunningFleet, running_fleet, until

PROCESSES = {
    "gateway": "flotilla.services.gateway",
    "rollout": "flotilla.services.rollout",
    "engine": "flotilla.services.rollout.engines.process.child",
    "reward": "flotilla.services.reward",
    "trainer": "flotilla.services.trainer",
    "training process": "flotilla.services.trainer.worker",
    "redis": "valkey-server",
}
PATIENCE_SECONDS = 150.0
WINDOW_SECONDS = 35.0
MOST_IN_WINDOW = 3
"""Deaths of one kind in the window: a fleet gives up a process that dies five times in half a minute, as it should."""
PAUSE_SECONDS = (3.0, 6.0, 10.0, 15.0, 17.0, 25.0, 40.0)
"""Around the deadlines of leases (4 s here), silence (5 s, 10 s), retries (30 s)."""
LOST_TAIL_BYTES = 300_000
DISK_BYTES = 512 * 1024**2
CLOCK_JUMPS_SECONDS = (3600.0, -7200.0, 86_400.0, -90_000.0, 45.0, -30.0, 10.0, 7000.0)


class Fleet:
    """A fleet that can be ended as by a power cut, and started again on the same data.

    Args:
        directory: for data, logs and marks of switched faults.
        rollouts: rollout services.
        only_kills: prepare for nothing but the end of processes.
    """

    def __init__(self, directory: Path, rollouts: int, *, only_kills: bool) -> None:
        self.directory = directory
        self.data = directory / "fleet"
        self.marks = directory / "marks"
        self._rollouts = rollouts
        self.only_kills = only_kills
        self._stack = contextlib.ExitStack()
        self._clients = contextlib.AsyncExitStack()
        self._running: RunningFleet | None = None
        self.client: GatewayClient
        self.experiment_id = ""
        self.is_limited = False
        """Whether the data directory has a bounded disk of its own."""
        self.jumps = 0

    async def __aenter__(self) -> "Fleet":
        self.data.mkdir(parents=True)
        self.marks.mkdir()
        self.is_limited = not self.only_kills and _mount(self.data)
        try:
            await self.up()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._clients.aclose()
            await asyncio.to_thread(self._stack.close)
        finally:
            if self.is_limited:
                await asyncio.to_thread(subprocess.run, ["umount", "--lazy", str(self.data)], check=False)

    async def start(self, spec: Mapping[str, Any]) -> None:
        """Create and start the experiment."""
        view = await self.client.call("POST", "/v1/experiments", body=dict(spec), deadline_seconds=60)
        self.experiment_id = view["id"]
        await self.client.call("POST", f"{self.path}/start", deadline_seconds=60)

    @property
    def path(self) -> str:
        """Of the experiment, over REST."""
        return f"/v1/experiments/{self.experiment_id}"

    async def up(self) -> None:
        """Start all processes."""
        jumps = (f"clock.now skew while=jump-{n} seconds={at}" for n, at in enumerate(CLOCK_JUMPS_SECONDS))
        faults = "; ".join([f"marks={self.marks}", *jumps])
        environment = {} if self.only_kills else {"FLOTILLA_FAULTS": faults}
        fleet = running_fleet(self.data, rollouts=self._rollouts, **environment)
        self._running = await asyncio.to_thread(self._stack.enter_context, fleet)
        self.client = await self._clients.enter_async_context(self._running.client())

    async def cut_power(self) -> None:
        """End every process at once, the owner first; nobody writes anything any more."""
        owner = psutil.Process(self.running.process.pid)
        family = [owner, *owner.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(self.running.process.wait, 30)
        await asyncio.to_thread(psutil.wait_procs, family[1:], 30)
        (self.data / "fleet.json").unlink(missing_ok=True)
        self._stack.close()

    @property
    def running(self) -> RunningFleet:
        """The fleet that is up now."""
        assert self._running is not None
        return self._running

    async def one_of(self, kind: str, chance: random.Random) -> int:
        """Choose a process of a kind; one that died just now gets the time to come back."""
        pids = await asyncio.to_thread(until, lambda: self.running.pids(PROCESSES[kind]), PATIENCE_SECONDS, f"a {kind}")
        return chance.choice(pids)

    def images(self) -> list[Path]:
        """List the weight images that processes of this fleet made."""
        owner = psutil.Process(self.running.process.pid)
        pids = {str(each.pid) for each in [owner, *owner.children(recursive=True)]}
        return [path for path in SHARED_MEMORY.glob("flotilla-weights-*") if path.name.split("-")[2] in pids]

    async def checkpoints(self) -> list[Path]:
        """List the experiment's complete checkpoints, oldest first."""
        view = await self.client.call("GET", self.path, deadline_seconds=60, attempt_seconds=5)
        return sorted((Path(view["directory"]) / "checkpoints").glob("step-*"))

    @property
    def port(self) -> int:
        """The gateway's."""
        return int(self.running.url.rsplit(":", 1)[1])


Happen = Callable[[Fleet, random.Random], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: in the report.
        kills: the kind of process that it ends, so that none is ended too often.
        happen: does it, and undoes what has to end.
        weight: how often it is drawn, against the others.
    """

    name: str
    happen: Happen
    weight: float = 1.0
    kills: str | None = None


def killing(kind: str) -> Fault:
    """Make the fault that ends a process by SIGKILL."""

    async def happen(fleet: Fleet, chance: random.Random) -> None:
        pid = await fleet.one_of(kind, chance)
        with contextlib.suppress(ProcessLookupError):  # it died on the way, by an earlier fault
            os.kill(pid, signal.SIGKILL)

    return Fault(f"kill {kind}", happen, kills=kind)


def pausing(kind: str) -> Fault:
    """Make the fault that stops a process for some seconds, as a swap storm or a debugger would."""

    async def happen(fleet: Fleet, chance: random.Random) -> None:
        pid = await fleet.one_of(kind, chance)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(chance.choice(PAUSE_SECONDS))
            finally:
                os.kill(pid, signal.SIGCONT)

    return Fault(f"pause {kind}", happen, weight=0.5)


async def lose_tail(fleet: Fleet, chance: random.Random) -> None:
    """Cut the power, and with it the end of the Redis server's log; start again."""
    await fleet.cut_power()
    logs = sorted((fleet.data / "redis" / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
    size = logs[-1].stat().st_size
    os.truncate(logs[-1], max(0, size - chance.randrange(1, LOST_TAIL_BYTES)))
    await fleet.up()


async def lose_power(fleet: Fleet, _: random.Random) -> None:
    """Cut the power with everything written; start again."""
    await fleet.cut_power()
    await fleet.up()


async def fill_disk(fleet: Fleet, chance: random.Random) -> None:
    """Leave no room on the disk of the data directory for some seconds."""
    ballast = fleet.data / "ballast"
    try:
        await asyncio.to_thread(_fill, ballast)
        await asyncio.sleep(chance.uniform(2.0, 12.0))
    finally:
        ballast.unlink(missing_ok=True)


async def delete_images(fleet: Fleet, _: random.Random) -> None:
    """Delete all weight images in shared memory, under the processes that use them."""
    for path in fleet.images():
        path.unlink(missing_ok=True)


async def lose_checkpoint(fleet: Fleet, chance: random.Random) -> None:
    """Delete the newest checkpoint and end the training process, which has to go on from an older one."""
    found = await fleet.checkpoints()
    if len(found) > 1:
        await asyncio.to_thread(shutil.rmtree, found[-1], ignore_errors=True)
    await killing("training process").happen(fleet, chance)


async def spoil_checkpoint(fleet: Fleet, chance: random.Random) -> None:
    """Cut off the weights of the newest checkpoint and end the training process."""
    found = await fleet.checkpoints()
    if len(found) > 1:
        with contextlib.suppress(FileNotFoundError):
            weights = found[-1] / "model" / "model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
    await killing("training process").happen(fleet, chance)


async def jump_clock(fleet: Fleet, _: random.Random) -> None:
    """Let the wall clock of all processes jump."""
    (fleet.marks / f"jump-{fleet.jumps % len(CLOCK_JUMPS_SECONDS)}").touch()
    fleet.jumps += 1


async def drop_packets(fleet: Fleet, chance: random.Random) -> None:
    """Drop all packets to the gateway's port on the loopback interface for some seconds."""
    rule = ["INPUT", "-i", "lo", "-p", "tcp", "--dport", str(fleet.port), "-j", "DROP"]
    await asyncio.to_thread(subprocess.run, ["iptables", "-I", *rule], check=True)
    try:
        await asyncio.sleep(chance.choice((3.0, 8.0, 20.0)))
    finally:
        await asyncio.to_thread(subprocess.run, ["iptables", "-D", *rule], check=True)


def possible_faults(fleet: Fleet) -> tuple[list[Fault], list[str]]:
    """List the faults that can happen on this machine, and name those that cannot, with the reason."""
    kills = [killing(kind) for kind in PROCESSES]
    if fleet.only_kills:
        return kills, []
    faults = [
        *kills,
        *(pausing(kind) for kind in PROCESSES),
        Fault("lose the log's tail", lose_tail),
        Fault("lose power", lose_power, weight=0.5),
        Fault("delete images", delete_images),
        Fault("lose a checkpoint", lose_checkpoint, kills="training process"),
        Fault("spoil a checkpoint", spoil_checkpoint, kills="training process"),
        Fault("jump of the clock", jump_clock),
    ]
    missing = []
    if fleet.is_limited:
        faults.append(Fault("full disk", fill_disk))
    else:
        missing.append("full disk: no file system of bounded size can be mounted here")
    if _can_drop():
        faults.append(Fault("dropped packets", drop_packets))
    else:
        missing.append("dropped packets: iptables cannot be used here")
    return faults, missing


class Draw:
    """Draws faults: any, but none that would end one kind of process so often that giving it up would be right."""

    def __init__(self, faults: list[Fault], chance: random.Random) -> None:
        self._faults = faults
        self._chance = chance
        self._recent: deque[tuple[float, str]] = deque()

    def next(self) -> Fault:
        """Draw one, and remember whom it kills."""
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > WINDOW_SECONDS:
            self._recent.popleft()
        counts = Counter(kind for _, kind in self._recent)
        allowed = [each for each in self._faults if each.kills is None or counts[each.kills] < MOST_IN_WINDOW]
        fault = self._chance.choices(allowed, [each.weight for each in allowed])[0]
        if fault.kills is not None:
            self._recent.append((now, fault.kills))
        return fault


def _mount(directory: Path) -> bool:
    """Give a directory a file system of its own with a bounded size; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode == 0
    except OSError:
        return False


def _can_drop() -> bool:
    try:
        return subprocess.run(["iptables", "-L", "-n"], capture_output=True, check=False, timeout=10).returncode == 0
    except OSError:
        return False


def _fill(path: Path) -> None:
    """Write until nothing fits any more, in ever smaller blocks."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 22, 1 << 16, 1 << 12):
            block = bytes(size)
            with contextlib.suppress(OSError):
                for _ in range(DISK_BYTES // size):
                    file.write(block)
