"""Saved models as one file: a tar, made while it is sent."""

import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

PIECE_BYTES: Final = 1 << 20
END: Final = bytes(2 * tarfile.BLOCKSIZE)


def archive(directory: Path, names: Sequence[str]) -> tuple[int, Iterator[bytes]]:
    """Begin a tar of files; blocks. They are open from now on: what is deleted meanwhile is still sent whole.

    Returns:
        Its size, and its bytes in pieces, which block.

    Raises:
        OSError: a file cannot be opened.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context((directory / name).open("rb")) for name in names]
        heads = [_head(name, file) for name, file in zip(names, opened, strict=True)]
        sizes = [os.fstat(file.fileno()).st_size for file in opened]
        total = sum(map(len, heads)) + sum(size + _padding(size) for size in sizes) + len(END)
        return total, _pieces(stack.pop_all(), zip(heads, opened, sizes, strict=True))


def _head(name: str, file: BinaryIO) -> bytes:
    status = os.fstat(file.fileno())
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = status.st_size, int(status.st_mtime), 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def _pieces(stack: ExitStack, members: Iterable[tuple[bytes, BinaryIO, int]]) -> Iterator[bytes]:
    with stack:
        for head, file, size in members:
            yield head
            while piece := file.read(PIECE_BYTES):
                yield piece
            yield bytes(_padding(size))
        yield END
