"""What one body may have, and all of them together."""

from collections.abc import Sequence

import pytest
from starlette.types import Message, Receive

from flotilla.shared.errors import Unavailable
from flotilla.shared.net.server.limits import SMALL_BYTES, BodyLimit
from flotilla.shared.net.server.request_body import (
    Bodies,
    BodyBrokenOff,
    BodyTooLarge,
    HeldBody,
    replay,
)

ROOMY = BodyLimit(10 * SMALL_BYTES)


def sending(*pieces: bytes, breaks_off: bool = False) -> Receive:
    last = len(pieces) - 1
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": breaks_off or number < last}
        for number, piece in enumerate(pieces)
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Message:
        return messages.pop(0)

    return receive


async def read(held: HeldBody, *pieces: bytes, limit: BodyLimit = ROOMY, length: bytes = b"") -> bytes:
    return await held.read(length, sending(*pieces), limit)


@pytest.mark.parametrize(
    ("length", "pieces"),
    [(b"11", ()), (b"1" * 5000, ()), (b"", (b"01234", b"567890")), (b"junk", (b"01234567890",))],
)
async def test_a_body_has_a_limit_that_its_declared_length_is_held_to_as_well(
    length: bytes, pieces: Sequence[bytes]
) -> None:
    with Bodies().hold() as held, pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await read(held, *pieces, limit=BodyLimit(10), length=length)


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b'{"a": [1, 2, 3]}', True),
        (b'{"a": [1, 2, 3, 4]}', False),
        (b'{"a": "so, many, commas, in, a, text"}', True),
        (b"[" * 5, False),
    ],
)
async def test_values_of_json_have_a_limit_and_texts_do_not_count(body: bytes, is_taken: bool) -> None:
    with Bodies().hold() as held:
        if is_taken:
            assert await read(held, body, limit=BodyLimit(1000, max_values=4)) == body
        else:
            with pytest.raises(BodyTooLarge, match="more than 4 values"):
                await read(held, body, limit=BodyLimit(1000, max_values=4))


async def test_bodies_have_a_limit_together_until_their_requests_are_answered_and_small_ones_are_never_refused() -> (
    None
):
    bodies = Bodies(4 * SMALL_BYTES)
    large, small = b"x" * 2 * SMALL_BYTES, b"x" * SMALL_BYTES
    with bodies.hold() as first, bodies.hold() as second:
        await read(first, large)
        await read(second, large)
        with bodies.hold() as third, pytest.raises(Unavailable, match="all open requests"):
            await read(third, small, b"x")
        with bodies.hold() as fourth:
            assert await read(fourth, small) == small
        assert bodies.held_bytes == 4 * SMALL_BYTES

    assert bodies.held_bytes == 0


async def test_one_caller_leaves_half_of_the_room_to_others() -> None:
    bodies = Bodies(4 * SMALL_BYTES)
    large = b"x" * 2 * SMALL_BYTES
    with bodies.hold("a") as first, bodies.hold("a") as second, bodies.hold("b") as other:
        await read(first, large)
        with pytest.raises(Unavailable, match="this caller"):
            await read(second, large)
        assert await read(other, large) == large

    assert bodies.held_bytes == 0


async def test_what_broke_off_is_no_body_and_holds_nothing() -> None:
    bodies = Bodies()
    with bodies.hold() as held, pytest.raises(BodyBrokenOff):
        await held.read(b"", sending(b"x" * 2 * SMALL_BYTES, breaks_off=True), ROOMY)

    assert bodies.held_bytes == 0


async def test_a_body_that_was_read_is_given_once_and_then_what_comes() -> None:
    receive = replay(b"abc", sending())

    assert await receive() == {"type": "http.request", "body": b"abc", "more_body": False}
    assert await receive() == {"type": "http.disconnect"}
