"""How much processor time each caller's programs get before those of others: a part of the machine, not more.

Who asks for short programs now and then is answered at once; who floods, with whatever programs, gets what others
leave. Time is counted as it is used, so it does not matter by how many programs or in how many slots.
"""

from collections import OrderedDict
from collections.abc import Callable

PART = 0.04
"""Of the machine's processors: what each caller may use before others."""
SAVED_SECONDS = 10.0
"""A caller that has used nothing has so long a time of its part saved, and none owes more."""
MOST_CALLERS = 1024


class Allowances:
    """Counts what is left to callers.

    Args:
        processors: how many the machine has.
        now: a clock, in seconds.
        part: of them, what each caller may use.
    """

    def __init__(self, processors: float, now: Callable[[], float], *, part: float = PART) -> None:
        self._rate = part * processors
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def left(self, caller: str) -> float:
        """Return the seconds of processor time that a caller has left; negative after a program used more."""
        most = self._rate * SAVED_SECONDS
        seconds, at = self._left.get(caller, (most, 0.0))
        return min(most, seconds + (self._now() - at) * self._rate)

    def use(self, caller: str, seconds: float) -> None:
        """Take what a program of a caller has used."""
        most = self._rate * SAVED_SECONDS
        self._left[caller] = max(-most, self.left(caller) - seconds), self._now()
        self._left.move_to_end(caller)
        while len(self._left) > MOST_CALLERS:
            self._left.popitem(last=False)
