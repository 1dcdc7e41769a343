"""An experiment's directory, copied while a trainer writes in it: whole checkpoints, and other files as they are."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete, state_of
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.files.beneath import Outside, open_beneath, read_beneath

PIECE_BYTES = 8 << 20


class Interrupted(Exception):
    """The copy is no longer wanted."""


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
        num_bytes += _copy(source, stored.path, target)
        if state_of(copied) is None:
            shutil.rmtree(copied, ignore_errors=True)
    return num_bytes + _copy(source, source, target, leave_out=source / CHECKPOINTS)


def restore_experiment(backup: Path, name: str, target: Path, is_unwanted: Callable[[], bool] = lambda: False) -> None:
    """Copy a directory of a backup into a new one; blocks.

    Args:
        backup: the whole folder, which is not trusted.
        name: of the directory in it.
        target: must not be there.
        is_unwanted: asked before each file.

    Raises:
        InvalidRequest: something in it is a link, or neither a file nor a folder.
        Interrupted: it is unwanted.
        OSError: it cannot be copied.
    """
    target.mkdir(mode=0o700, parents=True)
    if (backup / name).is_symlink() or not (backup / name).is_dir():
        raise InvalidRequest(f"this backup is damaged: {name} is no folder")
    for folder, names, files in os.walk(backup / name, onerror=_raise):
        here = Path(folder)
        below = here.relative_to(backup / name)
        for each in names:
            if (here / each).is_symlink():
                raise InvalidRequest(f"this backup is damaged: {name}/{below / each} is a link")
            (target / below / each).mkdir()
        for each in files:
            if is_unwanted():
                raise Interrupted
            try:
                with read_beneath(backup, str(Path(name, below, each))) as file:
                    _write(file, target, below / each)
            except Outside as error:
                raise InvalidRequest(f"this backup is damaged: {error.filename}: {error.strerror}") from None


def _raise(error: OSError) -> None:
    raise error


def _copy(source: Path, part: Path, target: Path, leave_out: Path | None = None) -> int:
    num_bytes = 0
    for path in _files(part, leave_out):
        name = path.relative_to(source)
        try:
            file = read_beneath(source, str(name))
        except OSError:
            continue
        with file:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            num_bytes += _write(file, target, name)
    return num_bytes


def _write(file: BinaryIO, target: Path, name: Path) -> int:
    descriptor = open_beneath(target, str(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with os.fdopen(descriptor, "wb") as copy:
        shutil.copyfileobj(file, copy, PIECE_BYTES)
        return copy.tell()


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
