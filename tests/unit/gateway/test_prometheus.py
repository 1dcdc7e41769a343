"""The page for Prometheus: lags, queues, waits and bottleneck of each experiment, from memory and bounded."""

import re
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway import prometheus
from flotilla.services.gateway.monitoring.bottleneck import COMPONENTS, Look
from flotilla.services.gateway.monitoring.health.measurements import BOUNDS, LagHistogram
from flotilla.services.gateway.prometheus import metrics_of
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.service import ServiceKind
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.ledger import HopCounts, Ledger, Outstanding
from flotilla.shared.telemetry.prometheus import page_of
from tests.prometheus import parse_page, value_of
from tests.unit.gateway.builders import a_gateway, add_experiment, add_service

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def a_look(**changes: Any) -> Look:
    waiting = HopCounts(tasks=3, generated=1)
    ledger = Ledger(issued=4, waiting=waiting, claimed=HopCounts(tasks=2), outstanding=6)
    given: dict[str, Any] = {"ledger": ledger, "redis_seconds": 0.002, "is_publishing": False, "is_evaluating": False}
    return Look(**(given | changes))


async def a_running_gateway(clock: ManualClock | None = None) -> GatewayState:
    gateway = a_gateway(clock=clock or ManualClock())
    experiment = await add_experiment(gateway, 'odd"name\\')
    window = gateway.measurements.of(experiment).window
    for second in range(3):
        look = a_look(oldest_seconds={HopName.TASKS: 4.5 + second})
        window.add_look(gateway.clock.monotonic(), look)
    window.add_step(gateway.clock.monotonic(), {"time/step_seconds": 2.0, "time/wait_seconds": 1.5})
    return gateway


async def test_the_page_tells_queues_and_their_ages_and_what_bounds_the_speed() -> None:
    gateway = await a_running_gateway()
    await add_service(gateway, ServiceKind.REWARD, "reward", None)

    series = parse_page(page_of(metrics_of(gateway)))

    named = {"experiment": 'odd"name\\'}
    assert value_of(series, "flotilla_services", kind="reward") == 1
    assert value_of(series, "flotilla_experiments", state="running") == 1
    assert value_of(series, "flotilla_experiment_stream_groups", stream="tasks", place="waiting", **named) == 3
    assert value_of(series, "flotilla_experiment_stream_groups", stream="tasks", place="claimed", **named) == 2
    assert value_of(series, "flotilla_experiment_stream_oldest_seconds", stream="tasks", **named) == 6.5
    assert value_of(series, "flotilla_experiment_stream_oldest_seconds", stream="scored", **named) == 0
    assert value_of(series, "flotilla_experiment_redis_seconds", **named) == 0.002
    assert value_of(series, "flotilla_experiment_trainer_wait_share", **named) == 0.75
    named_ones = {c: value_of(series, "flotilla_experiment_bottleneck", component=c, **named) for c in COMPONENTS}
    assert named_ones == dict.fromkeys(COMPONENTS, 0) | {"generation": 1}


async def test_of_a_data_plane_that_is_away_no_old_queues_are_told() -> None:
    gateway = await a_running_gateway()
    (experiment,) = gateway.repository
    window = gateway.measurements.of(experiment).window
    window.add_look(gateway.clock.monotonic(), a_look(ledger=None, redis_seconds=5.0))

    series = parse_page(page_of(metrics_of(gateway)))

    assert not [name for name, _ in series if "stream" in name]
    assert [name for name, _ in series if "bottleneck" in name]


async def test_an_experiment_that_is_over_has_no_series() -> None:
    gateway = await a_running_gateway()
    await add_experiment(gateway, "over", state=ExperimentState.COMPLETED)

    assert "over" not in page_of(metrics_of(gateway))


