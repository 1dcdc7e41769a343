"""Sets of dense integers as a short list of intervals.

Group ids are dense in issue order, so the ids that a checkpoint's lineage has trained form few intervals, however
many they are.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A set of integers, kept as sorted, disjoint, non-adjacent closed intervals."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.add_many(values)

    @classmethod
    def from_list(cls, intervals: Iterable[Iterable[int]]) -> "IntervalSet":
        """Read what ``to_list`` made; intervals may also touch, overlap or be out of order.

        Raises:
            ValueError: an interval ends before it starts.
        """
        made = cls()
        for start, end in intervals:
            made.add_interval(start, end)
        return made

    def to_list(self) -> list[list[int]]:
        """List the intervals as ``[start, end]``, both included, in ascending order."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]

    def add(self, value: int) -> None:
        """Add one integer."""
        self.add_interval(value, value)

    def add_many(self, values: Iterable[int]) -> None:
        """Add integers in any order."""
        start: int | None = None
        end = 0
        for value in sorted(values):
            if start is not None and value <= end + 1:
                end = value
                continue
            if start is not None:
                self.add_interval(start, end)
            start = end = value
        if start is not None:
            self.add_interval(start, end)

    def add_interval(self, start: int, end: int) -> None:
        """Add all integers from ``start`` to ``end``, both included.

        Raises:
            ValueError: ``end`` is below ``start``.
        """
        if end < start:
            raise ValueError(f"an interval ends where it starts or later, got [{start}, {end}]")
        # Everything that touches [start - 1, end + 1] melts into one interval.
        first = bisect_right(self._ends, start - 2)
        last = bisect_right(self._starts, end + 1)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def union(self, other: "IntervalSet") -> "IntervalSet":
        """Make the set of what either holds."""
        return IntervalSet.from_list([*self.to_list(), *other.to_list()])

    def __contains__(self, value: int) -> bool:
        index = bisect_right(self._starts, value) - 1
        return index >= 0 and value <= self._ends[index]

    def __len__(self) -> int:
        return sum(end - start + 1 for start, end in zip(self._starts, self._ends, strict=True))

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end + 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self.to_list() == other.to_list()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntervalSet.from_list({self.to_list()})"
