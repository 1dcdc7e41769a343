"""Processes that no service owns any more, and that hold devices or memory: what a crash may leave behind."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from flotilla.shared.children.spawning import output_of
from flotilla.shared.schemas.checks import MOST_ORPHANS, Orphan

MEBIBYTE: Final = 1024**2
QUERY: Final = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")
QUERY_SECONDS: Final = 5.0
OWNERS: Final = re.compile(r"flotilla\.services\.\w+|flotilla(\.cli)?")
"""Modules that own others; whatever else of ours runs is somebody's child."""
LONGEST_COMMAND: Final = 200


@dataclass(frozen=True, slots=True)
class Running:
    """A process.

    Attributes:
        words: of its command; empty where they cannot be read.
    """

    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def module(self) -> str | None:
        """Our module that it runs; None where it runs something else."""
        found = [after for word, after in zip(self.words, self.words[1:], strict=False) if word == "-m"]
        if found:
            return found[0] if found[0].partition(".")[0] == "flotilla" else None
        is_script = any(word.rpartition("/")[2] == "flotilla" for word in self.words[:2])
        return "flotilla" if is_script else None


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process has of a device."""

    pid: int
    device: str
    memory_bytes: int


def parse_holdings(text: str) -> list[Holding]:
    """Read what nvidia-smi says of processes: pid, UUID of the device, MiB; other lines are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            size = int(fields[2]) * MEBIBYTE if fields[2].isdigit() else 0
            found.append(Holding(int(fields[0]), fields[1], size))
    return found


def orphans(running: Iterable[Running], holdings: Iterable[Holding]) -> list[Orphan]:
    """Find children of ours without an owner, and whoever else holds a device; those with devices first."""
    processes = {each.pid: each for each in running}
    held: dict[int, list[Holding]] = {}
    for each in holdings:
        held.setdefault(each.pid, []).append(each)
    ours = {pid for pid, each in processes.items() if each.module is not None and not _is_owner(each)}
    found = [
        _orphan(pid, processes, held.get(pid, []))
        for pid in sorted(ours | held.keys())
        if not _is_owned(pid, processes)
    ]
    return sorted(found, key=lambda each: -each.memory_bytes)


def find_orphans() -> tuple[Orphan, ...]:
    """Find those of this machine, as far as this container sees them; blocks."""
    running = [
        Running(each.info["pid"], each.info["ppid"] or 0, tuple(each.info["cmdline"] or ()))
        for each in psutil.process_iter(["pid", "ppid", "cmdline"])
    ]
    holdings: list[Holding] = []
    with suppress(OSError):
        holdings = parse_holdings(output_of(QUERY, seconds=QUERY_SECONDS))
    return tuple(orphans(running, holdings)[:MOST_ORPHANS])


def _is_owner(process: Running) -> bool:
    return process.module is not None and OWNERS.fullmatch(process.module) is not None


def _is_owned(pid: int, processes: Mapping[int, Running]) -> bool:
    """Whether the process, or one above it, is a service or a command of ours."""
    seen: set[int] = set()
    while pid in processes and pid not in seen:
        seen.add(pid)
        if _is_owner(processes[pid]):
            return True
        pid = processes[pid].parent
    return False


def _orphan(pid: int, processes: Mapping[int, Running], held: list[Holding]) -> Orphan:
    words = processes[pid].words if pid in processes else ()
    # The module alone: arguments may be secrets.
    name = (processes[pid].module or words[0]) if words else ""
    return Orphan(
        pid=pid,
        command=name[:LONGEST_COMMAND],
        devices=tuple(sorted({each.device for each in held})),
        memory_bytes=sum(each.memory_bytes for each in held),
    )
