"""What graders said, as series: components of the reward, metrics of graders, and both for each data source.

Graders and data choose these names, so they are cleaned, bounded in length and in number, and every series has a place
that none of Flotilla's is in: ``reward/COMPONENT/mean`` has one part more than ``reward/mean``, and nothing of Flotilla
begins with ``grader/`` or ``source/``.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from flotilla.shared.schemas.trajectory import Trajectory

LONGEST_NAME = 64
MOST_COMPONENTS = 32
MOST_METRICS = 32
MOST_SOURCES = 16

Scored = tuple[str | None, Trajectory]
"""A scored trajectory, and the data source of its task."""


def series_name(given: str) -> str:
    """Make a name safe in a series: letters, digits, dot, dash, underscore, and slashes that separate parts.

    One that is too long keeps its beginning, and a short digest of the whole distinguishes it.
    """
    parts = [re.sub(r"[^A-Za-z0-9._-]", "_", part) for part in given.split("/")]
    name = "/".join(part or "_" for part in parts)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('/')}_{digest}"


class SeriesNames:
    """The names that have been given series so far; those that come when there are enough are left out.

    In memory, so the bounds hold for each process that records.
    """

    def __init__(self) -> None:
        self._components: dict[str, str] = {}
        self._metrics: dict[str, str] = {}
        self._sources: dict[str, str] = {}
        self.num_left_out = 0

    def component(self, given: str) -> str | None:
        """Name the series of a component; None if it has none."""
        return self._admit(self._components, given, MOST_COMPONENTS)

    def metric(self, given: str) -> str | None:
        """Name the series of a grader's metric; None if it has none."""
        return self._admit(self._metrics, given, MOST_METRICS)

    def source(self, given: str) -> str | None:
        """Name the series of a data source; None if it has none."""
        return self._admit(self._sources, given.replace("/", "_"), MOST_SOURCES)

    def _admit(self, known: dict[str, str], given: str, most: int) -> str | None:
        if given not in known:
            if len(known) >= most:
                self.num_left_out += 1
                return None
            known[given] = series_name(given)
        return known[given]


def describe_rewards(scored: Sequence[Scored], names: SeriesNames) -> dict[str, float]:
    """Measure the grades of scored trajectories.

    Args:
        scored: of one step, or of one evaluation.
        names: those recorded so far; grows.

    Returns:
        ``reward/COMPONENT/{mean,std,min,max}``, ``grader/METRIC/{mean,min,max}`` over the trajectories that have it,
        and for each data source ``source/SOURCE/reward/{mean,std}``, ``source/SOURCE/reward/COMPONENT/mean`` and
        ``source/SOURCE/grader/METRIC/mean``.
    """
    found: dict[str, float] = {}
    every = [trajectory for _, trajectory in scored]
    for component, values in _columns((t.components for t in every), names.component).items():
        found |= _statistics(f"reward/{component}", values, ("mean", "std", "min", "max"))
    for metric, values in _columns((t.metrics for t in every), names.metric).items():
        found |= _statistics(f"grader/{metric}", values, ("mean", "min", "max"))
    by_source: dict[str, list[Trajectory]] = {}
    for given, trajectory in scored:
        name = None if given is None else names.source(given)
        if name is not None:
            by_source.setdefault(name, []).append(trajectory)
    for source, own in by_source.items():
        rewards = [t.reward for t in own if t.reward is not None]
        found |= _statistics(f"source/{source}/reward", rewards, ("mean", "std"))
        for component, values in _columns((t.components for t in own), names.component).items():
            found |= _statistics(f"source/{source}/reward/{component}", values, ("mean",))
        for metric, values in _columns((t.metrics for t in own), names.metric).items():
            found |= _statistics(f"source/{source}/grader/{metric}", values, ("mean",))
    return found


def _columns(rows: Iterable[Mapping[str, float]], name_of: Callable[[str], str | None]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for row in rows:
        for given, value in row.items():
            name = name_of(given)
            if name is not None:
                columns.setdefault(name, []).append(value)
    return columns


def _statistics(name: str, values: Sequence[float], wanted: Sequence[str]) -> dict[str, float]:
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    found = {"mean": array.mean(), "std": array.std(), "min": array.min(), "max": array.max()}
    return {f"{name}/{which}": float(found[which]) for which in wanted}
