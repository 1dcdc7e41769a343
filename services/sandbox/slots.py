"""The places that programs take turns in, each with a uid of its own where the service is root.

Two services on one machine must not use the same uid, for each would end the other's programs: a uid in use is locked.
"""

import asyncio
import fcntl
import os
import signal
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flotilla.shared.errors import Unavailable

MAX_UIDS_TRIED = 600
LOCKS = (Path("/run/flotilla-sandbox"), Path("/tmp/flotilla-sandbox"))  # noqa: S108
"""The first that can be made holds the locks: of a container whose root is read-only, that is the second."""
SWEEP_SECONDS = 5.0


def lock_uid(uid: int, locks: Path) -> int | None:
    """Lock a uid for this service.

    Returns:
        The descriptor that holds the lock, or None if another service has it.
    """
    if locks.lstat().st_uid != os.getuid() or not stat.S_ISDIR(locks.lstat().st_mode):
        raise Unavailable(f"{locks} does not belong to this service's user")
    descriptor = os.open(locks / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def folder_of_locks(places: Sequence[Path]) -> Path:
    """Make the first of these folders that can be made, or find it there.

    Raises:
        Unavailable: none can.
    """
    causes = []
    for place in places:
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            return place
        except OSError as error:
            causes.append(str(error))
    raise Unavailable(f"no folder can be made for the locks of uids: {'; '.join(causes)}")


@contextmanager
def own_uids(number: int, base: int, places: Sequence[Path] = LOCKS) -> Iterator[list[int | None]]:
    """Take ``number`` free uids from ``base`` on, or none if this process is not root.

    Raises:
        Unavailable: there are not enough free ones, or their locks have no place.
    """
    if os.getuid() != 0:
        yield [None] * number
        return
    with ExitStack() as held:
        found: list[int | None] = []
        in_use, locks = uids_in_use(), folder_of_locks(places)
        for uid in range(base, base + MAX_UIDS_TRIED):
            if len(found) == number:
                break
            if uid not in in_use and (descriptor := lock_uid(uid, locks)) is not None:
                held.callback(os.close, descriptor)
                found.append(uid)
        if len(found) < number:
            raise Unavailable(f"only {len(found)} of {number} uids from {base} on are free")
        yield found


def uids_in_use() -> set[int]:
    """List the uids of all processes that have not ended."""
    found: dict[int, set[int]] = {}
    for pid, uid in _uids():
        found.setdefault(uid, set()).add(pid)
    return {uid for uid, pids in found.items() if not all(map(is_zombie, pids))}


def processes_of(uid: int) -> list[int]:
    """List the processes of a uid."""
    return [pid for pid, owner in _uids() if owner == uid]


def _uids() -> Iterator[tuple[int, int]]:
    """Read all processes with their uid. By /proc/PID/status: the owner of /proc/PID is root for some."""
    with os.scandir("/proc") as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("Uid:"):
                yield int(pid), int(line.split()[1])
                break


def living_processes_of(uid: int) -> list[int]:
    """List the processes of a uid that have not ended."""
    return [pid for pid in processes_of(uid) if not is_zombie(pid)]


async def sweep(uid: int, python: str) -> None:
    """End every process of a slot's uid.

    Raises:
        TimeoutError: some do not end.
    """
    async with asyncio.timeout(SWEEP_SECONDS):
        while remaining := await asyncio.to_thread(living_processes_of, uid):
            # Sent by a process of that very uid to all that it may signal: in one go, which no fork can outrun.
            code = f"import os; os.kill(-1, {int(signal.SIGKILL)})"
            killer = await asyncio.create_subprocess_exec(
                python, "-I", "-S", "-c", code, user=uid, group=uid, extra_groups=[], env={}
            )
            await killer.wait()
            if await asyncio.to_thread(living_processes_of, uid) == remaining:
                await asyncio.sleep(0.01)


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended and only waits for its parent to notice."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return line[line.rindex(b")") + 2 :].startswith((b"Z", b"X"))
