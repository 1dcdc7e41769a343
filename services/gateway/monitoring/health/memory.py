"""How the memory of each process grows with an experiment's steps, and the check of memory that creeps.

A process takes more memory while it warms up, and when a longer sample comes than any before. What creeps rises all the
time: its slope is that of a line through the points of the later steps, and counts where it is beyond what the points'
own scatter explains and each third of them lies above the one before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Final

from flotilla.services.gateway.monitoring.health.evidence import Evidence, MemorySlope, Seen
from flotilla.shared.host.own_memory import PREFIX

MOST_POINTS: Final = 256
"""Of one process; then every second one goes."""
FEWEST_POINTS: Final = 24
FEWEST_STEPS: Final = 300
"""From the first to the last point that a slope is of."""
WARMUP_SHARE: Final = 0.25
"""First part of the points, which no slope is of."""
SURE: Final = 3.0
"""Standard errors that a slope is above the bound."""
STEPS: Final = 100
"""A slope is in bytes for so many steps."""
MOST_PROCESSES: Final = 256


@dataclass(slots=True)
class _Series:
    steps: list[int]
    bytes: list[float]


class MemorySeries:
    """The memory of an experiment's processes by its steps, since a gateway began to look.

    A process is known by its service's id: one that begins again under another id begins with no points.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}

    def clear(self) -> None:
        """Forget all points."""
        self._series.clear()

    def add(self, service_id: str, kind: str, step: int, load: Mapping[str, float]) -> None:
        """Note what a service reports of its processes: a point a step and process; a later one of a step replaces it.

        Args:
            service_id: whose they are.
            kind: of the service, such as rollout.
            step: that the experiment has done.
            load: gauges, of which those that begin with ``memory/`` are bytes.
        """
        for name, value in load.items():
            if not name.startswith(PREFIX):
                continue
            key = service_id, f"{kind}/{name.removeprefix(PREFIX)}"
            if key not in self._series and len(self._series) >= MOST_PROCESSES:
                continue
            series = self._series.setdefault(key, _Series([], []))
            while series.steps and series.steps[-1] >= step:
                series.steps.pop()
                series.bytes.pop()
            series.steps.append(step)
            series.bytes.append(value)
            if len(series.steps) > MOST_POINTS:
                del series.steps[1::2], series.bytes[1::2]

    def newest(self) -> dict[str, float]:
        """Return the bytes of each kind of process, of the largest of its services."""
        found: dict[str, float] = {}
        for (_, name), series in self._series.items():
            found[name] = max(found.get(name, 0.0), series.bytes[-1])
        return found

    def slopes(self) -> tuple[MemorySlope, ...]:
        """Return the slope of each process that has points enough."""
        found = (_slope(service_id, name, series) for (service_id, name), series in self._series.items())
        return tuple(each for each in found if each is not None)


def _slope(service_id: str, name: str, series: _Series) -> MemorySlope | None:
    first = int(len(series.steps) * WARMUP_SHARE)
    steps, values = series.steps[first:], series.bytes[first:]
    if len(steps) < FEWEST_POINTS or steps[-1] - steps[0] < FEWEST_STEPS:
        return None
    line = linear_regression(steps, values)
    mean = fmean(steps)
    spread = sum((step - mean) ** 2 for step in steps)
    residual = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(steps, values, strict=True))
    error = (residual / (len(steps) - 2) / spread) ** 0.5
    third = len(values) // 3
    thirds = fmean(values[:third]), fmean(values[third:-third]), fmean(values[-third:])
    return MemorySlope(
        service_id=service_id,
        process=name,
        bytes=values[-1],
        slope=STEPS * line.slope,
        error=STEPS * error,
        steps=steps[-1] - steps[0],
        rises=thirds[0] < thirds[1] < thirds[2],
    )


def memory_creeps(evidence: Evidence) -> Seen | None:
    """See the process whose memory rises fastest, beyond the bound and beyond chance."""
    bound = evidence.facts.thresholds.memory_slope * 10**6
    found = [each for each in evidence.memory if each.rises and each.slope - SURE * each.error > bound]
    if not found:
        return None
    worst = max(found, key=lambda each: each.slope)
    return Seen(
        f"{worst.process} of {worst.service_id} has {worst.bytes / 10**6:.0f} MB, and over {worst.steps} steps "
        f"took {worst.slope / 10**6:.2f} MB more for every {STEPS} of them",
        {"bytes": worst.bytes, "bytes_per_100_steps": worst.slope, "steps": float(worst.steps)},
        subject=worst.service_id,
    )
