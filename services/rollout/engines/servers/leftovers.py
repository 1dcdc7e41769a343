"""Files in shared memory that a server makes, and that remain when it is killed.

Their names do not identify the server. So while a server lives, what its
processes have mapped is noted in its directory; removing the directory removes those files first.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (nothing is created there)
NOTES = "shared-memory"


def note(place: Path, group: int, prefixes: tuple[str, ...], *, directory: Path = SHARED_MEMORY) -> None:
    """Note the files that processes of a server have mapped.

    Args:
        place: the server's directory.
        group: its process group.
        prefixes: of the names of such files.
        directory: where they are.
    """
    known = set(_noted(place))
    new = {name for name in _names(directory) if name.startswith(prefixes)} - known if prefixes else set()
    if new and (found := new & _mapped(group, directory)):
        with (place / NOTES).open("a", encoding="utf-8") as notes:
            notes.writelines(f"{name}\n" for name in sorted(found))


def remove(place: Path, *, directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove the files that were noted in a dead server's directory; name those that were there."""
    removed = []
    for name in _noted(place):
        with suppress(OSError):
            (directory / Path(name).name).unlink()
            removed.append(name)
    return removed


def _noted(place: Path) -> list[str]:
    with suppress(OSError):
        # The last line may be half written.
        return [line[:-1] for line in (place / NOTES).read_text(encoding="utf-8").splitlines(True) if line[-1] == "\n"]
    return []


def _names(directory: Path) -> list[str]:
    with suppress(OSError):
        return [path.name for path in directory.iterdir()]
    return []


def _mapped(group: int, directory: Path) -> set[str]:
    return {name for pid in _members(group) for name in _mapped_by(pid, directory)}


def _members(group: int) -> Iterator[int]:
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getpgid(pid) == group:
                yield pid


def _mapped_by(pid: int, directory: Path) -> Iterator[str]:
    start = f"{directory}/"
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            # Address, rights, offset, device, number of the file, path.
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(start):
                yield fields[5].removeprefix(start)
