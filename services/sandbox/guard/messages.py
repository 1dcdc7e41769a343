"""Messages on a stream: their length, then so many bytes."""

import os

LENGTH_BYTES = 8


def framed(message: bytes) -> bytes:
    """Put a message's length before it."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def read_message(stream: int) -> bytes:
    """Wait for a message; empty if the stream ended before it was whole."""
    length = int.from_bytes(_read(stream, LENGTH_BYTES), "big")
    text = _read(stream, length)
    return text if len(text) == length else b""


def write_all(stream: int, content: bytes) -> None:
    """Write all of it.

    Raises:
        OSError: the reader has closed.
    """
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[os.write(stream, unwritten) :]


def _read(stream: int, size: int) -> bytes:
    """Read so many bytes, or fewer at the end of the stream."""
    content = b""
    while len(content) < size and (piece := os.read(stream, size - len(content))):
        content += piece
    return content
