"""Facts of a process and its host: release, disk, shared memory, ports, and who holds its devices."""

import hashlib
import os
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
from flotilla.shared.checks.orphans import find_orphans
from flotilla.shared.config.revisions import REVISION
from flotilla.shared.environment.settings import PORTS, ports_from
from flotilla.shared.schemas.checks import HostFacts
from flotilla.shared.weights.image.files import SHARED_MEMORY

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
    """Find out what can be known of this process and its host without asking anybody else; blocks."""
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
    """Count the ports that nobody listens on."""
    free = 0
    for port in ports:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            free += 1
    return free
