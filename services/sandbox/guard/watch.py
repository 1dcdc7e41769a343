"""Counting what a process tree uses, by looking at intervals.

The limits of the kernel are per process, or per uid. What the whole tree uses together is bounded by a control group
where there is one; elsewhere by this. A look costs well under a millisecond; what is used between two looks is the
overshoot.
"""

import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flotilla.services.sandbox.guard.job import STARVED, TIMED_OUT
from flotilla.services.sandbox.limits import Limits, longest_seconds

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
BLOCK_BYTES = 512
BUFFER_BYTES = {"socket": 212_992, "pipe": 65_536}
"""What a socket or pipe can hold, as the kernel counts it: neither can be made larger here."""
MAPPING_BYTES = 256
CHUNK_BYTES = 65536
POLL_SECONDS = 0.05
LOOKING_PART = 10
"""Looks take one part in so many of the time, where they take longer than a moment."""


def next_look(cpu_seconds_before: float) -> float:
    """Return when to look again: rarely where looking is work, for there are very many processes.

    Only the work counts: on a busy machine a look may wait long for a processor, in which a program continues.

    Args:
        cpu_seconds_before: this process's time of the processor when the look began.
    """
    return time.monotonic() + max(POLL_SECONDS, LOOKING_PART * (time.process_time() - cpu_seconds_before))


@dataclass(frozen=True)
class ProcessStatus:
    """A line of /proc: parent, threads, resident bytes, CPU time of it and of those it has waited for.

    Attributes:
        reader: a thread of it that lives: what a process holds is not seen through a first thread that has ended.
        is_blocked: whether it waits in the kernel for something that no process of its own can end.
    """

    parent: int
    threads: int
    resident_bytes: int
    cpu_seconds: float
    reader: int = 0
    is_blocked: bool = False


