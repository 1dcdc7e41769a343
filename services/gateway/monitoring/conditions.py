"""Where the conditions of rules stand, by the points of the series that they watch.

Each point is examined once, when it comes: a long run costs no more at its end than at its beginning. An earlier step
that comes again tells that the steps since were lost, such as with a checkpoint: patience begins again there.
"""

from collections import deque
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
    """The first point at which a condition was met, and the best value before it where that is a plateau's."""

    point: Point
    best: float | None


MOST_WAITING = 100_000
"""Points that wait to be judged while a condition is met and nothing may act."""


@dataclass
class Watch:
    """Where one rule stands.

    Attributes:
        num_fired: how often it has acted.
        since_step: of the point at which it acted last: only later ones count.
        num_points: that were judged since.
        num_met: the newest of them in a row that meet the condition.
        met: the first point that completed the patience; until the rule has acted no later one is judged.
    """

    num_fired: int = 0
    since_step: int = -1
    num_points: int = 0
    num_met: int = 0
    met: Met | None = None
    _best: float | None = None
    _newest_step: int = -1
    _waiting: deque[Point] = field(default_factory=deque)

    @property
    def is_full(self) -> bool:
        """Whether no more points shall be read before some were judged."""
        return len(self._waiting) >= MOST_WAITING

    def resume(self, num_fired: int, since_step: int) -> None:
        """Continue from what is stored of the rule, where it has acted more often than was known."""
        if num_fired > self.num_fired:
            self.num_fired, self.since_step, self._best = num_fired, since_step, None
            self._begin_again()

    def _begin_again(self) -> None:
        self.num_points = self.num_met = 0
        self.met = None

    def add(self, points: Iterable[Point]) -> None:
        """Take points, in the order in which they were stored."""
        for point in points:
            if point.step == self._newest_step:
                continue
            if point.step < self._newest_step:
                self._waiting = deque(each for each in self._waiting if each.step < point.step)
                self.since_step = min(self.since_step, point.step - 1)
                self._begin_again()
            self._newest_step = point.step
            self._waiting.append(point)

    def look(self, rule: RuleConfig) -> Met | None:
        """Judge the points that wait, as far as the first that completes the rule's patience; return that."""
        while self._waiting and self.met is None:
            point = self._waiting.popleft()
            if point.step <= self.since_step:
                continue
            self.num_points += 1
            self.num_met = self.num_met + 1 if self._counts(rule, point.value) else 0
            if self.num_met >= rule.when.patience and self.num_fired < rule.times:
                self.met = Met(point, self._best)
        return self.met

    def _counts(self, rule: RuleConfig, value: float) -> bool:
        when = rule.when
        if isinstance(when, PlateauConfig):
            sign = 1 if when.mode == "max" else -1
            is_better = self._best is None or sign * (value - self._best) > when.min_delta
            self._best = value if self._best is None or is_better else self._best
            return not is_better
        return value > when.bound if isinstance(when, AboveConfig) else value < when.bound


@dataclass
class Seen:
    """What was read of the series that an experiment's rules watch; whoever asks reads on from there."""

    cursor: int = 0
    watches: dict[str, Watch] = field(default_factory=dict)
    """By the rule's name."""

    def watch(self, rule: RuleConfig) -> Watch:
        """Find where a rule stands."""
        return self.watches.setdefault(rule.name, Watch())

    def add(self, rules: Iterable[RuleConfig], rows: Iterable[tuple[int, str, Point]]) -> None:
        """Give each rule the points of its series: place in the order of writing, name and point.

        Those that another reader has brought meanwhile are passed over.
        """
        by_name: dict[str, list[Point]] = {}
        before = self.cursor
        for place, name, point in rows:
            if place > before:
                by_name.setdefault(name, []).append(point)
                self.cursor = place
        for rule in rules:
            self.watch(rule).add(by_name.get(rule.metric, ()))
