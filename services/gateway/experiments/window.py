"""What was seen of an experiment in the last minute. In memory: a restarted gateway begins anew."""

from collections import deque
from collections.abc import Mapping
from typing import Final

from services.gateway.experiments.bottleneck import Bottleneck, Look, StepTimes, find_bottleneck

WINDOW_SECONDS: Final = 60.0


class Window:
    """The looks and steps of the last ``WINDOW_SECONDS``."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Look]] = deque()
        self._steps: deque[tuple[float, StepTimes]] = deque()

    def add_look(self, at: float, look: Look) -> None:
        """Take in what was seen at a time of the monotonic clock."""
        self._looks.append((at, look))
        self._forget(at)

    def add_step(self, at: float, values: Mapping[str, float]) -> None:
        """Take in a step's metrics; those without times are of no use."""
        times = StepTimes.from_metrics(values)
        if times is not None:
            self._steps.append((at, times))

    def bottleneck(self, now: float, *, budget: int) -> Bottleneck:
        """Name what bounds the speed; see ``find_bottleneck``."""
        self._forget(now)
        return find_bottleneck([look for _, look in self._looks], [step for _, step in self._steps], budget=budget)

    def seconds(self, now: float) -> float:
        """How far back it reaches."""
        return now - self._looks[0][0] if self._looks else 0.0

    def clear(self) -> None:
        """Forget everything: what was seen says nothing of what comes."""
        self._looks.clear()
        self._steps.clear()

    def _forget(self, now: float) -> None:
        for queue in (self._looks, self._steps):
            while queue and queue[0][0] < now - WINDOW_SECONDS:
                queue.popleft()
