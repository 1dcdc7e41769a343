"""What is measured of one experiment while it runs.

Health alone outlives the gateway's process; the rest begins with nothing.

The ages of trained tokens are a histogram that only grows: a restarted gateway counts from the next step that it hears
of, as counters do whose process is new. What was seen lately starts empty: a diagnosis looks back as far as it takes to
see some steps, so that a change of fast steps is reported within seconds and slow ones are still seen whole. A step
that lasts longer than all of these together has made them history.

What the training-health checks look at is stored, so that a gateway that starts again continues where it was. What
services report only grows while their sessions last, so nothing that they counted since the window was stored is lost:
their next report has it. The figures of steps since then are.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flotilla.services.gateway.datasets.curriculum import Outcomes
from flotilla.services.gateway.monitoring.agents import LastAsked
from flotilla.services.gateway.monitoring.bottleneck import MIN_LOOKS, Bottleneck, Look, StepTimes, find_bottleneck
from flotilla.services.gateway.monitoring.conditions import Seen
from flotilla.services.gateway.monitoring.health.gaps import gap_series
from flotilla.services.gateway.monitoring.health.window import HealthWindow
from flotilla.services.gateway.monitoring.lending import Lending
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository, PerExperiment
from flotilla.services.gateway.registry.services import LiveService
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PutWindow
from flotilla.shared.config.spec import ExperimentSpec

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
        """Forget everything: earlier values do not apply any more."""
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


BOUNDS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Versions; a lag counts at the first bound that is not below it, or above them all."""
PREFIX: Final = "lag/tokens/"


class LagHistogram:
    """Sampled tokens by their lag, over the steps that were reported."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._last_step = 0
        self.num_tokens = 0
        self.sum_of_lags = 0

    def add_step(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step's metrics; a step that is trained again after a crash counts once."""
        lags = {name.removeprefix(PREFIX): value for name, value in values.items() if name.startswith(PREFIX)}
        if step <= self._last_step or not lags:
            return
        self._last_step = step
        for written, value in lags.items():
            if not written.isdecimal():
                continue
            lag, count = int(written), round(value)
            self._counts[bisect_left(BOUNDS, lag)] += count
            self.num_tokens += count
            self.sum_of_lags += lag * count

    def cumulative(self) -> list[tuple[int, int]]:
        """List each bound with the tokens whose lag is not above it."""
        found, total = [], 0
        for bound, count in zip(BOUNDS, self._counts, strict=False):
            total += count
            found.append((bound, total))
        return found


SHOWN_VALUES: Final = (
    "reward/mean",
    "loss/total",
    "entropy",
    "kl/mean",
    "grad_norm",
    "ratio/clip_fraction",
    "completion_tokens/mean",
    "groups/flat_fraction",
    "samples/without_reward",
    "tokens/trained",
)
"""What a step measures that is worth an alert or a panel; a fixed number, since each is a series in Prometheus."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of one experiment.

    Attributes:
        window: the looks and steps of the last minute.
        lags: of the tokens that it has trained.
        health: inputs of the training-health checks.
        asked: when an agent from outside last asked for an episode.
        rule_points: of the series that rules watch.
        latest: values of the last step that was reported, of ``SHOWN_VALUES``.
        lending: whether the trainer's devices are worth lending, where the spec lets them be.
    """

    window: Window = field(default_factory=Window)
    lags: LagHistogram = field(default_factory=LagHistogram)
    health: HealthWindow = field(default_factory=HealthWindow)
    asked: LastAsked = field(default_factory=LastAsked)
    outcomes: Outcomes = field(default_factory=Outcomes)
    rule_points: Seen = field(default_factory=Seen)
    latest: dict[str, float] = field(default_factory=dict)
    lending: Lending = field(default_factory=Lending)

    def add_step(self, at: float, step: int, values: Mapping[str, float]) -> None:
        """Record a step's metrics.

        Args:
            at: when they were reported, in seconds of the monotonic clock.
            step: of the optimiser.
            values: by the name of the metric.
        """
        self.window.add_step(at, values)
        self.lags.add_step(step, values)
        self.health.add_step(step, values)
        self.latest.update((name, values[name]) for name in SHOWN_VALUES if name in values)
        if gaps := gap_series(values):
            # Of rollouts that took part: those that have left have no value any more.
            for name in gap_series(self.latest):
                del self.latest[name]
            self.latest.update(gaps)

    def add_reports(self, service: LiveService, step: int) -> None:
        """Record what a service has graded or sampled, and what memory it has, once the experiment has done a step."""
        observed = service.observed
        self.health.memory.add(service.id, service.kind.value, step, observed.load)
        if observed.grading is not None:
            self.health.add_grading(observed.grading)
            self.outcomes.add(observed.grading)
        if observed.sampling is not None:
            self.health.add_sampling(observed.sampling)

    def bottleneck(self, now: float, spec: ExperimentSpec) -> Bottleneck:
        """Name what bounds the experiment's speed at a time of the monotonic clock."""
        return self.window.bottleneck(
            now,
            budget=spec.admission_budget,
            groups_per_step=spec.groups_per_step,
            is_sampled=spec.finished_job is None and not spec.data.holds_groups,
        )


HEALTH: Final = "health"


async def restore_windows(
    experiments: Iterable[Experiment], measurements: PerExperiment[Measurements], store: Store
) -> None:
    """Read what an earlier gateway kept of experiments that have not ended."""
    for experiment in experiments:
        if not experiment.state.is_final:
            kept = await store.window(experiment.id, HEALTH)
            is_same_start = kept.get("start") == experiment.record.start_number
            measurements.of(experiment).health.restore(kept.get("window", {}), is_same_start=is_same_start)


async def store_window(experiment: Experiment, repository: ExperimentRepository, window: HealthWindow) -> None:
    """Keep what was seen of an experiment, unless it was deleted meanwhile."""
    async with repository.transaction() as change:
        if repository.find(experiment.id) is experiment:
            stage_window(change, experiment, window.to_window())


def stage_window(change: Transaction, experiment: Experiment, described: Mapping[str, Any]) -> None:
    """Keep what ``HealthWindow.to_window`` described."""
    data = {"start": experiment.record.start_number, "window": dict(described)}
    change.write(PutWindow(experiment.id, HEALTH, data))
