"""Replies that are bounded by bytes."""

from collections.abc import AsyncIterator

import pytest

from flotilla.shared.net.client.bounded_json import ReplyTooLong, at_most, is_packed


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_a_reply_of_the_allowed_length_is_passed_on() -> None:
    assert [piece async for piece in at_most(pieces_of(b"ab", b"", b"c"), 3)] == [b"ab", b"", b"c"]


async def test_a_longer_reply_is_read_no_further() -> None:
    reply = pieces_of(b"ab", b"cd", b"ef")
    passed_on = []

    with pytest.raises(ReplyTooLong, match="more than 3 bytes"):
        async for piece in at_most(reply, 3):
            passed_on.append(piece)

    assert passed_on == [b"ab"]
    assert await anext(reply) == b"ef"


@pytest.mark.parametrize(
    ("encoding", "packed"), [(None, False), ("", False), (" Identity ", False), ("gzip", True), ("gzip, gzip", True)]
)
def test_only_a_reply_that_names_a_packing_is_packed(encoding: str | None, packed: bool) -> None:
    assert is_packed({} if encoding is None else {"content-encoding": encoding}) is packed