def read(path: str) -> bytes:
    """Read a file of /proc.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = piece = os.read(descriptor, CHUNK_BYTES)
        while len(piece) > 0:
            piece = os.read(descriptor, CHUNK_BYTES)
            content += piece
        return content
    finally:
        os.close(descriptor)


def read_status(pid: int) -> "ProcessStatus | None":
    """Read one process; None if it has ended."""
    try:
        line = read(f"/proc/{pid}/stat")
    except OSError:
        return None
    # The command name, in parentheses, may hold anything; the numbers start behind the last parenthesis.
    fields = line[line.rindex(b")") + 2 :].split()
    threads = int(fields[17])
    if fields[0] == b"Z" and threads > 1 and (found := _living_thread(pid)) is not None:
        pid, fields = found
    cpu_seconds = sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    return ProcessStatus(int(fields[1]), threads, int(fields[21]) * PAGE_BYTES, cpu_seconds, pid, fields[0] == b"D")


def _living_thread(pid: int) -> "tuple[int, list[bytes]] | None":
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        try:
            line = read(f"/proc/{pid}/task/{thread}/stat")
        except OSError:
            continue
        fields = line[line.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            return int(thread), fields
    return None


def descendants(*roots: int) -> dict[int, ProcessStatus]:
    """List all processes below some, and all of these but the first. Orphans are among them as long as one is their
    reaper."""
    statuses = {}
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        if (status := read_status(pid)) is not None:
            statuses[pid] = status
    children: dict[int, list[int]] = {}
    for pid, status in statuses.items():
        children.setdefault(status.parent, []).append(pid)
    found: dict[int, ProcessStatus] = {}
    waiting = [*children.get(roots[0], ()), *(pid for pid in roots[1:] if pid in statuses)]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found[pid] = statuses[pid]
            waiting += children.get(pid, ())
    return found


def proportional_bytes(pid: int) -> "int | None":
    """Read what a process holds, shared pages counted in parts; None if that cannot be read."""
    try:
        text = read(f"/proc/{pid}/smaps_rollup")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return None


def memory_bytes(tree: "dict[int, ProcessStatus]", limit_bytes: int) -> int:
    """Sum the memory of a tree. Shared pages are counted once only where the simple sum is over the limit."""
    simple = sum(status.resident_bytes for status in tree.values())
    if simple <= limit_bytes:
        return simple
    total = 0
    for status in tree.values():
        exact = proportional_bytes(status.reader)
        total += status.resident_bytes if exact is None else exact
    return total


@dataclass(frozen=True)
class Held:
    """What the kernel keeps for a process tree besides its pages.

    Attributes:
        kernel_bytes: at most, of pipes, sockets and mappings.
        deleted_bytes: of files that have no name any more, open or mapped.
    """

    kernel_bytes: int
    deleted_bytes: int


def held(tree: "dict[int, ProcessStatus]", device: int) -> Held:
    """Measure what a tree has open and mapped. No file is on its way between processes: the filter denies sending any.

    Args:
        tree: the processes.
        device: where deleted files count.
    """
    buffers: dict[str, int] = {}
    deleted: dict[int, int] = {}
    mappings = 0
    for status in tree.values():
        for path in _descriptors(status.reader):
            _look_at(path, device, buffers, deleted)
        for line in _mappings(status.reader):
            mappings += 1
            if line.endswith(b"(deleted)"):
                place, _, _, numbers, inode = line.split(None, 5)[:5]
                start, _, end = place.partition(b"-")
                major, _, minor = numbers.partition(b":")
                if os.makedev(int(major, 16), int(minor, 16)) == device:
                    size = int(end, 16) - int(start, 16)
                    deleted[int(inode)] = max(deleted.get(int(inode), 0), size)
    return Held(sum(buffers.values()) + mappings * MAPPING_BYTES, sum(deleted.values()))


def _look_at(path: str, device: int, buffers: "dict[str, int]", deleted: "dict[int, int]") -> None:
    """Note what one descriptor holds; what several share counts once."""
    try:
        target = os.readlink(path)  # noqa: PTH115  a look has many
        kind, _, _ = target.partition(":[")
        if kind in BUFFER_BYTES:
            buffers[target] = BUFFER_BYTES[kind]
        elif target.endswith(" (deleted)"):
            found = os.stat(path)  # noqa: PTH116
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and found.st_dev == device:
                deleted[found.st_ino] = found.st_blocks * BLOCK_BYTES
    except OSError:  # it was closed meanwhile
        return


def _descriptors(pid: int) -> "list[str]":
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH208
    except OSError:
        return []


def _mappings(pid: int) -> "list[bytes]":
    try:
        return read(f"/proc/{pid}/maps").splitlines()
    except OSError:
        return []


@dataclass
class Baseline:
    """What the processes of a tree had used of their time before what is measured began, and have waited since.

    Attributes:
        cpu_seconds: all together.
        queued_seconds: each of them at the last look, ready to run and waiting for a processor.
        guard_seconds: the guard itself, likewise, at the beginning: while it waits, a program may wait for it.
        waited_seconds: since the beginning, between two looks as long as the one that waited longest.
    """

    cpu_seconds: float = 0.0
    queued_seconds: "Mapping[int, float]" = field(default_factory=dict)
    guard_seconds: float = 0.0
    waited_seconds: float = 0.0

    @classmethod
    def of(cls, tree: "dict[int, ProcessStatus]") -> "Baseline":
        """Measure a tree."""
        return cls(cpu_seconds(tree), {pid: queued_seconds(pid) for pid in tree}, queued_seconds(os.getpid()))

    def look(self, tree: "dict[int, ProcessStatus]") -> None:
        """Count the waiting time since the last check. For an ended process it would be lost."""
        queued = {pid: queued_seconds(pid) for pid in tree}
        since = [seconds - self.queued_seconds.get(pid, 0.0) for pid, seconds in queued.items()]
        self.waited_seconds += max(since, default=0.0)
        self.queued_seconds = queued


def cpu_seconds(tree: "dict[int, ProcessStatus]") -> float:
    """Sum the processor time of a tree."""
    return sum(status.cpu_seconds for status in tree.values())


def running_seconds(pid: int) -> float:
    """Return how long a process has had a processor; 0 if that is not known any more."""
    return _scheduled_seconds(pid, 0)


def queued_seconds(pid: int) -> float:
    """Return how long a process has waited for a processor, ready to run; 0 if that is not known any more."""
    return _scheduled_seconds(pid, 1)


def _scheduled_seconds(pid: int, field: int) -> float:
    try:
        return int(read(f"/proc/{pid}/schedstat").split()[field]) / 1e9
    except (OSError, IndexError, ValueError):  # gone, or a kernel that does not count it
        return 0.0


class Blockage:
    """Counts, by looks, how long all of a tree has been blocked in the kernel: others hold what it waits for.

    A process that starts another by ``vfork`` looks blocked too; what it started does not.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def look(self, tree: "dict[int, ProcessStatus]", now: float) -> None:
        """Measure a tree; it was blocked between two checks if it is at both."""
        is_blocked = bool(tree) and all(status.is_blocked for status in tree.values())
        if is_blocked and self._since is not None:
            self.seconds += now - self._since
        self._since = now if is_blocked else None


