"""What one room keeps for each experiment, for as long as the repository keeps that experiment.

Every room owns its own: the others are passed a value or a function, never the experiment to write on.
"""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from flotilla.services.gateway.records.repository import Experiment

T = TypeVar("T")


class PerExperiment(Generic[T]):
    """One object for each experiment, made when it is first asked for; it goes when the experiment is deleted.

    Args:
        make: makes the object of an experiment that has none yet.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: WeakKeyDictionary[Experiment, T] = WeakKeyDictionary()

    def of(self, experiment: Experiment) -> T:
        """Find the object of an experiment, or make it."""
        kept = self._kept.get(experiment)
        if kept is None:
            kept = self._kept[experiment] = self._make()
        return kept

    def __len__(self) -> int:
        return len(self._kept)
