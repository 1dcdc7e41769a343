"""The gateway's page for Prometheus, version 0.0.4 of its text format.

Everything on it lies in memory: a scrape asks neither the data plane nor the database, so it costs the same whoever is
away. The number of series is bounded: a fixed number for each of ``MAX_EXPERIMENTS`` experiments at work.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from services.gateway.feeder.status import FeederStatus
from services.gateway.monitoring.bottleneck import COMPONENTS
from services.gateway.monitoring.measurements import Measurements
from services.gateway.records.per_experiment import PerExperiment
from services.gateway.records.repository import Experiment
from services.gateway.state import GatewayState
from shared.schemas.experiment import ExperimentState
from shared.streams.keys import HopName
from shared.streams.ledger import Ledger

CONTENT_TYPE: Final = "text/plain; version=0.0.4"
MAX_EXPERIMENTS: Final = 100
"""Those that run come first; how many are left out is a series of its own."""
SHARES: Final = {
    "trainer/wait_share": ("trainer_wait_share", "Share of the steps' time in which the trainer waited for groups"),
    "rollout/idle_share": ("rollout_idle_share", "Share of the looks at which no task waited or was claimed"),
    "admission/full_share": ("admission_full_share", "Share of the looks at which the admission budget was used up"),
}


class Page:
    """Metrics in the order in which they are added; each is declared once, before its samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._name = ""

    def declare(self, name: str, kind: str, meaning: str) -> None:
        """Begin a metric."""
        self._name = f"flotilla_{name}"
        self._lines += [f"# HELP {self._name} {meaning}", f"# TYPE {self._name} {kind}"]

    def add(self, value: float | None, suffix: str = "", **labels: str) -> None:
        """Add a sample of the metric that was declared last; None is no sample."""
        if value is None:
            return
        inside = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels.items())
        self._lines.append(f"{self._name}{suffix}{{{inside}}} {value}" if inside else f"{self._name}{suffix} {value}")

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines)


def page_of(gateway: GatewayState) -> str:
    """Write the page."""
    page = Page()
    _count(page, "services", "Registered services", "kind", (service.kind.value for service in gateway.registry))
    _count(page, "experiments", "Experiments", "state", (experiment.state.value for experiment in gateway.repository))
    active = [experiment for experiment in gateway.repository if experiment.is_active]
    active.sort(key=lambda experiment: experiment.state is not ExperimentState.RUNNING)
    page.declare("experiments_left_out", "gauge", f"Experiments at work beyond the {MAX_EXPERIMENTS} of this page")
    page.add(max(0, len(active) - MAX_EXPERIMENTS))
    shown = active[:MAX_EXPERIMENTS]
    _progress(page, shown, gateway.feeder_status)
    _streams(page, shown, gateway.measurements)
    _lags(page, shown, gateway.measurements)
    _speed(page, shown, gateway)
    return str(page)


def _count(page: Page, name: str, meaning: str, label: str, found: Iterable[str]) -> None:
    page.declare(name, "gauge", meaning)
    for value, count in sorted(Counter(found).items()):
        page.add(count, **{label: value})


def _progress(page: Page, experiments: Iterable[Experiment], feeders: PerExperiment[FeederStatus]) -> None:
    def read_ledger(read: Callable[[Ledger], int]) -> Callable[[Experiment], int | None]:
        return lambda experiment: read(ledger) if (ledger := feeders.of(experiment).ledger) is not None else None

    gauges: dict[str, tuple[str, Callable[[Experiment], int | None]]] = {
        "step": ("Last step that was trained", lambda e: e.record.step),
        "policy_version": ("Version that is current", lambda e: e.record.policy_version),
        "outstanding_groups": (
            "Groups issued and neither planned nor resolved",
            read_ledger(lambda ledger: ledger.outstanding),
        ),
        "issued_groups": ("Groups issued", read_ledger(lambda ledger: ledger.issued)),
        "trained_groups": ("Groups in a durable checkpoint", read_ledger(lambda ledger: ledger.trained)),
        "has_problem": ("Whether it stalls or waits", lambda e: int(e.record.problem is not None)),
    }
    for name, (meaning, read) in gauges.items():
        page.declare(f"experiment_{name}", "gauge", meaning)
        for experiment in experiments:
            page.add(read(experiment), experiment=experiment.id)


def _streams(page: Page, experiments: Iterable[Experiment], measured: PerExperiment[Measurements]) -> None:
    """Write what waits in the streams; nothing of an experiment whose data plane did not answer at the last look."""
    seen: list[tuple[str, Ledger, Mapping[HopName, float], float]] = []
    for experiment in experiments:
        look = measured.of(experiment).window.last_look
        if look is not None and look.ledger is not None:
            seen.append((experiment.id, look.ledger, look.oldest_seconds, look.redis_seconds))
    page.declare("experiment_stream_groups", "gauge", "Groups in a stream that wait or are claimed")
    for experiment_id, ledger, _, _ in seen:
        for hop in HopName:
            for place, counts in (("waiting", ledger.waiting), ("claimed", ledger.claimed)):
                page.add(getattr(counts, hop.value), experiment=experiment_id, stream=hop.value, place=place)
    page.declare(
        "experiment_stream_oldest_seconds", "gauge", "How long the oldest group has been in a stream, 0 if none"
    )
    for experiment_id, _, oldest, _ in seen:
        for hop in HopName:
            page.add(oldest.get(hop, 0.0), experiment=experiment_id, stream=hop.value)
    page.declare("experiment_redis_seconds", "gauge", "Round trip of reading the ledger")
    for experiment_id, _, _, seconds in seen:
        page.add(seconds, experiment=experiment_id)


def _lags(page: Page, experiments: Iterable[Experiment], measured: PerExperiment[Measurements]) -> None:
    page.declare("experiment_trained_token_lag", "histogram", "Lag in versions of the sampled tokens that were trained")
    for experiment in experiments:
        lags = measured.of(experiment).lags
        for bound, count in lags.cumulative():
            page.add(count, "_bucket", experiment=experiment.id, le=str(bound))
        page.add(lags.num_tokens, "_bucket", experiment=experiment.id, le="+Inf")
        page.add(lags.sum_of_lags, "_sum", experiment=experiment.id)
        page.add(lags.num_tokens, "_count", experiment=experiment.id)


def _speed(page: Page, experiments: Iterable[Experiment], gateway: GatewayState) -> None:
    page.declare("experiment_admission_wait_seconds_total", "counter", "Time in which the budget held the feeder")
    for experiment in experiments:
        page.add(gateway.feeder_status.of(experiment).wait.total_seconds, experiment=experiment.id)
    running = [each for each in experiments if each.state is ExperimentState.RUNNING]
    now = gateway.clock.monotonic()
    found = {each.id: gateway.measurements.of(each).bottleneck(now, each.spec) for each in running}
    page.declare("experiment_bottleneck", "gauge", "1 for what bounds the speed now, 0 for the others")
    for experiment_id, bottleneck in found.items():
        for component in COMPONENTS:
            page.add(int(component == bottleneck.component), experiment=experiment_id, component=component)
    for name, (short, meaning) in SHARES.items():
        page.declare(f"experiment_{short}", "gauge", meaning)
        for experiment_id, bottleneck in found.items():
            page.add(bottleneck.evidence.get(name), experiment=experiment_id)


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
