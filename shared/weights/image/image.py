"""A weight image in shared memory: one file that its owner writes and others map, never half-written.

Every process that has an image open holds a shared ``flock`` on it, the writer an exclusive one while it writes. So a
reader is refused while bytes change, a writer is refused while a reader still maps the old bytes, and both locks end
with their process, however it dies.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from flotilla.shared.errors import Conflict, WeightTransferFailed
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.schemas.publication import Manifest
from flotilla.shared.weights.image.adapters import BASE
from flotilla.shared.weights.image.files import (
    SHARED_MEMORY,
    choose_directory,
    is_at,
    lock_shared,
    new_name,
    open_shared,
)
from flotilla.shared.weights.image.layout import ImageLayout
from flotilla.shared.weights.image.loopback import is_loopback, send_on_loopback

DEFAULT_SLICE_BYTES = 8 << 20
"""Slices of 4 to 16 MB are the fastest through gloo; larger ones gain nothing."""
WINDOW_BYTES = 4 << 20
"""So many bytes are made known to the process at a time, ahead of what is written there."""
_BLOCK_BYTES = 512
"""Of ``st_blocks``, whatever the file system's own are."""


_MADV_POPULATE_READ = 22
"""Of Linux since 5.14."""


def populate(mapped: mmap.mmap) -> bool:
    """Make the process know all pages at once, which is cheaper than one fault after the other.

    Not by MAP_POPULATE: CPython keeps its lock while it maps, up to 0.7 s per GiB, and no other thread gets on.
    """
    return populate_range(mapped, range(len(mapped)))


def populate_range(mapped: mmap.mmap, span: range) -> bool:
    """Make the process know the pages of a range; False where the system does not know the advice, or has no room.

    Args:
        mapped: a whole file; pages of it that are missing are made.
        span: begins with a page.
    """
    start = ctypes.c_char.from_buffer(mapped, span.start)
    # Where the system does not know the advice, pages are found one by one. ``mmap.madvise`` would keep the lock too.
    with contextlib.suppress(AttributeError):
        advise = ctypes.CDLL(None).madvise
        failed = advise(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(span)), _MADV_POPULATE_READ)
        return bool(failed == 0)
    return False


def reserve_range(file: FileIO, path: Path, span: range) -> None:
    """Take the room now: a page that is missing later would be a bus error in the middle of a copy."""
    with _having_room(path, span):
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), span.start, len(span))
        else:
            file.truncate(max(span.stop, os.fstat(file.fileno()).st_size))


def write_range(file: FileIO, path: Path, position: int, data: memoryview) -> None:
    """Write all of it, taking the room that is missing."""
    num_written = 0
    with _having_room(path, range(position, position + len(data))):
        while num_written < len(data):
            num_written += os.pwrite(file.fileno(), data[num_written:], position + num_written)


@contextlib.contextmanager
def _having_room(path: Path, span: range) -> Iterator[None]:
    try:
        if (faults := armed()) is not None:
            faults.hit(Site.WEIGHTS_IMAGE)
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise WeightTransferFailed(
            f"{path.parent} ran out of room for a weight image, at bytes {span.start} to {span.stop}"
        ) from error


