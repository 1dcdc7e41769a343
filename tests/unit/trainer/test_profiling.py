"""Which ranks record which steps."""

import gzip
import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flotilla.services.rollout.engines.embedded.profiling import EngineProfiler
from flotilla.services.trainer.learning import profiling as module
from flotilla.services.trainer.learning.profiling import TraceWriter, profiling
from flotilla.shared.config.sections.tracking import ProfilerConfig
from flotilla.shared.telemetry.profiles import PROFILES


def a_learner(rank: int, directory: Path | None, **section: Any) -> Any:
    config = ProfilerConfig.model_validate(section)
    spec = SimpleNamespace(tracking=SimpleNamespace(profiler=config))
    parts = {"spec": spec, "ranks": SimpleNamespace(rank=rank), "sizes": SimpleNamespace(directory=directory)}
    return cast(Any, SimpleNamespace(**parts, told=(told := list[str | None]()), on_profile_failure=told.append))


@pytest.mark.parametrize(
    ("rank", "section", "recorded"),
    [
        (0, {"steps": (2,)}, [2]),
        (1, {"steps": (2,)}, []),
        (1, {"steps": (1, 3), "ranks": (1,)}, [1, 3]),
        (5, {"steps": (3,), "ranks": None}, [3]),
        (0, {}, []),
    ],
)
def test_a_rank_records_the_steps_that_are_chosen_for_it(
    tmp_path: Path, rank: int, section: dict[str, Any], recorded: list[int]
) -> None:
    learner, traces = a_learner(rank, tmp_path, **section), TraceWriter()

    for step in (1, 2, 3):
        with profiling(learner, traces, step):
            torch.ones(4, 4) @ torch.ones(4, 4)
    traces.wait()

    names = sorted(path.name for path in tmp_path.glob(f"{PROFILES}/*"))
    assert names == [f"trainer-step{step:08d}-rank{rank}.json.gz" for step in recorded]
    for step, name in zip(recorded, names, strict=True):
        events = json.loads(gzip.decompress((tmp_path / PROFILES / name).read_bytes()))["traceEvents"]
        assert {each["name"] for each in events if each.get("cat") == "user_annotation"} == {f"step {step}"}
        assert any(each["name"] == "aten::mm" for each in events)


def test_a_trace_is_written_beside_the_next_step_and_the_one_after_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, writers, write_trace = threading.Event(), list[threading.Thread](), module.write_trace

    def held(*arguments: Any) -> Path:
        writers.append(threading.current_thread())
        may_write.wait()
        return write_trace(*arguments)

    monkeypatch.setattr(module, "write_trace", held)
    learner, traces, seen = a_learner(0, tmp_path, steps=(1, 3)), TraceWriter(), list[int]()
    try:
        for step in (1, 2):
            with profiling(learner, traces, step):
                seen.append(len(list(tmp_path.glob("*/*"))))
        assert seen == [0, 0]
    finally:
        threading.Timer(0.2, may_write.set).start()

    with profiling(learner, traces, 3):
        pass
    assert may_write.is_set(), "no more than one is kept in memory"
    traces.wait()

    assert threading.current_thread() not in writers
    assert len(list(tmp_path.glob("*/*"))) == 2


def test_what_keeps_no_files_and_what_cannot_be_written_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / PROFILES).write_text("in the way")
    trained = []
    for directory in (None, tmp_path):
        with profiling(a_learner(0, directory, steps=(1,)), traces := TraceWriter(), 1):
            trained.append(directory)
        traces.wait()

    assert trained == [None, tmp_path]


def breaks(*_: object, **__: object) -> None:
    raise RuntimeError("the profiler is in use")


@pytest.mark.parametrize("broken", ["__init__", "start", "stop", "export_chrome_trace"])
def test_an_error_of_the_profiler_is_told_and_the_step_is_trained_all_the_same(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, trained, traces = a_learner(0, tmp_path, steps=(1, 3)), list[int](), TraceWriter()
    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, broken, breaks)
        with profiling(learner, traces, 1):
            trained.append(1)
        traces.wait()
    (problem,) = learner.told
    for step in (2, 3):
        with profiling(learner, traces, step):
            trained.append(step)
    traces.wait()

    assert trained == [1, 2, 3]
    assert problem.startswith("step 1: ") and "the profiler is in use" in problem
    assert learner.told == [problem, None, None]
    assert [path.name for path in tmp_path.glob(f"{PROFILES}/*")] == ["trainer-step00000003-rank0.json.gz"]


def test_an_error_of_the_step_is_raised_whatever_the_profiler_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler.profile, "stop", breaks)
    with (
        pytest.raises(ValueError, match="of the step"),
        profiling(a_learner(0, tmp_path, steps=(1,)), TraceWriter(), 1),
    ):
        raise ValueError("of the step")


@pytest.mark.parametrize("broken", ["__init__", "start", "stop", "export_chrome_trace"])
def test_an_engine_goes_on_without_a_profile_and_tries_it_once(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    profiler, steps = EngineProfiler(), list[int]()
    profiler.choose(tmp_path, frozenset({4, 5}), 2, "rollout-a")

    def warned() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelname == "WARNING"]

    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, broken, breaks)
        for _ in range(4):
            with profiler.step(4):
                steps.append(4)
        # Traces are written on another thread.
        end = time.monotonic() + 200
        while not warned() and time.monotonic() < end:
            time.sleep(0.005)
    for _ in range(2):
        with profiler.step(5):
            steps.append(5)
    profiler.close()

    assert steps == [4] * 4 + [5] * 2
    assert len(warned()) == 1 and "the profiler is in use" in str(vars(warned()[0])["error"])
    assert [path.name.partition("-process")[0] for path in tmp_path.iterdir()] == ["engine-version00000005"]
