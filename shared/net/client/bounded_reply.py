"""A reply that is bounded by bytes: not unpacked, and read no further than its reader wants to hold."""

from collections.abc import AsyncIterable, AsyncIterator, Mapping


class ReplyTooLong(Exception):
    """A reply is longer than its reader wants to hold."""


def is_packed(headers: Mapping[str, str]) -> bool:
    """Return whether a reply is compressed: what a few bytes unpack to is the sender's choice."""
    return headers.get("content-encoding", "identity").strip().lower() not in {"", "identity"}


async def at_most(pieces: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Pass on the pieces of a reply.

    Raises:
        ReplyTooLong: with the piece that goes beyond ``max_bytes``, which is not passed on.
    """
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise ReplyTooLong(f"more than {max_bytes} bytes")
        yield piece
