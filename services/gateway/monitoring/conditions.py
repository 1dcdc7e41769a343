"""Where the conditions of rules stand, by the points of the series that they watch."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flotilla.shared.config.sections.rule import AboveConfig, PlateauConfig, RuleConfig


class Point(NamedTuple):
    """A value of a series."""

    step: int
    version: int
    value: float


class Met(NamedTuple):
    """The first point at which a condition was met."""

    point: Point
    best: float | None


class Standing(NamedTuple):
    """Where a condition stands: the point that met it first, if any, and the newest points in a row that meet it."""

    met: Met | None
    num_met: int


def standing(rule: RuleConfig, points: Iterable[Point]) -> Standing:
    """Follow a rule's condition along points, in the order of their steps, as far as the first that meets it."""
    when, num_met = rule.when, 0
    best: float | None = None
    for point in points:
        if isinstance(when, PlateauConfig):
            sign = 1 if when.mode == "max" else -1
            is_better = best is None or sign * (point.value - best) > when.min_delta
            best = point.value if best is None or is_better else best
            counts = not is_better
        elif isinstance(when, AboveConfig):
            counts = point.value > when.bound
        else:
            counts = point.value < when.bound
        num_met = num_met + 1 if counts else 0
        if num_met >= when.patience:
            return Standing(Met(point, best), num_met)
    return Standing(None, num_met)


@dataclass
class Seen:
    """What was read of the series that an experiment's rules watch; whoever asks reads on from there."""

    cursor: int = 0
    points: dict[str, dict[int, Point]] = field(default_factory=dict)
    """By series and step."""

    def of(self, metric: str, after: int) -> list[Point]:
        """List the points of a series after a step."""
        points = self.points.get(metric, {})
        return [points[step] for step in sorted(points) if step > after]
