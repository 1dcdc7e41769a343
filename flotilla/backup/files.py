"""An experiment's directory, copied while a trainer writes in it: whole checkpoints, and other files as they are."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete, state_of


def copy_experiment(source: Path, target: Path) -> int:
    """Copy a directory; blocks. No link is followed, and what disappears meanwhile is left out.

    Checkpoints are copied newest first, since old ones are deleted; one that is not whole afterwards is left out.

    Returns:
        The bytes that were copied.
    """
    target.mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    for stored in complete(source / CHECKPOINTS, source):
        copied = target / CHECKPOINTS / stored.path.name
        num_bytes += _copy(stored.path, copied)
        if state_of(copied) is None:
            shutil.rmtree(copied, ignore_errors=True)
    return num_bytes + _copy(source, target, leave_out=source / CHECKPOINTS)


def _copy(source: Path, target: Path, leave_out: Path | None = None) -> int:
    num_bytes = 0
    for path in _files(source, leave_out):
        place = target / path.relative_to(source)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as copy:
                shutil.copyfileobj(file, copy, 8 << 20)
                num_bytes += copy.tell()
    return num_bytes


def _files(source: Path, leave_out: Path | None) -> Iterator[Path]:
    for folder, names, files in os.walk(source):
        here = Path(folder)
        names[:] = [name for name in names if here / name != leave_out]
        for name in files:
            try:
                is_file = stat.S_ISREG((here / name).lstat().st_mode)
            except OSError:
                continue
            if is_file:
                yield here / name
