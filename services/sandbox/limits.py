"""What one program may use.

This module also runs inside the isolation, under an interpreter that need not have this project's dependencies: it
imports the standard library only.
"""

import math
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

MEBIBYTE = 1024 * 1024
WALL_FACTOR = 10.0
"""A program that waits for a busy processor gets at most so many times its limit, by the wall clock,"""
EXTENSION_SECONDS = 60.0
"""and at most so much more."""


@dataclass(frozen=True)
class Limits:
    """Upper bounds for one program with all its processes, and for its compiler.

    Attributes:
        memory_bytes: of the whole process tree; also the address space of each process where its runtime allows that.
        disk_bytes: all files in the working directory together.
        file_bytes: one file.
        files: number of files and directories in the working directory.
        processes: processes and threads at a time.
        open_files: descriptors of one process.
        output_bytes: kept of stdout, and of stderr; the rest is read and thrown away.
        fetch_bytes: all fetched files together.
    """

    memory_bytes: int = 512 * MEBIBYTE
    disk_bytes: int = 64 * MEBIBYTE
    file_bytes: int = 16 * MEBIBYTE
    files: int = 1024
    processes: int = 64
    open_files: int = 128
    output_bytes: int = MEBIBYTE
    fetch_bytes: int = 8 * MEBIBYTE

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def with_memory(self, memory_bytes: int) -> "Limits":
        """Make a copy with less memory; a larger value than the present one changes nothing."""
        return replace(self, memory_bytes=min(self.memory_bytes, memory_bytes))

    def to_wire(self) -> dict[str, int]:
        """Make a plain mapping of it."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, int]) -> "Limits":
        """Read what ``to_wire`` made."""
        return cls(**wire)


def longest_seconds(limit_seconds: float) -> float:
    """Return the longest time by the wall clock that a program of a time limit may take."""
    return min(WALL_FACTOR * limit_seconds, limit_seconds + EXTENSION_SECONDS)


def apply_rlimits(limits: Limits, *, cpu_seconds: float, limits_address_space: bool, processes: int) -> None:
    """Limit this process and all that it becomes. Limits are only ever lowered, so no privilege is needed.

    Args:
        limits: the bounds.
        cpu_seconds: CPU time of each process; rounded up to a whole second.
        limits_address_space: also bound the address space; off for runtimes that reserve far more than they use.
        processes: the bound for ``RLIMIT_NPROC``, which counts all processes of the uid.
    """
    seconds = math.ceil(cpu_seconds)
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: processes,
    }
    if limits_address_space:
        wanted[resource.RLIMIT_AS] = limits.memory_bytes
    for which, value in wanted.items():
        _, hard = resource.getrlimit(which)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second between the soft and the hard bound of CPU time: SIGXCPU, which has a name, comes before SIGKILL.
        slack = 1 if which == resource.RLIMIT_CPU and hard == resource.RLIM_INFINITY else 0
        resource.setrlimit(which, (bound, bound + slack))
