"""What a tracker gets, when, and what becomes of one that fails."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.preflight import checks
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.store.writes import PointRecord
from flotilla.services.gateway.tracking import exporter as exporting
from flotilla.services.gateway.tracking.base import Record, TrackedRun, Tracker
from flotilla.services.gateway.tracking.exporter import Exporter, records_of
from flotilla.services.gateway.tracking.memory import MemoryTracker
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec, running, until

RUN = TrackedRun("tiny-1", "tiny", Path("/nowhere"), {})


class Failing(MemoryTracker):
    """Refuses while it is asked to, after it wrote the first record of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.is_failing = True

    def write(self, records: Sequence[Record]) -> None:
        if self.is_failing:
            super().write(records[:1])
            raise OSError("no space left")
        super().write(records)


def points(step: int, at: str = "2026-01-01T00:00:00Z", **values: float) -> list[PointRecord]:
    return [PointRecord(name=name, step=step, version=step, value=value, at=at) for name, value in values.items()]


def an_exporter(tracker: Tracker, store: MemoryStore) -> Exporter:
    return Exporter("twin", RUN, store, EventLog(store, ManualClock()), lambda: tracker)


async def reported(store: MemoryStore) -> list[tuple[str, Any]]:
    return [(event.type, event.data.get("cause")) for event in await store.events("tiny-1", after=0, limit=99)]


async def test_every_value_arrives_once_also_at_the_next_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "PAGE", 3)
    store, tracker = MemoryStore(), MemoryTracker()
    for step in range(1, 6):
        await store.put_metrics("tiny-1", points(step, a=step, b=-step))
    await store.put_metrics("other", points(9, a=9))
    first = an_exporter(tracker, store)
    await first.export()
    await store.put_metrics("tiny-1", points(6, a=6, b=-6))

    second = an_exporter(tracker, store)
    await second.export()
    await second.finish()

    assert [(record.step, dict(record.values)) for record in tracker.records] == [
        (step, {"a": step, "b": -step}) for step in range(1, 7)
    ]
    assert tracker.is_closed
    await first.finish()


async def test_a_step_that_is_trained_again_is_sent_again() -> None:
    store, tracker = MemoryStore(), MemoryTracker()
    exporter = an_exporter(tracker, store)
    await store.put_metrics("tiny-1", points(1, loss=1.0))
    await exporter.export()

    await store.put_metrics("tiny-1", points(1, loss=0.5))
    await exporter.finish()

    assert [record.values["loss"] for record in tracker.records] == [1.0, 0.5]


async def test_a_failing_tracker_is_named_once_tried_again_and_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporting, "PERIOD_SECONDS", 0.001)
    store, tracker = MemoryStore(), Failing()
    for step in (1, 2, 3):
        await store.put_metrics("tiny-1", points(step, loss=1 / step))
    exporter = an_exporter(tracker, store)
    async with running(exporter.run()):
        await until(lambda: len(tracker.records) >= 2)
        assert await reported(store) == [("tracker_failed", "OSError('no space left')")]

        tracker.is_failing = False
        await until(lambda: len(tracker.records) == 3)
        await until(lambda: exporter._num_failures == 0)

    assert [record.step for record in tracker.records] == [1, 2, 3]
    assert [kind for kind, _ in await reported(store)] == ["tracker_failed", "tracker_recovered"]
    await exporter.finish()


async def test_a_tracker_that_never_answers_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "FINISH_SECONDS", 0.02)
    store, release = MemoryStore(), threading.Event()
    await store.put_metrics("tiny-1", points(1, loss=1.0))

    def open_tracker() -> Tracker:
        release.wait(5)
        raise OSError("gave up")

    exporter = Exporter("twin", RUN, store, EventLog(store, ManualClock()), open_tracker)
    try:
        async with asyncio.timeout(1):
            await exporter.finish()
    finally:
        release.set()

    [(kind, cause)] = await reported(store)
    assert kind == "tracker_failed" and "took longer than" in cause


def test_values_that_were_stored_together_make_one_record() -> None:
    rows = list(enumerate([*points(1, a=1, b=2), *points(1, "2026-01-01T00:00:01Z", c=3), *points(2, a=4)], start=5))

    records = records_of(rows)

    assert [(r.cursor, r.step, dict(r.values)) for r in records] == [
        (6, 1, {"a": 1, "b": 2}),
        (7, 1, {"c": 3}),
        (8, 2, {"a": 4}),
    ]
    assert records_of(rows, is_cut=True) == records[:-1]
    assert len(records_of(rows[:1], is_cut=True)) == 1


def test_a_tracker_whose_package_is_missing_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(InvalidSpec) as caught:
        checks.check_trackers(a_spec(tracking={"trackers": [{"kind": "jsonl"}, {"kind": "wandb"}]}))

    assert [entry["path"] for entry in caught.value.errors] == ["tracking.trackers.1.kind"]
    assert "pip install 'flotilla[wandb]'" in str(caught.value)


def test_a_tracker_writes_to_no_relative_place() -> None:
    spec = a_spec(tracking={"trackers": [{"kind": "tensorboard", "directory": "logs"}]})

    with pytest.raises(InvalidSpec, match=r"tracking\.trackers\.0\.directory: an absolute path"):
        checks.check_paths(spec)
