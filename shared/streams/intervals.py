"""Sets of dense integers as a short list of intervals.

Group ids are dense in issue order, so the ids that a checkpoint's lineage has trained form few intervals, however
many they are; where groups are filtered there are as many as runs of these, until what lies between them is closed.
Copies and unions of what grew at its end, as each checkpoint makes them, take no step of the interpreter for each
interval.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A set of integers, kept as sorted, disjoint, non-adjacent closed intervals."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        # Two numbers of 8 bytes for each interval, where objects would take 72 bytes.
        self._starts = array("q")
        self._ends = array("q")
        self.add_many(values)

    @classmethod
    def from_list(cls, intervals: Iterable[Iterable[int]]) -> "IntervalSet":
        """Read what ``to_list`` made; intervals may also touch, overlap or be out of order.

        Raises:
            ValueError: an interval ends before it starts.
        """
        made = cls()
        for start, end in intervals:
            if made._ends and start <= made._ends[-1] + 1:
                made.add_interval(start, end)
            else:
                _check(start, end)
                made._starts.append(start)
                made._ends.append(end)
        return made

    @property
    def num_intervals(self) -> int:
        """How many intervals it is kept as."""
        return len(self._starts)

    def copy(self) -> "IntervalSet":
        """Make another set of the same integers."""
        made = IntervalSet()
        made._starts, made._ends = self._starts[:], self._ends[:]
        return made

    def to_list(self) -> list[list[int]]:
        """List the intervals as ``[start, end]``, both included, in ascending order."""
        return [[start, end] for start, end in zip(self._starts, self._ends, strict=True)]

    def add(self, value: int) -> None:
        """Add one integer."""
        self.add_interval(value, value)

    def close_below(self, bound: int) -> int:
        """Add what lies between intervals that end below ``bound``; count what this added."""
        last = bisect_left(self._ends, bound)
        if last < 2:
            return 0
        start, end = self._starts[0], self._ends[last - 1]
        before = sum(self._ends[:last]) - sum(self._starts[:last]) + last
        self._starts[:last], self._ends[:last] = array("q", [start]), array("q", [end])
        return end - start + 1 - before

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
        _check(start, end)
        # Everything that touches [start - 1, end + 1] melts into one interval.
        first = bisect_right(self._ends, start - 2)
        last = bisect_right(self._starts, end + 1)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = array("q", [start])
        self._ends[first:last] = array("q", [end])

    def union(self, other: "IntervalSet") -> "IntervalSet":
        """Make the set of what either holds."""
        if self._begins(other):
            return other.copy()
        if other._begins(self):
            return self.copy()
        return IntervalSet.from_list(sorted([*self.to_list(), *other.to_list()]))

    def _begins(self, other: "IntervalSet") -> bool:
        """Whether another set has the same intervals, of which the last may be longer, and perhaps more after them."""
        num = len(self._starts)
        if num == 0:
            return True
        if num > len(other._starts) or self._ends[-1] > other._ends[num - 1]:
            return False
        return self._starts == other._starts[:num] and self._ends[:-1] == other._ends[: num - 1]

    def __contains__(self, value: int) -> bool:
        index = bisect_right(self._starts, value) - 1
        return index >= 0 and value <= self._ends[index]

    def __len__(self) -> int:
        return sum(end - start + 1 for start, end in zip(self._starts, self._ends, strict=True))

    def __iter__(self) -> Iterator[int]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end + 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and (self._starts, self._ends) == (other._starts, other._ends)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntervalSet.from_list({self.to_list()})"


def _check(start: int, end: int) -> None:
    if end < start:
        raise ValueError(f"an interval ends where it starts or later, got [{start}, {end}]")
