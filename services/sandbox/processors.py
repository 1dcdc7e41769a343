"""How programs share the processors: beside whatever else the machine does, and fairly among themselves.

A slot has the weight of a part of an ordinary process, however many processes run in it. A program that has just begun,
of a caller that has used little lately, has several times that weight; one that has used more than a moment, or whose
caller has used much lately, has hardly any, but for moments in which it has the weight of a slot, and until it falls
behind what it needs to have its time before its timeout. While others want most of the machine there is also a bound
to what the programs of such a caller use (``spare_time``). Where the service may not make such groups, programs are
only nice.

Source: Linux, Documentation/scheduler/sched-design-CFS.rst, sched-bwc.rst and admin-guide/cgroup-v1/cpuacct.rst;
Arpaci-Dusseau, Operating Systems: Three Easy Pieces, 1.10, chapter 8 (the multi-level feedback queue).
"""

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from flotilla.services.sandbox.cgroups import REMOVE_SECONDS, read_control, write_control
from flotilla.services.sandbox.spare_time import LEAST_PROCESSORS, Allowances, SpareTime
from flotilla.shared.host.control_groups import Mounts

FIRST_FACTOR = 8
"""A program that has just begun, of a caller that has used little, has so many times the weight of a slot."""
LONG_PART = 4
"""A program that takes long, or whose caller has used much, is idle, which a process that wants to run interrupts at
once: without that it may wait until the program's turn is over, which is some milliseconds for each message between
processes of the fleet. An older kernel gives it the weight of a slot divided by this."""
LONG_SECONDS = 0.25
"""Processor time after which a program takes long."""
LOOK_SECONDS = 0.1
LONG_LOW_SECONDS, LOW_SECONDS, RAISED_SECONDS = 1.0, 0.2, 0.05
"""For how long a program that takes long has little weight, for how long another one of a caller that has used much,
and then the weight of a slot."""
PERIOD_MICROSECONDS, LEAST_QUOTA_MICROSECONDS = 100_000, 1000
LEAST_SHARES, MOST_SHARES = 2, 262_144


