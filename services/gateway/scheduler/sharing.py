"""How services of one kind are divided among experiments: minimums first, then the surplus, by priority and weight.

Whole services are dealt by the largest remainders of the weighted fair share, so no experiment is a whole service off
it. What one experiment cannot use, because it has its maximum, goes to the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Share:
    """One experiment's claim on the surplus of one kind.

    Attributes:
        key: whose it is.
        rank: all that a lower rank can use goes to it before a higher one gets any.
        weight: share among those of the same rank, above 0.
        room: how many services it can still take.
        held: how many it has of the surplus now; where the division is a tie, those who have keep.
    """

    key: str
    rank: tuple[int, ...]
    weight: float
    room: int
    held: int = 0


def divide(surplus: int, shares: Sequence[Share]) -> dict[str, int]:
    """Divide services among experiments.

    Args:
        surplus: how many there are to give.
        shares: who may take some.

    Returns:
        How many each gets; their sum is ``surplus``, or the sum of all rooms if that is less.
    """
    given: dict[str, int] = {}
    for _, ranked in groupby(sorted(shares, key=lambda share: share.rank), key=lambda share: share.rank):
        peers = list(ranked)
        portion = min(surplus, sum(share.room for share in peers))
        given |= _round(portion, peers, fair_shares(portion, peers))
        surplus -= portion
    return given


def fair_shares(amount: int, shares: Sequence[Share]) -> dict[str, Fraction]:
    """Divide an amount by weight, exactly; who has no room for its share takes its room, and the rest is divided again.

    Args:
        amount: not more than all rooms together.
    """
    fair: dict[str, Fraction] = {}
    left, open_shares = Fraction(amount), list(shares)
    while open_shares:
        total = sum((Fraction(share.weight) for share in open_shares), Fraction())
        full = [share for share in open_shares if left * Fraction(share.weight) / total >= share.room]
        if not full:
            return fair | {share.key: left * Fraction(share.weight) / total for share in open_shares}
        fair |= {share.key: Fraction(share.room) for share in full}
        left -= sum(share.room for share in full)
        open_shares = [share for share in open_shares if share.key not in fair]
    return fair


def _round(amount: int, shares: Sequence[Share], fair: Mapping[str, Fraction]) -> dict[str, int]:
    whole = {share.key: int(fair[share.key]) for share in shares}
    remainder = amount - sum(whole.values())
    # Largest remainder first; among equals, who has more than the whole part keeps it, then who came first.
    order = sorted(shares, key=lambda share: (whole[share.key] - fair[share.key], share.held <= whole[share.key]))
    for share in order[:remainder]:
        whole[share.key] += 1
    return whole
