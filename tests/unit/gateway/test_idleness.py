"""A version's idle ratio, from what rollouts report when they switch."""

import json
from typing import Any

import pytest

from flotilla.services.gateway.monitoring.idleness import Idleness, IdleRatios
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.shared.clock import ManualClock
from flotilla.shared.schemas.service import ObservedState, WorkState
from tests.unit.gateway.builders import a_gateway, add_experiment

RATIO = "rollouter/idle_ratio"


def load(busy: float, idle: float) -> dict[str, float]:
    return {"busy_seconds": busy, "idle_seconds": idle}


def test_a_versions_ratio_is_over_all_rollouts_by_their_time() -> None:
    idleness = Idleness()
    assert idleness.record("a", 0, load(1, 1)) is None
    assert idleness.record("b", 0, load(5, 0)) is None
    assert idleness.record("a", 0, load(2, 2)) is None
    assert idleness.record("a", 1, load(4, 2)) == (0, {RATIO: pytest.approx(1 / 4)})
    assert idleness.record("b", 1, load(5, 4)) == (0, {RATIO: pytest.approx(5 / 8)})
    assert idleness.record("a", 2, load(5, 4)) == (1, {RATIO: pytest.approx(2 / 3)})


def test_another_life_of_a_rollout_begins_anew() -> None:
    idleness = Idleness()
    idleness.record("a", 3, load(9, 9))
    assert idleness.record("a", 4, load(0.5, 0.5)) is None
    assert idleness.record("a", None, load(1, 1)) is None
    assert idleness.record("a", -1, load(1, 1)) is None
    assert idleness.record("a", 4, {}) is None
    assert idleness.record("a", 5, load(1.5, 0.5)) == (4, {RATIO: 0.0})


def test_the_next_gateway_goes_on_with_what_rollouts_had_reported() -> None:
    killed = Idleness()
    killed.record("a", 0, load(1, 1))
    killed.record("b", 0, load(5, 0))
    killed.record("a", 1, load(4, 2))

    idleness = Idleness()
    idleness.restore(json.loads(json.dumps(killed.to_window())))

    assert idleness.record("b", 1, load(5, 4)) == (0, {RATIO: pytest.approx(5 / 8)})
    assert idleness.record("a", 2, load(5, 4)) == (1, {RATIO: pytest.approx(2 / 3)})


def test_a_versions_cores_are_processor_time_over_busy_time_of_all_rollouts() -> None:
    idleness = Idleness()

    def report(service: str, version: int, busy: float, idle: float, cpu: float) -> Any:
        return idleness.record(service, version, load(busy, idle) | {"cpu_seconds": cpu})

    report("a", 0, 1, 1, 10)
    report("b", 0, 5, 0, 20)
    assert report("a", 1, 4, 2, 16) == (0, {RATIO: 0.25, "rollouter/cores": 2.0})
    (version, found) = report("b", 1, 6, 3, 22)
    assert (version, found["rollouter/cores"]) == (0, 2.0)
    (version, found) = report("a", 2, 6, 2, 1)
    assert (version, found["rollouter/cores"]) == (1, 0.5), "its engine began again meanwhile"


async def test_a_killed_gateway_takes_no_versions_idle_ratio_with_it() -> None:
    store, clock = MemoryStore(), ManualClock()
    experiment = await add_experiment(a_gateway(store, clock))

    async def report(ratios: IdleRatios, version: int, busy: float, idle: float) -> None:
        observed = ObservedState(state=WorkState.RUNNING, policy_version=version, load=load(busy, idle))
        await ratios.record(experiment, "a", observed)

    await report(IdleRatios(store, clock), 0, 1, 1)
    after = IdleRatios(store, clock)
    await report(after, 0, 2, 2)
    await report(after, 1, 4, 2)

    [(_, point)] = await store.metrics(experiment.id, names=[], after=0, limit=9)
    assert (point.name, point.version, point.value) == ("rollouter/idle_ratio", 0, 0.25)
