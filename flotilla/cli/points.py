"""The values of one series of a run, close together: there are a hundred series, followed for thousands of steps."""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

Point = tuple[int, int, float]
"""Step, version, value."""


class Points(Sequence[Point]):
    """Points in the order of steps, in 24 bytes each; as tuples they take six times as much."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._steps, self._versions, self._values = array("q"), array("q"), array("d")
        for step, version, value in points:
            self.put(step, version, value)

    def put(self, step: int, version: int, value: float) -> None:
        """Add a point; a step that is trained again replaces its points and all later ones."""
        while self._steps and self._steps[-1] >= step:
            for each in (self._steps, self._versions, self._values):
                each.pop()
        self._steps.append(step)
        self._versions.append(version)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> Point: ...
    @overload
    def __getitem__(self, place: slice) -> list[Point]: ...
    def __getitem__(self, place: int | slice) -> Point | list[Point]:
        if isinstance(place, slice):
            return list(zip(self._steps[place], self._versions[place], self._values[place], strict=True))
        return self._steps[place], self._versions[place], self._values[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
