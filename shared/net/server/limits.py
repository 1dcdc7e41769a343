"""What a server lets callers have: of connections, of a head, of bodies, of refusals.

``connections`` holds heads, times and refusals to these limits, ``request_body`` the bodies; a service says only how
large the bodies of its routes may be.
"""

from dataclasses import dataclass
from typing import Final

MAX_HELD_BYTES: Final = 256 * 1024 * 1024
SMALL_BYTES: Final = 64 * 1024
"""Bodies up to this size are not counted: a server reads as much of each connection ahead of its app anyway."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may take of a server.

    Attributes:
        connections: at a time; requests on further ones are answered 503.
        per_address: of them, from one address; further ones are closed.
        head_bytes, headers: of one request; its path counts among the bytes.
        head_seconds: from the connection, or the first byte of a further request, to the end of its head.
        body_seconds: from there to the end of its body.
        idle_seconds: between two requests.
        unread_seconds: how long nothing of an answer may be read.
        refusals, refusals_per_second: of requests without a token or form, that an address gets at once and in the
            long run; further ones are answered 429.
    """

    connections: int = 4096
    per_address: int = 3072
    head_bytes: int = 32 * 1024
    headers: int = 100
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: int = 5
    unread_seconds: float = 60.0
    refusals: int = 100
    refusals_per_second: float = 5.0


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """What one body may have.

    Attributes:
        max_bytes: of it.
        max_values: values of its JSON: brackets, braces and commas outside of strings. None where it is not parsed as
            JSON.
    """

    max_bytes: int
    max_values: int | None = None
