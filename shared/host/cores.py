"""Shares a host's cores among the processes that compute on them, by what each is measured to need.

A process that computes takes a seat: a small file in shared memory, locked while its owner lives, that records whether
it computes now and for which share of its time it did lately. A process that computes alone has all cores; those that
compute at the same time divide them in proportion to these shares, so that what the others wait for gets most. A
process looks again before each piece of its work, without being notified.

Processes see each other where they see the same shared memory and may run on the same cores. Containers do not: each
divides the cores that it was given among its own processes.
"""

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import stat
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from flotilla.shared.errors import Unavailable
from flotilla.shared.host.control_groups import allowed_cores

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
LATELY_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""How long a new or dead process may stay unnoticed."""
LEAST_SHARE = 0.05
OF_OTHERS = 0o077
"""Rights of a directory that it may not give: those of its group and of everybody."""
_SEAT = struct.Struct("<BddIH")
"""Whether it computes, its share when that changed, when that was on the host's monotonic clock, which cores, and how
many of them it takes whatever there is (0: its part)."""


def divided(cores: int, shares: Sequence[float]) -> list[int]:
    """Divide cores in proportion to shares: whole ones, at least one each, deterministically."""
    exact = [cores * share / sum(shares) for share in shares]
    given = [max(1, math.floor(each)) for each in exact]
    # Rounding remainders go to those that lost most by it, the first of equal ones first.
    left = max(0, cores - sum(given))
    for index in sorted(range(len(exact)), key=lambda index: given[index] - exact[index])[:left]:
        given[index] += 1
    return given


def usable_cores() -> frozenset[int]:
    """List the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def take_directory(directory: Path) -> None:
    """Make the directory of all seats, or use an existing one that only this user can write to.

    Shared memory is open to every user of the host: the first to make the directory could assign cores, or have
    files written wherever a link leads.

    Raises:
        Unavailable: it is no directory, another user's, or open to others; the detail says which.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700, parents=True)
    found = directory.lstat()  # of a link: the link's own, which is never followed
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        wrong = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no directory"
    elif found.st_uid != os.getuid():
        wrong = f"a directory of the user with uid {found.st_uid}"
    elif mode & OF_OTHERS:
        wrong = f"a directory that other users may use (mode {mode:04o})"
    else:
        return
    raise Unavailable(
        f"{directory}, through which processes share the cores, is {wrong}; "
        f"it has to be a directory of uid {os.getuid()} with mode 0700: remove it, and it will be made"
    )


class _Other:
    """Another process's seat, mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self._view = mmap.mmap(self._file.fileno(), _SEAT.size, prot=mmap.PROT_READ)
        except ValueError:  # smaller: of another release
            self._file.close()
            raise

    def share(self, key: int, now: float) -> tuple[float, int] | None:
        """For which share of the time it computed lately, and how many cores it takes whatever there is.

        None if it does not compute now, or not on these cores.
        """
        is_computing, share, since, cores, fixed = _SEAT.unpack(self._view[:])
        return (_lately(share, now - since, is_computing=True), fixed) if is_computing and cores == key else None

    def is_dead(self) -> bool:
        """Whether its owner has ended: the lock is free. Its file is removed then."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        self._path.unlink(missing_ok=True)
        return True

    def close(self) -> None:
        self._view.close()
        self._file.close()


class CoreSeat:
    """This process's seat; one thread uses it.

    Args:
        directory: of all seats, the same for those that share cores.
        threads: how many cores it takes whatever there is; None: its part of those that are left.
        cores, most: which this process may run on, and how many at a time.
        now: a monotonic clock.

    Raises:
        Unavailable: the directory may be another user's; see ``take_directory``.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        threads: int | None = None,
        cores: Callable[[], frozenset[int]] = usable_cores,
        most: Callable[[], float] = allowed_cores,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self._directory = directory or place / f"flotilla-cores-{os.getuid()}"
        self._cores, self._most, self._now = cores, most, now
        take_directory(self._directory)
        self._path = self._directory / f"{os.getpid()}-{secrets.token_hex(4)}"
        # Locked before others can see it: an unlocked seat is a dead one's.
        hidden = self._path.with_name(f".{self._path.name}")
        self._file = hidden.open("w+b")
        self._file.write(bytes(_SEAT.size))
        self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._view = mmap.mmap(self._file.fileno(), _SEAT.size)
        hidden.rename(self._path)
        self._others: dict[str, _Other] = {}
        self._looked_at = -math.inf
        self._key, self._num, self._fixed = 0, 1, threads or 0
        self._is_computing, self._since, self._share = False, now(), 0.5

    def begin(self) -> int:
        """Compute from now on; returns on how many cores."""
        self._change(is_computing=True)
        return self.threads()

    def end(self) -> None:
        """Leave the cores to others."""
        self._change(is_computing=False)

    def threads(self) -> int:
        """On how many cores to compute now."""
        now = self._now()
        self._look(now)
        if self._fixed:
            return self._fixed
        shares = {self._path.name: _lately(self._share, now - self._since, is_computing=self._is_computing)}
        taken = 0
        for name, other in self._others.items():
            if (found := other.share(self._key, now)) is not None:
                share, fixed = found
                if fixed:
                    taken += fixed
                else:
                    shares[name] = share
        left = max(1, self._num - taken)
        # In an order that is the same for all of them.
        names = sorted(shares)
        return divided(left, [max(LEAST_SHARE, shares[name]) for name in names])[names.index(self._path.name)]

    def fix(self, threads: int) -> None:
        """Take so many cores from now on, whatever there is."""
        self._fixed = threads
        self._write()

    def close(self) -> None:
        """Give the seat up."""
        for other in self._others.values():
            other.close()
        self._others.clear()
        self._path.unlink(missing_ok=True)
        self._view.close()
        self._file.close()

    def _change(self, *, is_computing: bool) -> None:
        now = self._now()
        self._share = _lately(self._share, now - self._since, is_computing=self._is_computing)
        self._is_computing, self._since = is_computing, now
        self._write()

    def _write(self) -> None:
        self._view[:] = _SEAT.pack(self._is_computing, self._share, self._since, self._key, self._fixed)

    def _look(self, now: float) -> None:
        """Update periodically which processes share the cores, and which cores this process may use."""
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        cores = self._cores()
        self._num = max(1, int(min(len(cores), self._most())))
        self._key = zlib.crc32(repr(sorted(cores)).encode())
        self._write()
        found = {path.name for path in self._directory.iterdir() if not path.name.startswith(".")}
        for name in found - self._others.keys() - {self._path.name}:
            with contextlib.suppress(OSError, ValueError):
                self._others[name] = _Other(self._directory / name)
        for name, other in list(self._others.items()):
            if name not in found or other.is_dead():
                other.close()
                del self._others[name]


def _lately(share: float, seconds: float, *, is_computing: bool) -> float:
    """Let a share move towards 1 or 0 while a process computes, or does not, for some time."""
    kept = math.exp(-max(0.0, seconds) / LATELY_SECONDS)
    return kept * share + (1 - kept) * is_computing
