"""Long series, cut down to what a chart can show: the extremes of each stretch stay, so that no peak disappears."""

from collections.abc import Sequence


def thinned(values: Sequence[float], points: int) -> list[int]:
    """Choose the places of a series that stay.

    Args:
        values: in the order in which they are drawn.
        points: how many may stay, at least 4.

    Returns:
        Ascending places, at most ``points``: the first, the last, and of each stretch of equal length its smallest and
        its largest value. All of them if there are no more than ``points``.

    Raises:
        ValueError: ``points`` is below 4.
    """
    if points < 4:
        raise ValueError(f"points must be at least 4, got {points}")
    if len(values) <= points:
        return list(range(len(values)))
    stretches = (points - 2) // 2
    kept = {0, len(values) - 1}
    for number in range(stretches):
        places = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        kept.update((min(places, key=values.__getitem__), max(places, key=values.__getitem__)))
    return sorted(kept)


def in_common(steps: Sequence[int], points: int) -> list[int]:
    """Choose steps that several thinned series keep together, so that what is computed of them has all parts.

    Args:
        steps: of all of them, ascending.
        points: how many each series may keep, at least 4.

    Returns:
        Ascending; the first of each stretch of equal length, less than a third of ``points``. Few points leave none.
    """
    stretches = min((points - 4) // 3, len(steps))
    return [steps[number * len(steps) // stretches] for number in range(stretches)]