class WeightImage:
    """One mapped image file. Made by :meth:`create` (owner: removes the file on close) or :meth:`attach`.

    The mapping lives until the last view of it is gone, also after :meth:`close`: a tensor made of it stays valid.
    """

    def __init__(self, path: Path, file: FileIO, *, is_owner: bool, mapped: mmap.mmap | None = None) -> None:
        self.path = path
        self.is_owner = is_owner
        self._file = file
        self._known: set[int] = set()
        # The mapping duplicates the descriptor, so the lock taken through the file ends with the last view.
        self._mapped: mmap.mmap | None = mapped or mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED)

    @classmethod
    def create(cls, image_bytes: int, *, directory: Path | None = None, is_reserved: bool = True) -> Self:
        """Reserve a new image of this size, zeroed, in shared memory or in the given directory.

        Args:
            image_bytes: its size, header included.
            directory: where the file goes; None chooses shared memory where there is room.
            is_reserved: False leaves it to :meth:`write_at`, piece by piece.

        Raises:
            WeightTransferFailed: no directory has room for it.
        """
        if image_bytes < 1:
            raise ValueError(f"an image has at least one byte, got {image_bytes}")
        path = choose_directory(image_bytes, directory) / new_name()
        file = path.open("x+b", buffering=0)
        try:
            os.fchmod(file.fileno(), 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)
            if is_reserved:
                reserve_range(file, path, range(image_bytes))
            else:
                file.truncate(image_bytes)
            image = cls(path, file, is_owner=True)
            if is_reserved:
                populate(image.mapped)
            return image
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, path: Path, *, is_read_whole: bool = True) -> Self:
        """Map an image that another process owns. What is written through this mapping, the owner sees.

        Args:
            path: of the image.
            is_read_whole: False finds its pages as they are read, which is dearer for each.

        Raises:
            WeightTransferFailed: there is no such file, it is empty, withdrawn, or being written.
        """
        file = open_shared(path)
        try:
            image = cls(path, file, is_owner=False)
            if is_read_whole:
                populate(image.mapped)
            return image
        except BaseException:
            file.close()
            raise

    def again(self) -> Self:
        """Open it once more, under a lock of its own; the mapping is shared. Its file may be gone, its bytes stay.

        Raises:
            WeightTransferFailed: it is being written, or the file is gone and the system offers no other way to it; or
                somebody released it meanwhile.
        """
        try:
            mapped, descriptor = self._open(), Path(f"/proc/self/fd/{self._file.fileno()}")
        except ValueError:
            raise WeightTransferFailed(f"the weight image {self.path.name} was let go of") from None
        path = descriptor if descriptor.exists() else self.path
        file = open_shared(path, may_be_withdrawn=True)
        try:
            return type(self)(self.path, file, is_owner=False, mapped=mapped)
        except BaseException:
            file.close()
            raise

    def write_at(self, position: int, data: memoryview) -> None:
        """Write a piece into the file. New pages are filled with it at once, not first with zeros as by a mapping.

        Raises:
            WeightTransferFailed: there is no room for it.
            ValueError: the image is closed.
        """
        write_range(self._file, self.path, position, data)

    def present_at(self, position: int, num_bytes: int) -> memoryview | None:
        """View a piece of the mapping, or its beginning, if every page is there: writing it takes a third of the time.

        None where pages may be missing: made by a mapping they are filled with zeros first, and where no room is left
        for one of them, that is a bus error. There is :meth:`write_at`.

        Raises:
            ValueError: the image is closed.
        """
        window = position // WINDOW_BYTES
        span = range(window * WINDOW_BYTES, min((window + 1) * WINDOW_BYTES, self.image_bytes))
        if window not in self._known:
            if not (self._has_all_pages() and populate_range(self.mapped, span)):
                return None
            self._known.add(window)
        return self.view[position : min(position + num_bytes, span.stop)]

    def _has_all_pages(self) -> bool:
        # Other file systems count blocks that hold no bytes of the file, and may need room to write it again.
        is_counted = self.path.parent == SHARED_MEMORY
        return is_counted and os.fstat(self._file.fileno()).st_blocks * _BLOCK_BYTES >= self.image_bytes

    def read_at(self, position: int, target: memoryview) -> int:
        """Read a piece from the file; gives how many bytes there were.

        Raises:
            ValueError: the image is closed.
        """
        return os.preadv(self._file.fileno(), [target], position)

    @property
    def image_bytes(self) -> int:
        """Size of the image."""
        return len(self._open())

    @property
    def mapped(self) -> mmap.mmap:
        """The mapping itself, for libraries that keep a reference to what they read."""
        return self._open()

    def fileno(self) -> int:
        """Descriptor of the file; a duplicate of it holds the lock, too."""
        return self._file.fileno()

    @property
    def view(self) -> memoryview:
        """All bytes of the image."""
        return memoryview(self._open())

    def send(self, connection: socket.socket, span: range) -> None:
        """Send a range of the image; the kernel takes the bytes from the file itself, or out of a cache on loopback.

        Raises:
            OSError: the other side is gone, or took nothing for as long as the connection's time-out.
        """
        if is_loopback(connection):
            with self.view[span.start : span.stop] as sent:
                send_on_loopback(connection, sent)
        else:
            connection.sendfile(self._file, span.start, len(span))

    @contextmanager
    def writing(self) -> Iterator[memoryview]:
        """Hold off every reader while the image's bytes change.

        Raises:
            Conflict: another process, or another mapping in this one, still reads the image.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._file, fcntl.LOCK_SH)  # the failed attempt gave up the lock that was held
            raise Conflict(f"{self.path.name} is still being read") from None
        try:
            yield self.view
        finally:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    @property
    def is_read_by_others(self) -> bool:
        """Whether another process, or another mapping in this one, has the image locked."""
        try:
            with self.writing():
                return False
        except Conflict:
            return True

    def lock(self) -> None:
        """Hold off writers again after :meth:`unlock`.

        Raises:
            WeightTransferFailed: the image is withdrawn, or being written.
        """
        lock_shared(self._file, self.path)

    def unlock(self) -> None:
        """Let others write, and keep the mapping: its bytes mean nothing until :meth:`lock`."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def is_closed(self) -> bool:
        """Whether the mapping was released."""
        return self._mapped is None

    @property
    def is_withdrawn(self) -> bool:
        """Whether the owner has removed the file, or has taken it back."""
        return not is_at(self._file, self.path)

    def write_from(self, layout: ImageLayout, pieces: Iterable[bytes | memoryview]) -> None:
        """Write the header and then the pieces, one memory copy each; together they are the whole image.

        Args:
            layout: of an image of this size.
            pieces: flat buffers in the order of the layout's tensors.

        Raises:
            ValueError: layout or pieces do not have the image's size.
        """
        if layout.image_bytes != self.image_bytes:
            raise ValueError(f"the layout takes {layout.image_bytes} bytes, the image has {self.image_bytes}")
        with self.writing() as view:
            offset = len(layout.header)
            view[:offset] = layout.header
            for piece in pieces:
                data = memoryview(piece).cast("B")
                if offset + len(data) > self.image_bytes:
                    raise ValueError(f"the pieces take more than the image's {self.image_bytes} bytes")
                view[offset : offset + len(data)] = data
                offset += len(data)
            if offset != self.image_bytes:
                raise ValueError(f"the pieces end at byte {offset} of {self.image_bytes}")

    def layout(self) -> ImageLayout:
        """Read where each tensor lies.

        Raises:
            WeightTransferFailed: the bytes are not a weight image of this size.
        """
        return layout_of(self._open())

    def checksum(self) -> str:
        """Compute xxh3-64 of the whole image, 16 hexadecimal digits."""
        return xxhash.xxh3_64_hexdigest(self._open())

    def manifest(self, version: int, slice_bytes: int = DEFAULT_SLICE_BYTES) -> Manifest:
        """Describe the image for its publication as this version. Reads every byte once, for the checksum."""
        layout = self.layout()
        return Manifest(
            version=version,
            image_bytes=self.image_bytes,
            slice_bytes=slice_bytes,
            checksum=self.checksum(),
            tensors=layout.tensors,
            base=layout.metadata.get(BASE),
        )

    def take_back(self) -> None:
        """Give an own image another name, to write it again: processes that knew the old one cannot use it any more.

        Raises:
            Conflict: another process, or another mapping in this one, still reads the image, or its file is gone.
        """
        # A process that has opened it and locks it only afterwards finds that the old name does not lead to it.
        with self.writing():
            try:
                self.path = self.path.rename(self.path.with_name(new_name()))
            except FileNotFoundError:
                raise Conflict(f"the file of {self.path.name} is gone") from None

    def hand_over(self) -> Path:
        """Give the file of a complete image to the caller: close this mapping but leave the file."""
        self.is_owner = False
        self.close()
        return self.path

    def give_back(self) -> Path:
        """Leave the file of a complete image to its lender: it stays mapped, unlocked until :meth:`own_again`."""
        self.is_owner = False
        self.unlock()
        return self.path

    def own_again(self) -> None:
        """Be the owner of an image that was lent and given back.

        Raises:
            WeightTransferFailed: its file is gone, or being written.
        """
        self.lock()
        self.is_owner = True

    def close(self) -> None:
        """Release the mapping; the owner also removes the file. May be called twice."""
        if self._mapped is not None and self.is_owner:
            self.path.unlink(missing_ok=True)
        # Not mmap.close(): it would pull the memory from under tensors that still view it.
        self._mapped = None
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> mmap.mmap:
        if self._mapped is None:
            raise ValueError(f"{self.path.name} is closed")
        return self._mapped


def layout_of(mapped: mmap.mmap) -> ImageLayout:
    """Read the layout of a whole image, and hold it against the image's size.

    Raises:
        WeightTransferFailed: the bytes are not a weight image, or one of another size.
    """
    layout = ImageLayout.parse(memoryview(mapped))
    if layout.image_bytes != len(mapped):
        raise WeightTransferFailed(f"the image has {len(mapped)} bytes, by its header {layout.image_bytes}")
    return layout
