"""Whether settings differ by more than their seeds do: means over runs that differ in ``seed`` alone, and intervals."""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from flotilla.cli.comparison import ComparedSeries
from flotilla.shared.config.load.live import applied, undone
from flotilla.shared.schemas.live_changes import LiveChange

APART = frozenset({"seed", "name"})
"""Keys in which runs of one setting differ."""

RULE = "rule "
"""What the actor of a change begins with that a rule of the spec made."""
T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
"""97.5 % quantiles of Student's distribution for 1 to 30 degrees of freedom (any table of it has these)."""


class Setting(NamedTuple):
    """Runs whose specs differ in ``seed`` and ``name`` alone.

    Attributes:
        members: their places among the runs that are compared.
        seeds: theirs, in the same order.
    """

    members: tuple[int, ...]
    seeds: tuple[int, ...]


class Spread(NamedTuple):
    """A series over the seeds of a setting.

    Attributes:
        mean: of the runs that have a value; None without one.
        deviation: sample standard deviation; None with fewer than two.
        num_runs: that have a value.
    """

    mean: float | None
    deviation: float | None
    num_runs: int


class Difference(NamedTuple):
    """How far a setting's mean is from that of the first.

    Attributes:
        value: the difference of the means.
        half_width: of its 95 % interval; None where there are too few seeds for one.
        is_paired: whether runs of the same seed were compared with each other.
    """

    value: float
    half_width: float | None
    is_paired: bool

    @property
    def verdict(self) -> str:
        """Whether it is more than noise, in words."""
        if self.half_width is None:
            return "too few seeds"
        return "more than noise" if abs(self.value) > self.half_width else "within noise"


class SeedsCompared(NamedTuple):
    """A series over the seeds of each setting, at one step; differences are from the first setting."""

    name: str
    step: int | None
    spreads: list[Spread]
    differences: list[Difference | None]


def as_chosen(spec: Mapping[str, Any], changes: Sequence[LiveChange]) -> Mapping[str, Any]:
    """Return a spec without what its rules changed while it ran: one seed may meet a condition and another not."""
    people = [each for each in changes if not each.actor.startswith(RULE)]
    return spec if len(people) == len(changes) else applied(undone(spec, changes), people)


def settings_of(specs: Sequence[Mapping[str, Any]]) -> list[Setting]:
    """Put runs together whose specs differ in ``seed`` and ``name`` alone, in the order of their first.

    A path in which ``{seed}`` of a launch file stood is no other path.
    """
    found: list[tuple[Mapping[str, Any], list[int]]] = []
    for place, spec in enumerate(specs):
        seed = int(spec.get("seed", 0))
        without = {key: _unseeded(value, seed) for key, value in spec.items() if key not in APART}
        known = next((members for other, members in found if other == without), None)
        if known is None:
            found.append((without, [place]))
        else:
            known.append(place)
    return [Setting(tuple(places), tuple(int(specs[p].get("seed", 0)) for p in places)) for _, places in found]


def _unseeded(node: Any, seed: int) -> Any:
    if isinstance(node, Mapping):
        return {key: _unseeded(value, seed) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_unseeded(item, seed) for item in node]
    if isinstance(node, str) and "/" in node:
        return re.sub(rf"(?<![0-9.]){seed}(?![0-9.])", "{seed}", node)
    return node


def have_seeds(settings: Sequence[Setting]) -> bool:
    """Whether one setting at least was run with several seeds: else there is no spread to show."""
    return any(len(set(each.seeds)) > 1 for each in settings)


def over_seeds(metrics: Sequence[ComparedSeries], settings: Sequence[Setting]) -> list[SeedsCompared]:
    """Summarise series over seeds, and compare each setting with the first.

    Args:
        metrics: values of all runs; those without a common step are left out, since they compare nothing.
        settings: of the runs.
    """
    found = []
    for series in metrics:
        if series.step is None:
            continue
        spreads = [spread_of([series.values[place] for place in each.members]) for each in settings]
        differences = [_difference(series.values, settings[0], each) for each in settings[1:]]
        found.append(SeedsCompared(series.name, series.step, spreads, [None, *differences]))
    return found


def spread_of(values: Sequence[float | None]) -> Spread:
    """Summarise the values of a setting's runs."""
    known = [value for value in values if value is not None]
    return Spread(mean(known) if known else None, stdev(known) if len(known) > 1 else None, len(known))


def _difference(values: Sequence[float | None], first: Setting, other: Setting) -> Difference | None:
    ours, theirs = _by_seed(values, other), _by_seed(values, first)
    if not ours or not theirs:
        return None
    if ours.keys() == theirs.keys() and len(ours) > 1:
        # One seed draws the same rows in the same order: what it does to both settings is no difference.
        return paired([ours[seed] - theirs[seed] for seed in ours])
    return welch(list(ours.values()), list(theirs.values()))


def _by_seed(values: Sequence[float | None], setting: Setting) -> dict[Any, float]:
    several = len(set(setting.seeds)) < len(setting.seeds)
    keys = setting.members if several else setting.seeds
    pairs = zip(keys, (values[place] for place in setting.members), strict=True)
    return {key: value for key, value in pairs if value is not None}


def paired(differences: Sequence[float]) -> Difference:
    """Judge differences of pairs: the 95 % interval of their mean by Student's distribution."""
    error = stdev(differences) / math.sqrt(len(differences))
    return Difference(mean(differences), t_quantile(len(differences) - 1) * error, True)


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Judge the difference of two means whose runs belong to no pairs, with unequal variances (Welch 1947)."""
    value = mean(ours) - mean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Difference(value, None, False)
    parts = [stdev(each) ** 2 / len(each) for each in (ours, theirs)]
    if not sum(parts):
        return Difference(value, 0.0, False)
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (ours, theirs), strict=True))
    return Difference(value, t_quantile(freedom) * math.sqrt(sum(parts)), False)


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's distribution; of the next smaller whole number of degrees of freedom."""
    whole = max(1, math.floor(freedom + 1e-9))
    if whole <= len(T_975):
        return T_975[whole - 1]
    # Hill's expansion around the normal quantile: right to four digits from 30 on.
    z = 1.959964
    return z + (z**3 + z) / (4 * whole) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * whole**2)
