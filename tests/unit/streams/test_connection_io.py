"""Messages to the server go out whole and in order, cut where they are large."""

from collections.abc import Sequence

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.shared.streams.redis.connection import LARGE_BYTES, PIECE_BYTES, PackingConnection, WriterInPieces


class Sink:
    """Takes what is written, as a stream writer does."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.written: list[bytes] = []
        self.drained = 0
        self.fails_at = fails_at

    def write(self, piece: bytes) -> None:
        self.written.append(bytes(piece))

    async def drain(self) -> None:
        self.drained += 1
        if self.drained == self.fails_at:
            raise ConnectionResetError("gone")


sizes = st.one_of(st.integers(0, 50), st.integers(LARGE_BYTES - 1, LARGE_BYTES + 1), st.integers(0, 3 * PIECE_BYTES))


@given(lengths=st.lists(sizes, max_size=6))
async def test_what_is_written_is_what_was_given(lengths: Sequence[int]) -> None:
    chunks = [bytes([65 + index]) * length for index, length in enumerate(lengths)]
    sink = Sink()
    writer = WriterInPieces(sink)  # type: ignore[arg-type]
    for half in (chunks[:2], chunks[2:]):
        writer.writelines(half)

    await writer.drain()

    assert b"".join(sink.written) == b"".join(chunks)
    assert all(len(piece) <= max(PIECE_BYTES, 6 * LARGE_BYTES) for piece in sink.written)
    assert sink.drained == len(sink.written)


async def test_what_was_not_sent_is_not_sent_later() -> None:
    sink = Sink(fails_at=2)
    writer = WriterInPieces(sink)  # type: ignore[arg-type]
    writer.writelines([b"a" * 4 * PIECE_BYTES])
    with pytest.raises(ConnectionResetError):
        await writer.drain()
    sink.written.clear()

    await writer.drain()

    assert sink.written == []


def test_a_large_argument_is_packed_without_a_copy() -> None:
    large = b"x" * LARGE_BYTES
    command = ["EVAL", "return 1", 2, "key", b"other", 1.5, large, "ü"]

    chunks = PackingConnection().pack_command(*command)

    assert any(chunk is large for chunk in chunks)
    assert b"".join(chunks) == hiredis.pack_command(tuple(command))
