"""How a response is written: head and body in one piece, unless the body takes longer."""

import asyncio
from typing import cast

from flotilla.shared.net.server.connections import HeadWithBody
from tests.unit.gateway.builders import turns


class Written:
    """Stands for a transport."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def close(self) -> None:
        self.pieces.append(b"closed")


def a_response() -> tuple[Written, HeadWithBody]:
    written = Written()
    return written, HeadWithBody(cast(asyncio.Transport, written))


async def test_a_head_is_sent_together_with_the_body_that_follows_it() -> None:
    written, response = a_response()

    response.write(b"head ")
    response.write(b"body ")
    response.write(b"more")
    await turns()

    assert written.pieces == [b"head body ", b"more"]


async def test_a_head_does_not_wait_for_a_body_that_takes_longer() -> None:
    written, response = a_response()

    response.write(b"head")
    await turns()
    response.write(b"body")

    assert written.pieces == [b"head", b"body"]


async def test_a_head_without_a_body_is_sent_before_the_connection_is_closed() -> None:
    written, response = a_response()

    response.write(b"head")
    response.close()
    await turns()

    assert written.pieces == [b"head", b"closed"]
