"""What a provider does, how it fails, and whose a box is.

A box is a provider's machine: a container, a pod, a hosted virtual machine. Every provider labels what it makes
with its owner and its end, and has it end by itself then: a box outlives a service that was killed by its lease alone.
"""

import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final, Protocol

from flotilla.services.sandbox.fork_servers import SandboxFailed

OWNER, BOX, UNTIL = "flotilla-owner", "flotilla-box", "flotilla-until"
"""Labels of a box: its owner, its own name, and when it ends (seconds since 1970)."""
MARK, MARKED = "flotilla", "sandbox"
"""A label that all boxes have, by which providers find them."""


BOOT, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
STARTED: Final = 19
"""``starttime`` in proc(5), counted from 0 after the process's name."""


class Cause(StrEnum):
    """Why a provider failed. None of them is a program's fault."""

    ABSENT = "absent"
    """It cannot be reached."""
    BUSY = "busy"
    """It asks to come later, or has no room."""
    REFUSED = "refused"
    """It refuses: the credentials, the quota, the image."""
    FAILED = "failed"
    """It reports a failure, or its answer cannot be parsed."""
    LATE = "late"
    """It does not answer in time."""
    LOST = "lost"
    """The box is lost."""


class ProviderFailed(SandboxFailed):
    """The provider failed; this is not the program's fault.

    Args:
        cause: why.
        detail: for a person; never what the provider was shown, such as a key.
    """

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail, cause=cause.value)
        self.cause: Final = cause


@dataclass(frozen=True)
class Wanted:
    """A box that is to be made.

    Attributes:
        name: unique; also its label.
        image: what the provider makes it of; E2B: a template.
        lifetime_seconds: it ends by itself so long after its start.
        memory_bytes: of all that runs in it.
        processors: how many it may use.
        processes: how many may live in it at a time.
        has_network: whether it reaches others; closed otherwise.
    """

    name: str
    image: str
    lifetime_seconds: float
    memory_bytes: int
    processors: float
    processes: int
    has_network: bool

    def labels(self, owner: str) -> dict[str, str]:
        """Make the labels of the box."""
        return {MARK: MARKED, OWNER: owner, BOX: self.name, UNTIL: str(int(time.time() + self.lifetime_seconds))}


@dataclass(frozen=True)
class Found:
    """An existing box: the provider's id, with its labels."""

    id: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Box:
    """A box that was made.

    Attributes:
        id: the provider's.
        name: ours.
        image: that it was made of.
        ends_at: when it ends by itself, by a clock that never goes back.
        url: where commands and files go, for providers with an address for each box.
        headers: that such calls show; they may hold a secret.
    """

    id: str
    name: str
    image: str
    ends_at: float
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class Provider(Protocol):
    """Makes boxes, runs commands in them, and takes them away.

    Every call ends: by an answer, or by a ``ProviderFailed``.
    """

    kind: ClassVar[str]

    async def create(self, wanted: Wanted) -> Box:
        """Make a box that is ready for commands.

        Raises:
            ProviderFailed: it could not be made; what there is of it ends with the next ``list``.
        """

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        """Run ``sh -c SCRIPT`` in a box, and return its exit code.

        Args:
            box: where.
            script: bounds its own time.
            seconds: for which an answer is waited.

        Raises:
            ProviderFailed: nothing is known of what the script did.
        """

    async def write(self, box: Box, path: str, content: bytes) -> None:
        """Write a file, by its absolute path, whose directory is there.

        Raises:
            ProviderFailed: it could not be written.
        """

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        """Read a file; None if there is none, or it is longer than allowed.

        Raises:
            ProviderFailed: it could not be read.
        """

    async def destroy(self, box_id: str) -> None:
        """Remove a box; nothing happens if it is gone.

        Raises:
            ProviderFailed: it could not be removed.
        """

    async def list(self) -> Sequence[Found]:
        """List the boxes that have any Flotilla owner.

        Raises:
            ProviderFailed: they could not be listed.
        """

    async def close(self) -> None:
        """Close the connections."""


def owner_here() -> str:
    """Name this process so that others can check whether it still lives."""
    return f"{_host()}.{os.getpid()}.{_began(os.getpid())}"


def is_orphan(found: Found, me: str, now: float) -> bool:
    """Return whether a box of another owner is not needed any more: its end has come, or its owner has ended.

    Args:
        found: the box.
        me: the caller; whether its own are needed it knows itself.
        now: seconds since 1970.
    """
    until, owner = _number(found.labels.get(UNTIL, "")), found.labels.get(OWNER, "")
    if until is not None and until < now:
        return True
    host, _, process = owner.partition(".")
    pid, began = map(_number, process.split(".", 1)) if "." in process else (None, None)
    if owner == me or host != _host() or pid is None or began is None:
        return False
    return _began(pid) != began


def _number(label: str) -> int | None:
    """Parse a numeric label; a foreign one may be anything."""
    return int(label) if label.isascii() and label.isdigit() and len(label) < 20 else None


def _began(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks, which no change of the clock moves; None if there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(line.rpartition(b")")[2].split()[STARTED])


def _host() -> str:
    """Name the namespace of pids: those of another boot, or in another container, have no meaning here."""
    parts = (socket.gethostname(), BOOT.read_text().strip(), str(PROCESSES.readlink()))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
