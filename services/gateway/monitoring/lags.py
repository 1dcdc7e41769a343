"""How old the tokens were that an experiment has trained, as a histogram that only grows.

In memory: a restarted gateway counts from the next step that it hears of, as counters do whose process is new.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

BOUNDS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Versions; a lag counts at the first bound that is not below it, or above them all."""
PREFIX: Final = "lag/tokens/"


class LagHistogram:
    """Sampled tokens by their lag, over the steps that were reported."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._last_step = 0
        self.num_tokens = 0
        self.sum_of_lags = 0

    def add_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step's metrics; a step that is trained again after a crash counts once."""
        lags = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
        if step <= self._last_step or not lags:
            return
        self._last_step = step
        for written, value in lags.items():
            if not written.isdecimal():
                continue
            lag, count = int(written), round(value)
            self._counts[bisect_left(BOUNDS, lag)] += count
            self.num_tokens += count
            self.sum_of_lags += lag * count

    def cumulative(self) -> list[tuple[int, int]]:
        """List each bound with the tokens whose lag is not above it."""
        found, total = [], 0
        for bound, count in zip(BOUNDS, self._counts, strict=False):
            total += count
            found.append((bound, total))
        return found