@dataclass(eq=False)
class ProcessorGroup:
    """A group of one fork server and its programs, one after the other.

    Attributes:
        cpu: where its weight is set.
        usage: what it has used; None where that is not counted.
        shares: its weight.
        quota: how much of the processors it may use in each period, in microseconds, while nothing else bounds it.
        allowances: what callers have left.
        spare: what there is for those that have nothing left.
        now: a clock, in seconds.
    """

    cpu: Path
    usage: Path | None
    shares: int
    quota: int
    allowances: Allowances
    spare: SpareTime
    now: Callable[[], float] = time.monotonic
    _weight: int = field(default=0, init=False)
    _is_idle: bool = field(default=False, init=False)
    _caller: str | None = field(default=None, init=False)
    _counted: float = field(default=0.0, init=False)
    _quota: int = field(default=0, init=False)

    def entrances(self) -> list[Path]:
        """List the files to which a process of one thread writes 0 to join the group."""
        return [directory / "tasks" for directory in _distinct(self.cpu, self.usage)]

    def weigh(self, weight: int) -> None:
        """Set the group's weight in the kernel, or mark it idle.

        Raises:
            OSError: the kernel refused.
        """
        weight = min(max(weight, LEAST_SHARES), MOST_SHARES)
        if weight != self._weight:
            self._set_idle(is_idle=weight < self.shares)
            if not self._is_idle:
                write_control(self._shares_file, weight)
            self._weight = weight

    def bound(self, processors: float | None) -> None:
        """Let it use so much of the processors; None: as much as a slot may. Without bandwidth control nothing."""
        quota = self.quota
        if processors is not None:
            quota = max(LEAST_QUOTA_MICROSECONDS, min(quota, round(processors * PERIOD_MICROSECONDS)))
        if quota != self._quota:
            with suppress(OSError):  # it was removed, or the kernel does not do that
                (self.cpu / "cpu.cfs_quota_us").write_text(str(quota))
            self._quota = quota

    def _set_idle(self, *, is_idle: bool) -> None:
        """Let the group run only where nothing else wants to, if the kernel knows that (Linux 5.15)."""
        if is_idle != self._is_idle and self._idle_file is not None:
            write_control(self._idle_file, int(is_idle))
            self._is_idle = is_idle

    @cached_property
    def _shares_file(self) -> Path:
        return self.cpu / "cpu.shares"

    @cached_property
    def _idle_file(self) -> Path | None:
        file = self.cpu / "cpu.idle"
        return file if file.exists() else None

    @cached_property
    def _usage_file(self) -> Path:
        assert self.usage is not None
        return self.usage / "cpuacct.usage"

    @contextmanager
    def used_by(self, caller: str) -> Iterator[Callable[[], None]]:
        """Weigh a program of a caller while it runs: by what the caller has left at first, less once it takes long.

        Gives what is to be called when the program is over: to end it must not take long on a busy machine.

        Raises:
            OSError: the group cannot be read or written.
        """
        if self.usage is None:
            yield _nothing
            return
        self.count()  # what came after the last program was for that one
        self._caller = caller
        self._weigh_for(caller)
        watch, is_over = asyncio.create_task(self._watch(caller, self._counted)), False

        def over() -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            watch.cancel()
            with suppress(OSError):
                self.count()
                self.weigh(self.shares * FIRST_FACTOR)

        try:
            yield over
        finally:
            over()  # between programs the server makes the next one's place: no program is to delay that
            self.spare.end(self)  # to take a program apart is work as well: a bound holds until that is done

    async def _watch(self, caller: str, before: float) -> None:
        """Lower a program's weight but for moments when its caller has nothing left, or when it takes long.

        Its guard is weighed with it, and would not see a limit exceeded if it never ran. Moments alone are less than
        what a program with the usual limit must have, on a machine that others use all of.
        """
        began = self.now()
        with suppress(OSError):  # the group was removed: what ran there has ended
            while True:
                used = self._counted - before
                is_long = used >= LONG_SECONDS
                is_behind = is_long and used < LEAST_PROCESSORS * (self.now() - began)
                self._weigh_for(caller, is_long=is_long, is_behind=is_behind and not self.spare.is_bounded(caller))
                if self._weight >= self.shares:
                    await asyncio.sleep(LOOK_SECONDS)
                else:
                    await asyncio.sleep(LONG_LOW_SECONDS if is_long else LOW_SECONDS)
                    self.count()
                    self.weigh(self.shares)
                    await asyncio.sleep(RAISED_SECONDS)
                self.count()

    def _weigh_for(self, caller: str, *, is_long: bool = False, is_behind: bool = False) -> None:
        is_first = is_behind or (not is_long and self.allowances.left(caller) > 0)
        self.weigh(self.shares * FIRST_FACTOR if is_first else self.shares // LONG_PART)
        self.spare.weigh(self, caller)

    def count(self) -> None:
        """Charge callers for what was used since the last check; small amounts are free.

        Raises:
            OSError: the group was removed.
        """
        used = int(read_control(self._usage_file)) / 1e9
        since, self._counted = used - self._counted, used
        if self._caller is not None:
            self.spare.use(self._caller, since)
            if self._weight >= self.shares:
                self.allowances.use(self._caller, since)

    def charge(self, caller: str, seconds: float) -> None:
        """Take from a caller what was used outside of the group because of its program."""
        if self.usage is not None:
            self.spare.use(caller, seconds)
            self.allowances.use(caller, seconds)

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
        spare: what there is for callers that have used much.
    """

    def __init__(self, cpu: Path, usage: Path | None, *, shares: int, processors: float, spare: SpareTime) -> None:
        self._cpu = cpu
        self._usage = usage
        self._shares = shares
        self._spare = spare
        self._allowances = Allowances(os.cpu_count() or 1, time.monotonic)
        self._quota = max(LEAST_QUOTA_MICROSECONDS, int(processors * PERIOD_MICROSECONDS))

    @classmethod
    def find(cls, mounts: Mounts, *, shares: int, processors: float, spare: SpareTime) -> "ProcessorGroups | None":
        """Find where this process may make groups; None if nowhere. For the arguments see the class."""
        cpu, usage = (
            None if parent is None or not os.access(parent, os.W_OK) else parent
            for parent in (mounts.controllers.get("cpu"), mounts.controllers.get("cpuacct"))
        )
        return None if cpu is None else cls(cpu, usage, shares=shares, processors=processors, spare=spare)

    def create(self, name: str) -> ProcessorGroup:
        """Make a group for one fork server.

        Raises:
            OSError: the kernel refused.
        """
        usage = None if self._usage is None else self._usage / name
        group = ProcessorGroup(self._cpu / name, usage, self._shares, self._quota, self._allowances, self._spare)
        for directory in _distinct(group.cpu, group.usage):
            directory.mkdir()
        try:
            group.weigh(self._shares * FIRST_FACTOR)
            with suppress(FileNotFoundError):  # a kernel without bandwidth control
                (group.cpu / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            group.bound(None)
        except OSError:
            group.remove()
            raise
        return group


def _nothing() -> None:
    """Where nothing is weighed."""


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
