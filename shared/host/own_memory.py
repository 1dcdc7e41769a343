"""The memory that this process and its children have for themselves: what is anonymous, and what they share.

Pages of mapped files are left out: the kernel takes them back when it likes. Of children those count that run one of
our modules; one that ends and comes again has the same name.

What was freed can be given back to the machine: the C library keeps pages of small blocks for later.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 2.0
"""How old a figure may be: each takes a few reads of ``/proc``."""
PREFIX: Final = "memory/"
OWN: Final = "service"
MODULE: Final = re.compile(rb"\x00-m\x00flotilla\.([\w.]+)")
NAMES: Final = {"services.rollout.engines.process.child": "engine"}
DEPTH: Final = 3


def own_bytes(status: str) -> int:
    """Count the bytes of a process, from its ``/proc/PID/status``; 0 where the system does not tell."""
    return sum(int(value) for value in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", status, re.MULTILINE)) << 10


class ProcessMemory:
    """Measures this process and its children.

    Args:
        with_children: whether their names are known: a sandbox's children run arbitrary programs.
        root, pid: where processes are described, and which one this is.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        with_children: bool = True,
        root: Path = Path("/proc"),
        pid: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._with_children, self._root, self._now = with_children, root, now
        self._pid = os.getpid() if pid is None else pid
        self._looked_at: float | None = None
        self._found: dict[str, float] = {}
        self._names: dict[int, str | None] = {}

    def look(self) -> dict[str, float]:
        """Return bytes by name: ``memory/service``, and ``memory/MODULE`` of each kind of child, all of it together.

        Nothing where the system does not tell.
        """
        if self._looked_at is None or self._now() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = self._now()
            self._found = self._look()
        return self._found

    def _look(self) -> dict[str, float]:
        found: dict[str, float] = {}
        self._add(found, OWN, self._pid)
        if self._with_children and found:
            before, self._names = self._names, {}
            for pid in self._children(self._pid, DEPTH):
                name = before[pid] if pid in before else self._name(pid)
                self._names[pid] = name
                if name is not None:
                    self._add(found, name, pid)
        return found

    def _add(self, found: dict[str, float], name: str, pid: int) -> None:
        try:
            num_bytes = own_bytes((self._root / str(pid) / "status").read_text())
        except OSError:
            return
        if num_bytes:
            found[PREFIX + name] = found.get(PREFIX + name, 0.0) + num_bytes

    def _children(self, pid: int, depth: int) -> list[int]:
        found: list[int] = []
        try:
            for task in (self._root / str(pid) / "task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            return found
        return found if depth == 1 else [*found, *(each for one in found for each in self._children(one, depth - 1))]

    def _name(self, pid: int) -> str | None:
        """Name a child by its module, but for the engine's."""
        try:
            module = MODULE.search((self._root / str(pid) / "cmdline").read_bytes())
        except OSError:
            return None
        if module is None:
            return None
        name = module.group(1).decode("ascii", "replace")
        return NAMES.get(name) or name.rpartition(".")[2]


def return_freed_memory() -> None:
    """Let the C library return what is free; nothing happens where it cannot be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
