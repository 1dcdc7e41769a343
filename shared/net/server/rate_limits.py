"""Who has no token and is refused over and over: after a burst it is told to come back later, in the fewest bytes.

Counted are requests that nobody's token came with, or that could not be read, by address. A request with a token that
is let in is never counted nor refused here, whatever else comes from its address.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable

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
