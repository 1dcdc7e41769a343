"""Bodies of requests: each has a bound, and so have all that are held at the same time.

A body is held from its first byte until its request is answered. Small ones are not counted: there are no more of them
than connections, and what keeps a fleet together (status calls, leases) is never refused for what others send.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive

from flotilla.shared.errors import FlotillaError, InvalidRequest, Unavailable
from flotilla.shared.net.client.bounded_json import has_more_values
from flotilla.shared.net.server.limits import MAX_HELD_BYTES, SMALL_BYTES, BodyLimit


class BodyTooLarge(InvalidRequest):
    """The body has more bytes or values than are read."""

    code, title, status = "body_too_large", "The body is too large", 413


class BodyBrokenOff(FlotillaError):
    """The caller went before the whole body had come: what arrived is not what was sent."""

    code, title, status = "body_broken_off", "The body broke off", 400


class Bodies:
    """Reads bodies, and bounds what they take together.

    Args:
        max_held_bytes: of all bodies that are held; those of one named caller may be half of it.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._by_caller: Counter[str | None] = Counter()

    @property
    def held_bytes(self) -> int:
        """What is held now, small bodies not counted."""
        return self._by_caller.total()

    @contextmanager
    def hold(self, caller: str | None = None) -> Iterator["HeldBody"]:
        """Reserve memory for one request until the block ends; an unnamed caller may use all the room."""
        body = HeldBody(self, caller)
        try:
            yield body
        finally:
            self._by_caller[caller] -= body.counted_bytes
            if not self._by_caller[caller]:
                del self._by_caller[caller]

    def add(self, caller: str | None, num_bytes: int) -> None:
        """Count bytes of a caller.

        Raises:
            Unavailable: there is no room for them now.
        """
        of_caller, share = self._by_caller[caller] + num_bytes, self._max_held_bytes // 2
        if caller is not None and of_caller > share:
            raise Unavailable(f"the bodies of this caller's open requests may have {share} bytes together: try again")
        if self.held_bytes + num_bytes > self._max_held_bytes:
            most = self._max_held_bytes
            raise Unavailable(f"the bodies of all open requests may have {most} bytes together: try again")
        self._by_caller[caller] = of_caller


class HeldBody:
    """The body of one request.

    Args:
        bodies: counts it.
        caller: whose it is, if that matters.
    """

    def __init__(self, bodies: Bodies, caller: str | None) -> None:
        self._bodies = bodies
        self._caller = caller
        self.counted_bytes = 0

    async def read(self, content_length: bytes, receive: Receive, limit: BodyLimit) -> bytes:
        """Read all of it.

        Args:
            content_length: what the header of this name says, empty without one.
            receive: gives the pieces.
            limit: what it may have.

        Raises:
            BodyTooLarge: it has more than the limit.
            BodyBrokenOff: the caller went.
            Unavailable: other bodies leave no room for it now.
        """
        # By its length: `int` of a hundred thousand digits takes its time.
        if content_length.isdigit() and (len(content_length) > 18 or int(content_length) > limit.max_bytes):
            raise self._too_large(limit)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise BodyBrokenOff("the request broke off before its body was whole")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit.max_bytes:
                raise self._too_large(limit)
            if size > SMALL_BYTES:
                self._bodies.add(self._caller, size - self.counted_bytes)
                self.counted_bytes = size
            if not message.get("more_body", False):
                break
        body = b"".join(parts)
        if limit.max_values is not None and has_more_values(body, limit.max_values):
            raise BodyTooLarge(f"the body of this request must not have more than {limit.max_values} values")
        return body

    def _too_large(self, limit: BodyLimit) -> BodyTooLarge:
        return BodyTooLarge(f"the body of this request must not be larger than {limit.max_bytes} bytes")


def replay(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read already in one piece, then the server's further messages."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
