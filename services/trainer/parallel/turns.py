"""Whose turn it is to compute among the experiments of one process: each computes alone, as if it had the process.

Nothing that one computes depends on the others: not the threads, not torch's random numbers, not the order of sums.
One that comes to its end goes before those that continue, however much it has used: it has so long for a last
checkpoint.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
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
        self._waiting: dict[str, Seat] = {}
        self._computing: str | None = None
        self._numbers = itertools.count()

    def seat(self, experiment_id: str, weight: float, is_ending: Callable[[], bool] = lambda: False) -> "Seat":
        """Make an experiment's place.

        Args:
            weight: 2 gets twice as much time as 1 while both want to compute.
            is_ending: returns whether the experiment is ending; called on any thread.
        """
        return Seat(self, f"{next(self._numbers)} {experiment_id}", weight, is_ending)

    @contextmanager
    def turn(self, seat: "Seat") -> Iterator[None]:
        """Wait for a turn, and have it while the block runs.

        Raises:
            CancelledError: the place was left.
        """
        with self._changed:
            self._waiting[seat.name] = seat
            self._changed.wait_for(lambda: seat.is_left or (self._computing is None and self._next() == seat.name))
            del self._waiting[seat.name]
            if seat.is_left:
                self._changed.notify_all()
                raise CancelledError
            self._computing = seat.name
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._turns.uses(seat.name, (self._clock() - began) / seat.weight)
                self._computing = None
                self._changed.notify_all()

    def is_waiting(self, seat: "Seat") -> bool:
        """Whether one waits while another computes."""
        return self._computing is not None and seat.name in self._waiting

    def leave(self, seat: "Seat") -> None:
        """End the wait of one that is to compute nothing any more."""
        with self._changed:
            seat.is_left = True
            self._changed.notify_all()

    def _next(self) -> str | None:
        ending = [name for name, seat in self._waiting.items() if seat.is_ending()]
        return ending[0] if ending else self._turns.next(self._waiting)


class Seat:
    """One experiment's place among those that compute in turn.

    Args:
        turns: of all of them.
        name: of this one, which no other has.
        weight: of its share.
        is_ending: returns whether it goes before those that continue.

    Attributes:
        is_left: whether nothing is to be computed there any more.
    """

    def __init__(self, turns: ComputeTurns, name: str, weight: float, is_ending: Callable[[], bool]) -> None:
        self._turns = turns
        self.name, self.weight, self.is_ending = name, weight, is_ending
        self.is_left = False

    @property
    def is_waiting(self) -> bool:
        """Whether something is to be computed there, and waits for what another one computes; asked on any thread."""
        return self._turns.is_waiting(self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Compute exclusively while the block runs; errors as of ``ComputeTurns.turn``."""
        with self._turns.turn(self):
            yield

    def leave(self) -> None:
        """Compute nothing any more: what waits for its turn ends at once."""
        self._turns.leave(self)
