"""Which source and which of its rows a group answers, from the group id alone. Pure.

Sources with weights take turns in blocks of ``num_slots`` groups. In each block a source has as many turns as its share
of all turns so far asks for, spread evenly over the block: so each step trains the proportions that were asked for, to
within a group or so, and nothing is drawn that a restart would have to recall.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor
from typing import Final

MIN_SLOTS: Final = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """One group's place.

    Attributes:
        source: index of the source.
        number: how many groups before it had the same source.
    """

    source: int
    number: int


class Mixture:
    """Turns of several sources.

    Args:
        weights: one per source; only their ratios count. A source with 0 has no turns; one at least has more.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self._bounds = [sum(shares[: number + 1], Fraction(0)) for number in range(len(shares))]
        # Two turns per block at least: so rounding never takes more than a block gives.
        self.num_slots = max(MIN_SLOTS, ceil(2 / min(share for share in shares if share)))
        self._block = lru_cache(maxsize=4)(self._lay_out)

    def counts_before(self, group_id: int) -> list[int]:
        """Count the turns that each source has had before a group."""
        block, slot = divmod(group_id, self.num_slots)
        counts = self._counts(block)
        for turn in self._block(block)[:slot]:
            counts[turn.source] += 1
        return counts

    def turn(self, group_id: int) -> Turn:
        """Find a group's source, and how many groups before it had the same."""
        block, slot = divmod(group_id, self.num_slots)
        return self._block(block)[slot]

    def _counts(self, blocks: int) -> list[int]:
        """Count each source's turns in the first ``blocks`` blocks; they add up to all slots."""
        ends = [floor(bound * blocks * self.num_slots + Fraction(1, 2)) for bound in self._bounds]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _lay_out(self, block: int) -> list[Turn]:
        before, after = self._counts(block), self._counts(block + 1)
        turns = [
            (Fraction(2 * index + 1, 2 * (end - start)), source, start + index)
            for source, (start, end) in enumerate(zip(before, after, strict=True))
            for index in range(end - start)
        ]
        return [Turn(source, number) for _, source, number in sorted(turns)]


class ChangedMixture:
    """Turns of several sources whose weights were changed: each source continues with its next row.

    Args:
        line: groups from which on weights hold, with these, oldest first; the first is group 0.
    """

    def __init__(self, line: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._starts = [group_id for group_id, _ in line]
        self._mixtures = [Mixture(weights) for _, weights in line]
        self._before = [[0] * len(line[0][1])]
        for number, (start, end) in enumerate(pairwise(self._starts)):
            counts = self._mixtures[number].counts_before(end - start)
            self._before.append([a + b for a, b in zip(self._before[-1], counts, strict=True)])

    def turn(self, group_id: int) -> Turn:
        """Find a group's source, and how many groups before it had the same."""
        number = bisect_right(self._starts, group_id) - 1
        turn = self._mixtures[number].turn(group_id - self._starts[number])
        return Turn(turn.source, self._before[number][turn.source] + turn.number)
