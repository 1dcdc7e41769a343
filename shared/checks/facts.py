"""Facts of a process and its host: release, disk, shared memory, ports, and who holds its devices.

A crash may leave processes that no service owns any more, and that hold devices or memory.
"""

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

import flotilla
from flotilla.shared.children.spawning import output_of
from flotilla.shared.config.revisions import REVISION
from flotilla.shared.environment.settings import PORTS, ports_from
from flotilla.shared.schemas.checks import MOST_ORPHANS, HostFacts, Orphan
from flotilla.shared.weights.image.files import SHARED_MEMORY

MEBIBYTE: Final = 1024**2
QUERY: Final = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")
QUERY_SECONDS: Final = 5.0
OWNERS: Final = re.compile(r"flotilla\.services\.\w+|flotilla(\.cli)?")
"""Modules of processes that own others; every other Flotilla process is a child."""
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
    """Parse the process list of nvidia-smi: pid, UUID of the device, MiB; other lines are left out."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            size = int(fields[2]) * MEBIBYTE if fields[2].isdigit() else 0
            found.append(Holding(int(fields[0]), fields[1], size))
    return found


def orphans(running: Iterable[Running], holdings: Iterable[Holding]) -> list[Orphan]:
    """Find Flotilla's orphaned child processes, and others that hold a device; those with devices first."""
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
    """Whether the process, or one above it, is a service or a Flotilla command."""
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


PACKAGE: Final = Path(flotilla.__file__).parent
SCHEMAS: Final = "shared/schemas"
DIGITS: Final = 12


@dataclass(frozen=True, slots=True)
class Sources:
    """What the sources of this installation are.

    Attributes:
        code: digest of all of them.
        schemas: of what goes over the wire.
        newest: when the last of them was written, in seconds since the epoch.
    """

    code: str
    schemas: str
    newest: float


def sources(root: Path = PACKAGE) -> Sources:
    """Digest every Python source below a folder; blocks for a tenth of a second."""
    code, schemas, newest = hashlib.sha256(), hashlib.sha256(), 0.0
    for path in sorted(_python_files(root)):
        name = path.relative_to(root).as_posix()
        content = name.encode() + b"\0" + path.read_bytes() + b"\0"
        code.update(content)
        newest = max(newest, path.stat().st_mtime)
        if name.startswith(SCHEMAS):
            schemas.update(content)
    return Sources(code.hexdigest()[:DIGITS], schemas.hexdigest()[:DIGITS], newest)


def _python_files(root: Path) -> Iterable[Path]:
    # Parts of the package are links in a checkout.
    for folder, _, names in os.walk(root, followlinks=True):
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


@cache
def release() -> str:
    """Name the installed release."""
    try:
        return version("flotilla")
    except PackageNotFoundError:
        return "unknown"


def host_facts(environment: Mapping[str, str] = os.environ) -> HostFacts:
    """Collect the facts of this process and its host locally; blocks."""
    own = sources()
    temporary = Path(tempfile.gettempdir())
    # Of the file system, not of a cgroup: /dev/shm of a container has a size of its own.
    shared = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    allowed = ports_from(environment)
    return HostFacts(
        release=release(),
        spec_revision=REVISION,
        code=own.code,
        schemas=own.schemas,
        is_changed=own.newest > psutil.Process().create_time() + 1.0,
        port_range=environment.get(PORTS) or None,
        free_ports=None if allowed is None else count_free(allowed),
        temporary=str(temporary),
        temporary_free_bytes=shutil.disk_usage(temporary).free,
        shared_memory_free_bytes=None if shared is None else shared.free,
        shared_memory_bytes=None if shared is None else shared.total,
        orphans=find_orphans(),
    )


def count_free(ports: Iterable[int]) -> int:
    """Count the ports without a listener."""
    free = 0
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            free += 1
    return free