def time_verdict(
    tree: "dict[int, ProcessStatus]",
    elapsed_seconds: float,
    limit_seconds: float,
    before: Baseline,
    blocked_seconds: float = 0.0,
) -> "str | None":
    """Return whether a program has had its time: time that it waited for a processor in use by others does not count.

    A tree that has used its limit in CPU time cannot gain by waiting for itself. Of all processes it is the one that
    waited longest that counts. A tree without processes is about to be over by itself.

    Args:
        tree: the processes.
        elapsed_seconds: by the wall clock.
        limit_seconds: how long they may take.
        before: what they and the guard, which is this process, had used when the clock was started.
        blocked_seconds: how long they were blocked; see ``Blockage``.

    Returns:
        ``TIMED_OUT``: it has; ``STARVED``: it has not, and will not wait for longer; None: it may continue.
    """
    before.look(tree)
    if elapsed_seconds < limit_seconds:
        return None
    if tree and cpu_seconds(tree) - before.cpu_seconds >= limit_seconds:
        return TIMED_OUT
    waited_for_guard = queued_seconds(os.getpid()) - before.guard_seconds
    if tree and elapsed_seconds - before.waited_seconds - waited_for_guard - blocked_seconds >= limit_seconds:
        return TIMED_OUT
    return STARVED if elapsed_seconds >= longest_seconds(limit_seconds) else None


def directory_usage(directory: str, limits: Limits) -> "tuple[int, int]":
    """Sum bytes and number of what is below a directory, no further than the limit on the number.

    Raises:
        PermissionError: a directory below cannot be read, so what it holds cannot be counted.
        OSError: likewise, for its path is too long.
    """
    total, number = 0, 0
    waiting = [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    number += 1
                    if number > limits.files:
                        return total, number
                    try:
                        total += entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                    except FileNotFoundError:
                        continue
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total, number


def find_excess(tree: "dict[int, ProcessStatus]", directory: str, limits: Limits, *, counts_held: bool) -> "str | None":
    """Look once.

    Args:
        tree: the processes.
        directory: where it works.
        limits: what it may use.
        counts_held: look also at what the kernel holds for the tree, where no control group counts that.

    Returns:
        Which limit they exceed, as a sentence; None if they exceed none.
    """
    kept = held(tree, os.stat(directory).st_dev) if counts_held else Held(0, 0)  # noqa: PTH116
    used = memory_bytes(tree, limits.memory_bytes - kept.kernel_bytes) + kept.kernel_bytes
    if used > limits.memory_bytes:
        return f"memory limit exceeded: {used} bytes in {len(tree)} processes, allowed {limits.memory_bytes}"
    threads = sum(status.threads for status in tree.values())
    if threads > limits.processes:
        return f"process limit exceeded: {threads} processes and threads, allowed {limits.processes}"
    try:
        disk, files = directory_usage(directory, limits)
    except PermissionError as error:
        name = str(error.filename)[len(directory) + 1 :]
        return f"the directory {name!r} was made unreadable, so its files cannot be counted"
    except OSError as error:
        # The program made it so: if that were our failure, it could choose not to be graded.
        return f"what the directory contains cannot be counted: {error.strerror or error}"
    if files > limits.files:
        return f"file limit exceeded: more than {limits.files} files"
    disk += kept.deleted_bytes
    if disk > limits.disk_bytes:
        return f"disk limit exceeded: {disk} bytes in {files} files, allowed {limits.disk_bytes}"
    return None
