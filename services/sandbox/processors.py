"""How programs share the processors: beside whatever else the machine does, and fairly among themselves.

A slot has the weight of a part of an ordinary process, however many processes run in it. A program that has used more
than a moment gives way to those that have not, and to the rest of the machine. Where the service may not make such
groups, programs are only nice.

Source: Linux, Documentation/scheduler/sched-design-CFS.rst, sched-bwc.rst and admin-guide/cgroup-v1/cpuacct.rst.
"""

import asyncio
import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.sandbox.cgroups import REMOVE_SECONDS, Mounts

LONG_PART = 8
"""A program that takes long has the weight of a slot divided by this."""
LONG_SECONDS = 0.5
"""Processor time after which a program takes long."""
LOOK_SECONDS = 0.25
PERIOD_MICROSECONDS = 100_000


@dataclass(frozen=True)
class ProcessorGroup:
    """A group of one fork server and its programs, one after the other.

    Attributes:
        cpu: where its weight is set.
        usage: what it has used; None where that is not counted.
        shares: its weight.
    """

    cpu: Path
    usage: Path | None
    shares: int

    def add(self, pid: int) -> None:
        """Put a process into the group.

        Raises:
            OSError: the kernel refused.
        """
        for directory in _distinct(self.cpu, self.usage):
            (directory / "cgroup.procs").write_text(str(pid))

    async def give_way(self) -> None:
        """Watch a program, and lower its weight once it takes long, until this is cancelled.

        Raises:
            OSError: the group cannot be read or written.
        """
        if self.usage is None:
            return
        usage = self.usage / "cpuacct.usage"
        weight = self.cpu / "cpu.shares"
        before = int(usage.read_text())
        is_lowered = False
        try:
            while not is_lowered:
                await asyncio.sleep(LOOK_SECONDS)
                is_lowered = int(usage.read_text()) - before > LONG_SECONDS * 1e9
            weight.write_text(str(max(2, self.shares // LONG_PART)))
            await asyncio.Event().wait()
        finally:
            if is_lowered:
                weight.write_text(str(self.shares))

    def remove(self) -> None:
        """Remove the group; its processes have ended or are about to.

        Raises:
            OSError: one does not end.
        """
        for directory in _distinct(self.cpu, self.usage):
            _remove(directory)


class ProcessorGroups:
    """Makes groups of slots below the service's own.

    Args:
        cpu: the service's own group.
        usage: likewise where usage is counted; None where it is not.
        shares: weight of a slot; an ordinary process has 1024.
        processors: how many processors one slot may use at a time.
    """

    def __init__(self, cpu: Path, usage: Path | None, *, shares: int, processors: float) -> None:
        self._cpu = cpu
        self._usage = usage
        self._shares = shares
        self._quota = max(1000, int(processors * PERIOD_MICROSECONDS))

    @classmethod
    def find(cls, mounts: Mounts, *, shares: int, processors: float) -> "ProcessorGroups | None":
        """Find where this process may make groups; None if nowhere. For the arguments see the class."""
        cpu, usage = (
            None if parent is None or not os.access(parent, os.W_OK) else parent
            for parent in (mounts.controllers.get("cpu"), mounts.controllers.get("cpuacct"))
        )
        return None if cpu is None else cls(cpu, usage, shares=shares, processors=processors)

    def create(self, name: str) -> ProcessorGroup:
        """Make a group for one fork server.

        Raises:
            OSError: the kernel refused.
        """
        group = ProcessorGroup(self._cpu / name, None if self._usage is None else self._usage / name, self._shares)
        for directory in _distinct(group.cpu, group.usage):
            directory.mkdir()
        try:
            (group.cpu / "cpu.shares").write_text(str(self._shares))
            with suppress(FileNotFoundError):  # a kernel without bandwidth control
                (group.cpu / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
                (group.cpu / "cpu.cfs_quota_us").write_text(str(self._quota))
        except OSError:
            group.remove()
            raise
        return group


def _distinct(cpu: Path, usage: Path | None) -> list[Path]:
    # Often one mount has both controllers: then it is one directory.
    return [cpu] if usage is None or usage.resolve() == cpu.resolve() else [cpu, usage]


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)
