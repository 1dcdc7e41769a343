"""Whose turn it is to compute among the experiments of one process: each computes alone, as if it had the process.

Nothing that one computes depends on the others: not the threads, not torch's random numbers, not the order of sums.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flotilla.shared.tinker.turns import Turns


class ComputeTurns:
    """Gives turns by the time that each has used, divided by its weight.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns = Turns()
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._computing: str | None = None
        self._numbers = itertools.count()

    def seat(self, experiment_id: str, weight: float) -> "Seat":
        """Make an experiment's place; ``weight`` 2 gets twice as much time as 1 while both want to compute."""
        return Seat(self, f"{next(self._numbers)} {experiment_id}", weight)

    @contextmanager
    def turn(self, name: str, weight: float) -> Iterator[None]:
        """Wait for a turn, and have it while the block runs."""
        with self._changed:
            self._waiting.add(name)
            self._changed.wait_for(lambda: self._computing is None and self._turns.next(self._waiting) == name)
            self._waiting.discard(name)
            self._computing = name
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._turns.uses(name, (self._clock() - began) / weight)
                self._computing = None
                self._changed.notify_all()


class Seat:
    """One experiment's place among those that compute in turn.

    Args:
        turns: of all of them.
        name: of this one, which no other has.
        weight: of its share.
    """

    def __init__(self, turns: ComputeTurns, name: str, weight: float) -> None:
        self._turns, self._name, self._weight = turns, name, weight

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compute while the block runs, and nobody else does."""
        with self._turns.turn(self._name, self._weight):
            yield
