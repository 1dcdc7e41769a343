"""What the engine records is written beside its steps, under a name of its own."""

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flotilla.services.rollout.engines.embedded import profiling
from flotilla.services.rollout.engines.embedded.profiling import EngineProfiler
from flotilla.shared.config.sections.tracking import ProfilerConfig


@pytest.fixture
def any_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows have all their steps, however long a busy processor takes to end them."""
    monkeypatch.setattr(profiling, "MOST_PAUSE_SECONDS", 1000.0)


def step(profiler: EngineProfiler, version: int) -> None:
    with profiler.step(version):
        torch.ones(4, 4) @ torch.ones(4, 4)


@pytest.mark.usefixtures("any_pause")
def test_the_engine_goes_on_while_a_trace_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, writers = threading.Event(), []
    write_trace = profiling.write_trace

    def held(*arguments: Any) -> Path:
        writers.append(threading.current_thread())
        may_write.wait()
        return write_trace(*arguments)

    monkeypatch.setattr(profiling, "write_trace", held)
    profiler = EngineProfiler()
    profiler.choose(tmp_path, frozenset({1, 2}), 2, "rollout-a")
    try:
        # Where a step waited for a trace, this would not end but by the limit of the test.
        for version in (1, 1, 1, 2, 2, 2):
            step(profiler, version)
        assert not list(tmp_path.iterdir())
    finally:
        may_write.set()
        profiler.close()

    assert threading.current_thread() not in writers
    found = sorted(tmp_path.iterdir())
    assert [path.name.split("-process")[0] for path in found] == ["engine-version00000001", "engine-version00000002"]
    for version, path in enumerate(found, 1):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        steps = [each["name"] for each in events if each.get("cat") == "user_annotation"]
        assert steps == [f"engine step, version {version}"] * 2


def test_processes_of_one_number_in_two_services_write_two_traces(tmp_path: Path) -> None:
    for service_id in ("rollout-a", "rollout-b"):
        profiler = EngineProfiler()
        profiler.choose(tmp_path, frozenset({0}), 1, service_id)
        step(profiler, 0)
        profiler.close()

    assert len(list(tmp_path.iterdir())) == 2


def test_a_window_ends_where_to_end_it_would_hold_the_engine_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: dict[int, float] = {}

    class Profile:
        """torch's, of which each step takes 0.2 s to be ended."""

        def __init__(self, **_given: Any) -> None:
            self.before = len(ran)

        def start(self) -> None: ...

        def stop(self) -> None:
            pauses[len(ran) - self.before] = 0.2 * (len(ran) - self.before)

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"steps": max(pauses)}))

    ran: list[int] = []
    monkeypatch.setattr(profiling, "profile", Profile)
    monkeypatch.setattr(profiling.time, "thread_time", lambda: sum(pauses.values()))
    profiler = EngineProfiler()
    profiler.choose(tmp_path, frozenset({1}), 32, "rollout-a")
    for number in range(40):
        with profiler.step(1):
            ran.append(number)
    profiler.close()

    assert pauses == {1: 0.2, 2: 0.4}, "a step that shows what it takes, then as many as fit"
    (path,) = tmp_path.iterdir()
    assert json.loads(gzip.decompress(path.read_bytes())) == {"steps": 2}


def steps_of(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [each["name"] for each in events if each.get("cat") == "user_annotation"]


@pytest.mark.usefixtures("any_pause")
def test_a_version_that_changes_or_fails_in_its_trial_step_is_recorded_once_it_goes_on(tmp_path: Path) -> None:
    profiler = EngineProfiler()
    profiler.choose(tmp_path, frozenset({1}), 2, "rollout-a")
    with pytest.raises(RuntimeError), profiler.step(1):
        raise RuntimeError("of the engine")
    step(profiler, 2)
    assert not list(tmp_path.iterdir())
    step(profiler, 1)  # tried
    step(profiler, 2)
    for _ in range(2):
        step(profiler, 1)
    profiler.close()

    (path,) = tmp_path.iterdir()
    assert steps_of(path) == ["engine step, version 1"] * 2


def test_a_window_is_bounded() -> None:
    assert ProfilerConfig(engine_steps=128).engine_steps == 128
    with pytest.raises(ValidationError, match="128"):
        ProfilerConfig(engine_steps=129)
