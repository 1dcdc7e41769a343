"""Whose turn it is: owners share what computes by what their requests cost, not by how many they send.

Source: Goyal et al., Start-time Fair Queueing, SIGCOMM 1996.
"""

from collections.abc import Collection

MOST_OWNERS = 10_000


class Turns:
    """Gives turns to the model that has used least; a new one begins where the last turn began."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._now = 0.0

    def next(self, waiting: Collection[str]) -> str | None:
        """Return whose turn it is; None without a waiter."""
        if not waiting:
            return None
        if len(self._used) > MOST_OWNERS:
            self._used = {owner: used for owner, used in self._used.items() if used > self._now}
        chosen = min(sorted(waiting), key=self._start)
        self._now = self._start(chosen)
        return chosen

    def uses(self, owner: str, cost: float) -> None:
        """Count what a turn cost."""
        self._used[owner] = self._start(owner) + cost

    def _start(self, owner: str) -> float:
        return max(self._used.get(owner, 0.0), self._now)