async def test_every_metric_of_the_page_is_documented() -> None:
    written = {
        line.split(" ")[2] for line in page_of(metrics_of(await a_running_gateway())).splitlines() if "# TYPE" in line
    }

    listed = set(re.findall(r"`(flotilla_[a-z_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert written == listed


async def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_EXPERIMENTS", 2)
    gateway = await a_running_gateway()
    (running,) = gateway.repository
    gateway.measurements.of(running).lags.add_step(1, {f"lag/tokens/{lag}": 1.0 for lag in range(1000)})
    one = len(parse_page(page_of(metrics_of(gateway))))
    for number in range(5):
        await add_experiment(gateway, f"waiting-{number}", state=ExperimentState.STARTING)

    series = parse_page(page_of(metrics_of(gateway)))

    assert one < 60
    assert value_of(series, "flotilla_experiments_left_out") == 4
    assert {value for _, labels in series for label, value in labels if label == "experiment"} == {
        'odd"name\\',
        "waiting-0",
    }


async def test_the_wait_for_admission_only_grows() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    for version, now in ((0, 1.0), (0, 3.0), (1, 6.5)):
        gateway.feeder_status.of(experiment).wait.look(version, now)
        gateway.feeder_status.of(experiment).wait.hold(now)

    series = parse_page(page_of(metrics_of(gateway)))

    assert value_of(series, "flotilla_experiment_admission_wait_seconds_total", experiment="tiny-1") == 5.5


async def test_lags_are_a_histogram_over_all_steps() -> None:
    gateway = a_gateway()
    experiment = await add_experiment(gateway)
    gateway.measurements.of(experiment).lags.add_step(1, {"lag/tokens/0": 10.0, "lag/tokens/1": 5.0, "lag/mean": 0.3})
    gateway.measurements.of(experiment).lags.add_step(2, {"lag/tokens/5": 2.0, "lag/tokens/99": 1.0})
    gateway.measurements.of(experiment).lags.add_step(2, {"lag/tokens/5": 2.0})

    series = parse_page(page_of(metrics_of(gateway)))

    def at_most(bound: str) -> float | None:
        return value_of(series, "flotilla_experiment_trained_token_lag_bucket", experiment="tiny-1", le=bound)

    assert [at_most(bound) for bound in ("0", "1", "4", "6", "32", "+Inf")] == [10, 15, 15, 17, 17, 18]
    assert value_of(series, "flotilla_experiment_trained_token_lag_count", experiment="tiny-1") == 18
    assert value_of(series, "flotilla_experiment_trained_token_lag_sum", experiment="tiny-1") == 5 + 10 + 99


def test_a_step_without_lags_or_with_names_that_are_none_changes_nothing() -> None:
    lags = LagHistogram()
    lags.add_step(1, {"loss": 1.0})
    lags.add_step(1, {"lag/tokens/many": 3.0, "lag/tokens/0": 1.0})

    assert lags.cumulative() == [(bound, 1) for bound in BOUNDS]


async def test_what_is_on_its_way_is_counted_by_how_far_its_version_is_behind() -> None:
    clock = ManualClock()
    gateway = await a_running_gateway(clock)
    (experiment,) = list(gateway.repository)
    behind = (Outstanding(version=0, groups=3, first_group=10), Outstanding(version=2, groups=5, first_group=20))
    async with gateway.store.transaction() as change:
        gateway.repository.stage(change, experiment, policy_version=2)
    status = gateway.feeder_status.of(experiment)
    status.ledger = Ledger(issued=8, outstanding=8, by_version=behind)
    status.issued.add(8, clock.monotonic())
    clock.advance(4.0)
    status.issued.add(16, clock.monotonic())
    clock.advance(1.5)

    series = parse_page(page_of(metrics_of(gateway)))

    for lag, groups, seconds in (("2", 3, 5.5), ("0", 5, 1.5)):
        assert value_of(series, "flotilla_experiment_queue_groups", lag=lag, experiment=experiment.id) == groups
        assert (
            value_of(series, "flotilla_experiment_queue_oldest_seconds", lag=lag, experiment=experiment.id) == seconds
        )
    assert status.issued.age(7, clock.monotonic()) is None


async def test_an_age_that_is_not_known_is_left_out_and_never_0() -> None:
    gateway = await a_running_gateway()
    (experiment,) = list(gateway.repository)
    status = gateway.feeder_status.of(experiment)
    before_the_restart = (Outstanding(version=0, groups=3, first_group=10),)
    status.ledger = Ledger(issued=8, outstanding=3, by_version=before_the_restart)

    series = parse_page(page_of(metrics_of(gateway)))

    assert value_of(series, "flotilla_experiment_queue_groups", lag="0", experiment=experiment.id) == 3
    assert not [name for name, _ in series if name == "flotilla_experiment_queue_oldest_seconds"]
