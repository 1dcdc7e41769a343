"""Few rows in which every two values meet: a greedy covering array of strength two, with exclusions."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, combinations, product

Case = tuple[str, str]
"""An option and one of its values."""
Row = dict[str, str]
"""A value of each option."""
Values = Mapping[str, Sequence[str]]
"""The values of each option; the first goes with every value of every other."""


def wanted_pairs(
    values: Values, together: Iterable[Collection[str]], excluded: Collection[frozenset[Case]]
) -> dict[frozenset[Case], None]:
    """List what must meet, in a fixed order: the values of any two options of one group, but for excluded ones."""
    options = {pair: None for group in together for pair in combinations(group, 2)}
    pairs = {
        frozenset({(one, a), (other, b)}): None
        for one, other in options
        for a, b in product(values[one], values[other])
    }
    return {pair: None for pair in pairs if pair not in excluded}


def covering_rows(
    values: Values, together: Iterable[Collection[str]], excluded: Collection[frozenset[Case]] = ()
) -> list[Row]:
    """Make rows in which every wanted pair meets, and nothing that is excluded.

    Args:
        values: of each option.
        together: groups of options that meet.
        excluded: cases that never are in one row: two, or more.

    Raises:
        ValueError: a first value is excluded, so that a row could not be filled.
    """
    if any((name, values[name][0]) in each for each in excluded for name, _ in each):
        raise ValueError("the first value of an option goes with all others, and one of them is excluded")
    missing = wanted_pairs(values, together, excluded)
    rows = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        left = Counter(chain.from_iterable(missing))
        while len(row) < len(values):
            name, value = _best(values, row, missing, left, excluded)
            row[name] = value
        rows.append({name: row[name] for name in values})
        for met in combinations(row.items(), 2):
            missing.pop(frozenset(met), None)
    return rows


def is_excluded(row: Mapping[str, str], excluded: Collection[frozenset[Case]]) -> bool:
    """Whether a row, or the part of it that is chosen, has what never is together."""
    return any(each <= row.items() for each in excluded)


def _best(
    values: Values,
    row: Row,
    missing: Collection[frozenset[Case]],
    left: Mapping[Case, int],
    excluded: Collection[frozenset[Case]],
) -> Case:
    """Choose the case that meets most of what is missing; of equal ones that with most left to meet, then the first."""

    def gain(case: Case) -> tuple[int, int]:
        return sum(frozenset({case, other}) in missing for other in row.items()), left[case]

    nearly = [next(iter(rest)) for each in excluded if len(rest := each - row.items()) == 1]
    free = [
        (name, value) for name in values if name not in row for value in values[name] if (name, value) not in nearly
    ]
    return max(free, key=gain)
