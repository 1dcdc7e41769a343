"""Sizes of what an experiment left on the disk, and its end; links are never followed. All of it blocks."""

import os
import shutil
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from flotilla.services.gateway.retention.references import part_of
from flotilla.shared.schemas.retention import Part


def sizes_of(directory: Path) -> Mapping[Part, int]:
    """Add up what each part of an experiment's directory would free, in bytes.

    A file with several names, such as one that a fork has links to, frees nothing. What vanishes meanwhile counts for
    nothing.
    """
    found: Counter[Part] = Counter()
    for entry in _entries(directory):
        part = part_of(entry.name)
        found[part] += _sum(entry.path) if entry.is_dir(follow_symlinks=False) else _size(entry.path)
    return found


def remove(directory: Path, part: Part) -> None:
    """Delete a part of an experiment's directory, or all of it; what is gone already is no error.

    Raises:
        OSError: something could not be deleted; what could is gone.
    """
    meant = [entry for entry in _entries(directory) if part in {Part.RUN, part_of(entry.name)}]
    for path in [*(Path(entry.path) for entry in meant), *([directory] if part is Part.RUN else ())]:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:
            continue


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    if directory.is_symlink():
        return []
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sum(folder: str) -> int:
    return sum(_size(f"{where}/{name}") for where, _, names in os.walk(folder) for name in names)


def _size(path: str) -> int:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0
