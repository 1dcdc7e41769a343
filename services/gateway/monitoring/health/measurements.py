"""What is measured of one experiment while it runs.

Health alone outlives the gateway's process; the rest begins with nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flotilla.services.gateway.datasets.outcomes import Outcomes
from flotilla.services.gateway.monitoring.agents import LastAsked
from flotilla.services.gateway.monitoring.bottleneck import Bottleneck
from flotilla.services.gateway.monitoring.conditions import Seen
from flotilla.services.gateway.monitoring.health.gaps import gap_series
from flotilla.services.gateway.monitoring.health.window import HealthWindow
from flotilla.services.gateway.monitoring.lags import LagHistogram
from flotilla.services.gateway.monitoring.window import Window
from flotilla.services.gateway.registry.services import LiveService
from flotilla.shared.config.spec import ExperimentSpec

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
        health: what the training-health checks look at.
        asked: when an agent from outside last asked for an episode.
        rule_points: of the series that rules watch.
        latest: values of the last step that was reported, of ``SHOWN_VALUES``.
    """

    window: Window = field(default_factory=Window)
    lags: LagHistogram = field(default_factory=LagHistogram)
    health: HealthWindow = field(default_factory=HealthWindow)
    asked: LastAsked = field(default_factory=LastAsked)
    outcomes: Outcomes = field(default_factory=Outcomes)
    rule_points: Seen = field(default_factory=Seen)
    latest: dict[str, float] = field(default_factory=dict)

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
