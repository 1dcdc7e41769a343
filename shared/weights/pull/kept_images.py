"""Images in a directory that trainer and rollouts see: written there by the trainer's service, read in ranges.

``VERSION-CHECKSUM.safetensors`` has that name once it is whole. The name proves nothing: a reader computes
the checksum of what arrived.
"""

import asyncio
import contextlib
import errno
import os
import re
import secrets
import stat
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.errors import FlotillaError, NotFound, Unavailable, WeightTransferFailed
from flotilla.shared.weights.image.image import WeightImage
from flotilla.shared.weights.image.layout import LENGTH_BYTES, ImageLayout, header_bytes
from flotilla.shared.weights.pull.sender import RangeSender
from flotilla.shared.weights.pull.source import SILENCE_SECONDS, Arrival, ArrivingImage

DIRECTORY = "weights"
"""Below the experiment's."""
OPEN_SECONDS = 5.0
LOOK_SECONDS = 0.25
CHUNK_BYTES = 1 << 20
MOST_HEADER_BYTES = 16 << 20

_NAME = re.compile(r"(\d+)-[0-9a-f]+\.safetensors(\.[0-9a-f]+)?")


def kept_path(directory: Path, version: int, checksum: str) -> Path:
    """Return where a version's image is."""
    return directory / f"{version}-{checksum}.safetensors"


@dataclass(eq=False)
class DirectorySource:
    """See ``Source``.

    Attributes:
        path: of the image.
        checksum: in its name.
    """

    path: Path
    checksum: str
    is_origin: bool = False
    strikes: int = 0
    failure: FlotillaError | None = None

    @property
    def url(self) -> str:
        """Names it in messages."""
        return str(self.path)

    async def fetch(self, arriving: ArrivingImage, arrival: Arrival) -> None:
        """See ``Source.fetch``."""
        reader = FileReader(self.path)
        try:
            size = await self._opened(reader)
            sent = range(arrival.span.start, min(arrival.span.stop, size))
            image = await arriving.expect(arrival, sent, size, self.checksum)
            arrival.stream = reader
            await self._read(reader, image, arrival.span, arriving)
        except OSError as error:
            raise Unavailable(f"reading {self.path} failed: {error}") from error
        finally:
            reader.stop()

    async def _opened(self, reader: "FileReader") -> int:
        opening = on_daemon_thread(reader.open, "weights from a directory")
        opening.add_done_callback(_settled)
        if not (await asyncio.wait([opening], timeout=OPEN_SECONDS))[0]:
            raise Unavailable(f"opening {self.path} takes longer than {OPEN_SECONDS} s")
        return opening.result()

    async def _read(self, reader: "FileReader", image: WeightImage, span: range, arriving: ArrivingImage) -> None:
        """Read a range on a thread, which is left alone where the file system hangs: it writes no more then."""
        reading = on_daemon_thread(lambda: reader.read(image, span, arriving), "weights from a directory")
        reading.add_done_callback(_settled)
        before, looks = -1, 0
        while not (await asyncio.wait([reading], timeout=LOOK_SECONDS))[0]:
            looks = looks + 1 if reader.num_received == before else 0
            before = reader.num_received
            if reader.is_stopped or looks * LOOK_SECONDS >= SILENCE_SECONDS:
                raise Unavailable(f"reading {self.path} goes no further")
        reading.result()


class FileReader:
    """Reads a range of an image's file, on threads; nothing is written any more once ``stop`` has returned."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._is_reading = False
        self.is_stopped = False
        self.num_received = 0

    def open(self) -> int:
        """Open the file and check that it is whole; blocks. Gives its size.

        Raises:
            NotFound: there is none.
            WeightTransferFailed: it is no image, or one that was cut off.
            OSError: the file system failed.
        """
        try:
            # A link could lead anywhere, and a pipe would never open.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise NotFound(f"there is no {self._path}") from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise WeightTransferFailed(f"{self._path} is a link") from error
        try:
            size = _size_of_image(descriptor, self._path)
            with self._lock:
                if self.is_stopped:
                    raise TimeoutError("it is no longer waited for")
                self._file = FileIO(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return size

    def read(self, image: WeightImage, span: range, arriving: ArrivingImage) -> None:
        """Read a range of the opened file to where it belongs; blocks, and holds a core while bytes are written.

        Raises:
            OSError: the file system failed, the file ended, or ``stop`` was called.
        """
        with self._lock:
            if self.is_stopped or self._file is None:
                raise ConnectionAbortedError("stopped before it began")
            self._is_reading, file = True, self._file
        with file:
            piece = memoryview(bytearray(min(CHUNK_BYTES, len(span))))
            while self.num_received < len(span):
                wanted = piece[: len(span) - self.num_received]
                num = os.preadv(file.fileno(), [wanted], span.start + self.num_received)
                if num == 0:
                    raise ConnectionResetError(f"it ends at byte {span.start + self.num_received}")
                with arriving.cores, self._lock:
                    if self.is_stopped:
                        raise ConnectionAbortedError("stopped")
                    image.write_at(span.start + self.num_received, wanted[:num])
                    self.num_received += num
                    there = range(span.start, span.start + self.num_received)
                    arriving.checksum.follow(image, there, wanted[:num])

    def stop(self) -> None:
        """Have nothing more written; a thread that hangs in the file system closes the file when it returns."""
        with self._lock:
            self.is_stopped = True
            if self._file is not None and not self._is_reading:
                self._file.close()


class KeptImages:
    """The newest images, written to a directory.

    Args:
        directory: made where it is missing.
        sender: moves the bytes.
    """

    def __init__(self, directory: Path, sender: RangeSender) -> None:
        self._directory = directory
        self._sender = sender

    def write(self, version: int, checksum: str, image: WeightImage) -> None:
        """Write an image, and remove all but the newest ones; blocks.

        Raises:
            OSError: the directory cannot be written, or has no room.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = kept_path(self._directory, version, checksum)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            with FileIO(partial, "xb", opener=_private) as file:
                self._sender.copy(file, image)
            # Not flushed to the disk: what a crash leaves of it has another checksum.
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        self._remove_others(path)

    def clear(self) -> None:
        """Remove all of them; blocks."""
        self._remove_others(None)
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    def _remove_others(self, written: Path | None) -> None:
        """Remove all but what was written and the version before it; also what is newer, or was left half."""
        with contextlib.suppress(OSError):
            found = {path: match for path in self._directory.iterdir() if (match := _NAME.fullmatch(path.name))}
            kept = {written}
            if written is not None:
                version = int(found[written][1])
                earlier = [each for each in found if not found[each][2] and int(found[each][1]) < version]
                kept.add(max(earlier, key=lambda each: int(found[each][1]), default=None))
            for path in found.keys() - kept:
                path.unlink(missing_ok=True)


def _size_of_image(descriptor: int, path: Path) -> int:
    """Read from the header how long the image is, and hold that against the file's size."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise WeightTransferFailed(f"{path} is no file")
    num_bytes = header_bytes(os.pread(descriptor, LENGTH_BYTES, 0))
    if num_bytes > min(MOST_HEADER_BYTES, status.st_size):
        raise WeightTransferFailed(f"{path} is no weight image: its header would take {num_bytes} bytes")
    size = ImageLayout.parse(os.pread(descriptor, num_bytes, 0)).image_bytes
    if size != status.st_size:
        raise WeightTransferFailed(f"{path} has {status.st_size} bytes, by its header {size}")
    return size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _settled(future: "asyncio.Future[Any]") -> None:
    """Retrieve the result of a thread that is perhaps no longer awaited."""
    if not future.cancelled():
        future.exception()
