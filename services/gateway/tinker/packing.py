"""Bodies in zstd, as the Tinker API's client sends and takes them."""

import asyncio
import io
from typing import Final
from weakref import WeakValueDictionary

from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.server.request_body import BodyTooLarge

ZSTD: Final = "zstd"
PLAIN: Final = frozenset({"", "identity"})
WORTHWHILE_BYTES: Final = 4096
"""Less is not packed: it is one packet or a few, and the processor has other work."""
PIECE_BYTES: Final = 1 << 20
FRAME_MARKS: Final = (b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18")
"""What a frame begins with, and what a frame that is to be skipped has after its first byte."""
MOST_FRAMES: Final = 64
"""A client sends one. Millions of empty ones are seconds of work that yield nothing."""

UNPACKED_AT_A_TIME: Final = 2
"""Bodies of one owner; each has 32 MiB at most."""


class UnpackedBodies:
    """Bounds the bodies of each owner that are unpacked in memory: nobody waits for another's."""

    def __init__(self) -> None:
        """Start with none."""
        self._owners: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, owner: str) -> asyncio.Semaphore:
        """Return what is held while one is in memory."""
        found = self._owners.get(owner)
        if found is None:
            found = self._owners[owner] = asyncio.Semaphore(UNPACKED_AT_A_TIME)
        return found


def unpack(body: bytes, most: int) -> bytes:
    """Unpack what was sent in zstd; blocks.

    It is read in pieces, to its bound and not to its end: 30 kilobytes may be a gigabyte. A frame that needs a window
    of more than 128 MiB is refused by the library, unread.

    Args:
        body: frames, one after another.
        most: bytes that they may have together, unpacked.

    Raises:
        BodyTooLarge: they have more.
        InvalidRequest: they are no zstd, cut off, or more than 64 frames.
    """
    import pyarrow  # here and below: most fleets have no use for it at the gateway's start

    # Compressed bytes may look like a mark, once in 256 MiB: that does not make 64 of them.
    if sum(body.count(mark) for mark in FRAME_MARKS) > MOST_FRAMES:
        raise InvalidRequest(f"the body has more than {MOST_FRAMES} frames of zstd: send it as one")
    found = io.BytesIO()
    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(body), ZSTD) as stream:
            while piece := stream.read(PIECE_BYTES):
                if found.tell() + len(piece) > most:
                    raise BodyTooLarge(f"the body of this request must not be larger than {most} bytes when unpacked")
                found.write(piece)
    except OSError as error:
        raise InvalidRequest(f"the body is not zstd, as its Content-Encoding says: {error}") from error
    return found.getvalue()


def pack(content: bytes) -> bytes:
    """Pack an answer; blocks."""
    import pyarrow

    packed: bytes = pyarrow.compress(content, codec=ZSTD, asbytes=True)
    return packed


def is_packed(content_encoding: str) -> bool:
    """Return whether a request's body is to be unpacked.

    Raises:
        InvalidRequest: it is packed in another way.
    """
    encoding = content_encoding.strip().lower()
    if encoding not in PLAIN | {ZSTD}:
        raise InvalidRequest(f"Content-Encoding: {encoding!r} is not read here: {ZSTD}, or none")
    return encoding == ZSTD


def takes_packed(accept_encoding: str) -> bool:
    """Return whether an answer may be in zstd, by what a client says that it takes."""
    for each in accept_encoding.lower().split(","):
        name, _, quality = each.partition(";")
        if name.strip() == ZSTD:
            return quality.replace(" ", "") not in {"q=0", "q=0.0", "q=0.00", "q=0.000"}
    return False
