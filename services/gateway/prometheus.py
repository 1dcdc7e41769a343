"""The metrics of the gateway's page for Prometheus.

Everything on it lies in memory: a scrape asks neither the data plane nor the database, so it costs the same when one of
them is unavailable. The number of series is bounded: a fixed number for each of ``MAX_EXPERIMENTS`` experiments.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from statistics import median
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.monitoring.bottleneck import COMPONENTS
from flotilla.services.gateway.monitoring.health.measurements import Measurements
from flotilla.services.gateway.records.repository import Experiment, PerExperiment
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.streams.hop import HopName
from flotilla.shared.telemetry.prometheus import gauge

MAX_EXPERIMENTS: Final = 100
"""Those that run come first; how many are left out is a series of its own."""
MOST_LAGS: Final = 8
PARTS: Final = ("negotiate", "transfer", "commit")
SHARES: Final = {
    "trainer/wait_share": ("trainer_wait_share", "Share of the steps' time in which the trainer waited for groups"),
    "rollout/idle_share": ("rollout_idle_share", "Share of the looks at which no task waited or was claimed"),
    "admission/full_share": ("admission_full_share", "Share of the looks at which the admission budget was used up"),
}


def metrics_of(gateway: GatewayState, *, with_experiments: bool = True) -> Iterator[Metric]:
    """Make the metrics; without those of single experiments, how many services and experiments there are."""
    yield _count("services", "Registered services", "kind", ServiceKind, (each.kind for each in gateway.registry))
    yield _count("experiments", "Experiments", "state", ExperimentState, (each.state for each in gateway.repository))
    if not with_experiments:
        return
    active = [experiment for experiment in gateway.repository if experiment.is_active]
    active.sort(key=lambda experiment: experiment.state is not ExperimentState.RUNNING)
    left_out = gauge("experiments_left_out", f"Experiments at work beyond the {MAX_EXPERIMENTS} of this page")
    left_out.add_metric((), max(0, len(active) - MAX_EXPERIMENTS))
    yield left_out
    shown = active[:MAX_EXPERIMENTS]
    yield from _progress(shown, gateway.feeder_status)
    yield from _queues(shown, gateway.feeder_status, gateway.clock.monotonic())
    yield from _streams(shown, gateway.measurements)
    yield _lags(shown, gateway.measurements)
    yield _values(shown, gateway.measurements)
    yield from _audits(shown, gateway.measurements)
    yield from _speed(shown, gateway)


def _count(name: str, meaning: str, label: str, values: Iterable[StrEnum], found: Iterable[StrEnum]) -> Metric:
    """Count by value; those that nothing has are 0, since a series that begins with its first has not risen."""
    counted, counts = gauge(name, meaning, label), Counter(found)
    for value in sorted(values):
        counted.add_metric((value.value,), counts[value])
    return counted


def _progress(experiments: Iterable[Experiment], feeders: PerExperiment[FeederStatus]) -> Iterator[Metric]:
    step = gauge("experiment_step", "Last step that was trained", "experiment")
    version = gauge("experiment_policy_version", "Version that is current", "experiment")
    outstanding = gauge("experiment_outstanding_groups", "Groups issued and neither planned nor resolved", "experiment")
    issued = gauge("experiment_issued_groups", "Groups issued", "experiment")
    trained = gauge("experiment_trained_groups", "Groups in a durable checkpoint", "experiment")
    problem = gauge("experiment_has_problem", "Whether it stalls or waits", "experiment")
    for experiment in experiments:
        record, ledger, named = experiment.record, feeders.of(experiment).ledger, (experiment.id,)
        step.add_metric(named, record.step)
        version.add_metric(named, record.policy_version)
        problem.add_metric(named, record.problem is not None)
        if ledger is not None:
            outstanding.add_metric(named, ledger.outstanding)
            issued.add_metric(named, ledger.issued)
            trained.add_metric(named, ledger.trained)
    yield from (step, version, outstanding, issued, trained, problem)


def _queues(experiments: Iterable[Experiment], feeders: PerExperiment[FeederStatus], now: float) -> Iterator[Metric]:
    """Make what is on its way by how many versions it is behind, the last for all that are further."""
    groups = gauge(
        "experiment_queue_groups", "Outstanding groups, by versions behind the current one", "experiment", "lag"
    )
    oldest = gauge("experiment_queue_oldest_seconds", "Since the first of them was issued", "experiment", "lag")
    for experiment in experiments:
        status = feeders.of(experiment)
        counts, ages = Counter[int](), dict[int, float]()
        for each in () if status.ledger is None else status.ledger.by_version:
            lag = min(MOST_LAGS, max(0, experiment.record.policy_version - each.version))
            counts[lag] += each.groups
            if (age := status.issued.age(each.first_group, now)) is not None:
                ages[lag] = max(ages.get(lag, 0.0), age)
        for lag, count in sorted(counts.items()):
            groups.add_metric((experiment.id, str(lag)), count)
            # Unknown where an earlier gateway issued them: 0 would say that they are new.
            if lag in ages:
                oldest.add_metric((experiment.id, str(lag)), ages[lag])
    yield from (groups, oldest)


def _streams(experiments: Iterable[Experiment], measured: PerExperiment[Measurements]) -> Iterator[Metric]:
    """Make what waits in the streams; nothing of an experiment whose data plane did not answer at the last look."""
    groups = gauge(
        "experiment_stream_groups",
        "Groups in a stream that wait or are claimed",
        "experiment",
        "stream",
        "place",
    )
    oldest = gauge(
        "experiment_stream_oldest_seconds",
        "How long the oldest group has been in a stream, 0 if none",
        "experiment",
        "stream",
    )
    seconds = gauge("experiment_redis_seconds", "Round trip of reading the ledger", "experiment")
    for experiment in experiments:
        look = measured.of(experiment).window.last_look
        if look is None or look.ledger is None:
            continue
        for hop in HopName:
            for place, counts in (("waiting", look.ledger.waiting), ("claimed", look.ledger.claimed)):
                groups.add_metric((experiment.id, hop.value, place), getattr(counts, hop.value))
            oldest.add_metric((experiment.id, hop.value), look.oldest_seconds.get(hop, 0.0))
        seconds.add_metric((experiment.id,), look.redis_seconds)
    yield from (groups, oldest, seconds)


def _lags(experiments: Iterable[Experiment], measured: PerExperiment[Measurements]) -> Metric:
    histogram = HistogramMetricFamily(
        "flotilla_experiment_trained_token_lag",
        "Lag in versions of the sampled tokens that were trained",
        labels=("experiment",),
    )
    for experiment in experiments:
        lags = measured.of(experiment).lags
        buckets = [(str(bound), float(count)) for bound, count in lags.cumulative()]
        histogram.add_metric((experiment.id,), [*buckets, ("+Inf", lags.num_tokens)], lags.sum_of_lags)
    return histogram


def _values(experiments: Iterable[Experiment], measured: PerExperiment[Measurements]) -> Metric:
    values = gauge("experiment_value", "A value of the last step, by its name in docs/metrics.md", "experiment", "name")
    for experiment in experiments:
        for name, value in sorted(measured.of(experiment).latest.items()):
            values.add_metric((experiment.id, name), value)
    return values


def _audits(experiments: Iterable[Experiment], measured: PerExperiment[Measurements]) -> Iterator[Metric]:
    """Make what second grades say of the newest audited groups; nothing of an experiment without any."""
    share = gauge("experiment_audit_disagreement", "Share of audited samples whose two grades disagree", "experiment")
    groups = gauge("experiment_audited_groups", "Newest groups that the share is of", "experiment")
    for experiment in experiments:
        config = experiment.spec.reward.audit
        audited = None if config is None else measured.of(experiment).health.audited(config)
        if audited is not None and audited.audited_groups:
            share.add_metric((experiment.id,), audited.audit_disagreement / audited.audited_groups)
            groups.add_metric((experiment.id,), audited.audited_groups)
    yield from (share, groups)


def _speed(experiments: Iterable[Experiment], gateway: GatewayState) -> Iterator[Metric]:
    waited = CounterMetricFamily(
        "flotilla_experiment_admission_wait_seconds",
        "Time in which the budget held the feeder",
        labels=("experiment",),
    )
    for experiment in experiments:
        waited.add_metric((experiment.id,), gateway.feeder_status.of(experiment).wait.total_seconds)
    yield waited
    members = gauge(
        "experiment_publication_member_seconds",
        "What the newest publication took of its members, the median and the slowest",
        "experiment",
        "part",
        "member",
    )
    for experiment in experiments:
        took = gateway.publications.durations.newest(experiment.id).values()
        for part in PARTS:
            if seconds := [parts[part] for parts in took if part in parts]:
                members.add_metric((experiment.id, part, "median"), median(seconds))
                members.add_metric((experiment.id, part, "slowest"), max(seconds))
    yield members
    running = [each for each in experiments if each.state is ExperimentState.RUNNING]
    now = gateway.clock.monotonic()
    found = {each.id: gateway.measurements.of(each).bottleneck(now, each.spec) for each in running}
    bounded = gauge(
        "experiment_bottleneck", "1 for what bounds the speed now, 0 for the others", "experiment", "component"
    )
    for experiment_id, bottleneck in found.items():
        for component in COMPONENTS:
            bounded.add_metric((experiment_id, component), component == bottleneck.component)
    yield bounded
    for name, (short, meaning) in SHARES.items():
        share = gauge(f"experiment_{short}", meaning, "experiment")
        for experiment_id, bottleneck in found.items():
            if (value := bottleneck.evidence.get(name)) is not None:
                share.add_metric((experiment_id,), value)
        yield share
