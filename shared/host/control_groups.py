"""The control groups of this process, version 1 or 2: where they are, and what they leave it of memory and cores.

Whatever a group is bounded by bounds the groups below it, so each question goes from the process' own group to the top.

Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

LIMIT_AND_USE = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a group's memory in bytes, by its two versions."""
STATISTICS = "memory.stat"
KILLS = ("memory.events", "memory.oom_control")


@dataclass(frozen=True)
class Mounts:
    """Where this process's own groups are: by controller (version 1) and unified (version 2)."""

    controllers: Mapping[str, Path]
    unified: Path | None

    def of(self, controller: str) -> Iterator[Path]:
        """List the groups that may bound this process, its own ones first."""
        for own in (self.unified, self.controllers.get(controller)):
            if own is not None:
                yield from (own, *own.parents)


def find_mounts() -> Mounts:
    """Find this process's own control groups; none where the system does not tell."""
    try:
        return read_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return Mounts({}, None)


def read_mounts(mountinfo: str, own: str) -> Mounts:
    """Read ``/proc/self/mountinfo`` and ``/proc/self/cgroup``."""
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    controllers: dict[str, Path] = {}
    unified = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2" and "" in paths:
            unified = _inside(point, root, paths[""])
        elif kind == "cgroup":
            for option in options.split(","):
                if option in paths:
                    controllers[option] = _inside(point, root, paths[option])
    return Mounts(controllers, unified)


def _inside(point: str, root: str, path: str) -> Path:
    # In a container the mount may show only a part of the hierarchy, from ``root`` on.
    pure = PurePosixPath(path)
    return Path(point, pure.relative_to(root)) if pure.is_relative_to(root) else Path(point)


def available_bytes(mounts: Mounts | None = None) -> int:
    """Count the bytes of the host's memory that this process may still take: what the host has available, and what is
    left of its control groups' limits. Cached file pages of a group that are not in use count as free.
    """
    found: int = psutil.virtual_memory().available
    for group in (mounts or find_mounts()).of("memory"):
        if (left := memory_left_in(group)) is not None:
            found = min(found, left)
    return max(0, found)


def limit_bytes(mounts: Mounts | None = None) -> int:
    """Count the bytes of the host's memory that this process could ever have: what the host has, or the least limit of
    its control groups.
    """
    found: int = psutil.virtual_memory().total
    for group in (mounts or find_mounts()).of("memory"):
        for limit, _ in LIMIT_AND_USE:
            with suppress(OSError, ValueError):
                found = min(found, int((group / limit).read_text()))
    return found


def memory_left_in(group: Path) -> int | None:
    """Count the bytes that a control group may still take; None where it has no limit."""
    for limit, use in LIMIT_AND_USE:
        with suppress(OSError, ValueError):
            most, used = int((group / limit).read_text()), int((group / use).read_text())
            statistics = _numbers(group / STATISTICS)
            # Version 1 counts the groups below apart, version 2 with the group itself.
            return most - used + statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return None


def allowed_cores(mounts: Mounts | None = None) -> float:
    """How many cores this process's control groups may use at a time; infinite without a limit."""
    return min((_cores_of(group) for group in (mounts or find_mounts()).of("cpu")), default=math.inf)


def _cores_of(group: Path) -> float:
    with suppress(OSError, ValueError):
        most, period = (group / "cpu.max").read_text().split()
        return int(most) / int(period)
    with suppress(OSError, ValueError):
        microseconds = int((group / "cpu.cfs_quota_us").read_text())  # -1: no limit
        return microseconds / int((group / "cpu.cfs_period_us").read_text()) if microseconds > 0 else math.inf
    return math.inf


def count_memory_kills(mounts: Mounts | None = None) -> int:
    """Count the processes of this process's own control group that the kernel has killed for memory; 0 where it does
    not say.
    """
    for group in (mounts or find_mounts()).of("memory"):
        for name in KILLS:
            with suppress(OSError, KeyError):
                return _numbers(group / name)["oom_kill"]
    return 0


def _numbers(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+)\s+(\d+)", path.read_text(), re.MULTILINE)}
