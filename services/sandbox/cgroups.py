"""Control groups: the kernel's bound on the memory and the number of processes of a whole tree, version 1 or 2.

Groups are made below the service's own, so that whatever bounds the service bounds its programs too.

Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

import errno
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.services.sandbox.limits import MEBIBYTE, Limits
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.control_groups import Mounts

MOST_BYTES = 65536


def read_control(file: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


def write_control(file: Path, value: int) -> None:
    """Write a number to a file.

    Raises:
        OSError: the kernel refused.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"%d" % value)
    finally:
        os.close(descriptor)


REMOVE_SECONDS = 2.0
OWN_PROCESSES = 5
OWN_BYTES = 32 * MEBIBYTE
"""What the isolation's own processes may use beyond the program's limits."""


@dataclass(frozen=True)
class Group:
    """A group of one fork server; one directory (version 2), or one per controller (version 1)."""

    memory: Path
    pids: Path
    is_unified: bool

    def entrances(self) -> list[Path]:
        """List the files to which a process of one thread writes 0 to join the group."""
        return [self.memory / "cgroup.procs"] if self.is_unified else [self.memory / "tasks", self.pids / "tasks"]

    def bound(self, limits: Limits) -> None:
        """Set what the next program may use.

        Raises:
            OSError: the kernel refused.
        """
        # The isolation's own processes are in the group too: room for them.
        memory = limits.memory_bytes + OWN_BYTES
        (self.pids / "pids.max").write_text(str(limits.processes + OWN_PROCESSES))
        if self.is_unified:
            (self.memory / "memory.max").write_text(str(memory))
            _write_if_present(self.memory / "memory.swap.max", "0")
            return
        bound, with_swap = self.memory / "memory.limit_in_bytes", self.memory / "memory.memsw.limit_in_bytes"
        # Memory with swap is never bounded below memory alone, whichever way the bounds move.
        if with_swap.exists() and int(with_swap.read_text()) < memory:
            _write_if_present(with_swap, str(memory))
        bound.write_text(str(memory))
        _write_if_present(with_swap, str(memory))

    def holds_more(self, bound_bytes: int) -> bool:
        """Return whether memory is in use that the kernel cannot take back: of processes, and in memory file systems.

        Args:
            bound_bytes: more than so much.

        Raises:
            OSError: it cannot be read.
        """
        # All that is charged can be read at once, which the parts of it cannot.
        charged = self.memory / ("memory.current" if self.is_unified else "memory.usage_in_bytes")
        if int(read_control(charged)) <= bound_bytes:
            return False
        names = {"anon", "shmem"} if self.is_unified else {"rss", "shmem"}
        lines = (line.split() for line in (self.memory / "memory.stat").read_text().splitlines())
        return sum(int(value) for name, value in lines if name in names) > bound_bytes

    def num_memory_kills(self) -> int:
        """Count the processes that the kernel ended because the group's memory was used up."""
        name = "memory.events" if self.is_unified else "memory.oom_control"
        with suppress(OSError):
            for line in read_control(self.memory / name).splitlines():
                key, _, value = line.partition(b" ")
                if key == b"oom_kill":
                    return int(value)
        return 0

    def remove(self) -> None:
        """Kill the rest of the group and remove it.

        Raises:
            OSError: a process did not end, so that the group could not be removed.
        """
        deadline = time.monotonic() + REMOVE_SECONDS
        while True:
            for directory in {self.memory, self.pids}:
                for pid in (directory / "cgroup.procs").read_text().split() if directory.exists() else ():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            try:
                for directory in {self.memory, self.pids}:
                    with suppress(FileNotFoundError):
                        directory.rmdir()
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.005)


class ControlGroups:
    """Makes groups below the service's own."""

    def __init__(self, memory: Path, pids: Path, *, is_unified: bool) -> None:
        self._memory = memory
        self._pids = pids
        self._is_unified = is_unified

    @classmethod
    def find(cls, mounts: Mounts) -> "ControlGroups":
        """Choose the hierarchy that has memory and pids: version 2 if it has both, else version 1.

        Raises:
            Unavailable: neither has, or groups cannot be made there; the detail has the reason.
        """
        reasons = []
        if mounts.unified is not None:
            try:
                _delegate(mounts.unified)
                return cls(mounts.unified, mounts.unified, is_unified=True)
            except (OSError, Unavailable) as error:
                reasons.append(f"version 2: {error}")
        try:
            memory, pids = mounts.controllers["memory"], mounts.controllers["pids"]
        except KeyError as error:
            reasons.append(f"version 1: no {error.args[0]} controller")
        else:
            if os.access(memory, os.W_OK) and os.access(pids, os.W_OK):
                return cls(memory, pids, is_unified=False)
            reasons.append(f"version 1: {memory} or {pids} cannot be written")
        raise Unavailable(f"no usable control groups ({'; '.join(reasons)})")

    def create(self, name: str, limits: Limits) -> Group:
        """Make a group for one fork server and its programs, one after the other.

        Raises:
            OSError: the kernel refused.
        """
        group = Group(self._memory / name, self._pids / name, self._is_unified)
        try:
            for directory in {group.memory, group.pids}:
                directory.mkdir()
            group.bound(limits)
        except OSError:
            with suppress(OSError):
                group.remove()
            raise
        return group


def _write_if_present(file: Path, value: str) -> None:
    if file.exists():
        with suppress(OSError):
            file.write_text(value)


def _delegate(parent: Path) -> None:
    """Let groups below ``parent`` be bounded.

    Raises:
        Unavailable: a controller is missing, or other processes are in ``parent``, which version 2 does not allow.
        OSError: the kernel refused.
    """
    missing = {"memory", "pids"} - set((parent / "cgroup.controllers").read_text().split())
    if missing:
        raise Unavailable(f"no {' and no '.join(sorted(missing))} controller in {parent}")
    control = parent / "cgroup.subtree_control"
    try:
        control.write_text("+memory +pids")
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        others = [pid for pid in (parent / "cgroup.procs").read_text().split() if int(pid) != os.getpid()]
        if others:
            raise Unavailable(f"{parent} holds {len(others)} other processes; give the service a group") from error
        leaf = parent / "flotilla-sandbox-service"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        control.write_text("+memory +pids")
