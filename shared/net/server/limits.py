"""What a server lets callers have: of connections, of a head, of bodies, of refusals.

``connections`` holds heads, times and refusals to these limits, ``request_body`` the bodies; a service sets only how
large the bodies of its routes may be.

Callers without a token that are refused repeatedly: after a burst they get a short 429 with a time to retry.

Requests without a token, or that could not be parsed, are counted by address. A request with a token that
is let in is never counted nor refused here, whatever else comes from its address.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

MOST_ADDRESSES = 4096
LOG_SECONDS = 60.0
"""An address is logged once in so long, not with each request: a log is not theirs to fill."""


class Strangers:
    """Counts refusals by address.

    Args:
        burst: how many an address gets at once.
        per_second: how many it gets in the long run.
        now: a clock, in seconds.
    """

    def __init__(self, burst: int, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_second = per_second
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._logged_at: dict[str, float] = {}

    def refused(self, address: str) -> int:
        """Count a refusal; returns in how many seconds the address may come back, 0 if it has any left."""
        now = self._now()
        left, at = self._left.pop(address, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_second)
        is_over = left < 1.0
        self._left[address] = left if is_over else left - 1.0, now
        while len(self._left) > MOST_ADDRESSES:
            forgotten, _ = self._left.popitem(last=False)
            self._logged_at.pop(forgotten, None)
        if not is_over:
            return 0
        if now - self._logged_at.get(address, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_at[address] = now
            log.warning("an address sends what is refused, over and over", extra={"address": address})
        return max(1, math.ceil((1.0 - left) / self._per_second))


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
