"""What was seen of an experiment lately. In memory: a restarted gateway starts empty.

A diagnosis looks back as far as it takes to see some steps, so that a change of fast steps is reported within seconds
and slow ones are still seen whole. A step that lasts longer than all of these together has made them history.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

from flotilla.services.gateway.monitoring.bottleneck import MIN_LOOKS, Bottleneck, Look, StepTimes, find_bottleneck

WINDOW_SECONDS: Final = 60.0
MIN_SECONDS: Final = 8.0
ENOUGH_STEPS: Final = 4


class Window:
    """The looks and steps of the last ``WINDOW_SECONDS``."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Look]] = deque()
        self._steps: deque[tuple[float, StepTimes]] = deque()

    def add_look(self, at: float, look: Look) -> None:
        """Record what was seen at a time of the monotonic clock."""
        self._looks.append((at, look))
        self._forget(at)

    def add_step(self, at: float, values: Mapping[str, float]) -> None:
        """Record a step's metrics, if there are times among them."""
        times = StepTimes.from_metrics(values)
        if times is not None:
            self._steps.append((at, times))

    @property
    def last_look(self) -> Look | None:
        """The newest one."""
        return self._looks[-1][1] if self._looks else None

    def bottleneck(self, now: float, *, budget: int, groups_per_step: int, is_sampled: bool = True) -> Bottleneck:
        """Name what bounds the speed; see ``find_bottleneck``."""
        begin = self._begin(now)
        looks = [look for at, look in self._looks if at >= begin]
        steps = [step for at, step in self._steps if at > begin]
        return find_bottleneck(looks, steps, budget=budget, groups_per_step=groups_per_step, is_sampled=is_sampled)

    def seconds(self, now: float) -> float:
        """How far back a diagnosis looks now."""
        return now - max(self._begin(now), self._looks[0][0]) if self._looks else 0.0

    def clear(self) -> None:
        """Forget everything: what was seen says nothing of what comes."""
        self._looks.clear()
        self._steps.clear()

    def _begin(self, now: float) -> float:
        self._forget(now)
        begin = now - WINDOW_SECONDS
        if len(self._steps) >= ENOUGH_STEPS:
            at, step = self._steps[-ENOUGH_STEPS]
            begin = max(begin, min(at - step.total, now - MIN_SECONDS))
        steps = [(at, step) for at, step in self._steps if at > begin]
        if steps and now - steps[-1][0] > sum(step.total for _, step in steps):
            after = [at for at, _ in self._looks if at > steps[-1][0]]
            return after[0] if len(after) >= MIN_LOOKS else begin
        return begin

    def _forget(self, now: float) -> None:
        for queue in (self._looks, self._steps):
            while queue and queue[0][0] < now - WINDOW_SECONDS:
                queue.popleft()
