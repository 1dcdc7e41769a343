"""Which source and which of its rows a group answers, from the group id alone. Pure.

Sources with weights take turns in blocks of ``num_slots`` groups. In each block a source has as many turns as its share
of all turns so far asks for, spread evenly over the block: so each step trains the proportions that were asked for, to
within a group or so, and nothing is drawn that a restart would have to recall.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
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
        weights: one per source, above 0; only their ratios count.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self._bounds = [sum(shares[: number + 1], Fraction(0)) for number in range(len(shares))]
        # Two turns per block at least: so rounding never takes more than a block gives.
        self.num_slots = max(MIN_SLOTS, ceil(2 / min(shares)))
        self._block = lru_cache(maxsize=4)(self._lay_out)

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
