"""Which ranks record which steps."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flotilla.services.trainer.learning.profiling import profiling
from flotilla.shared.config.sections.profiler import ProfilerConfig
from flotilla.shared.telemetry.profiles import PROFILES


def a_learner(rank: int, directory: Path | None, **section: Any) -> Any:
    config = ProfilerConfig.model_validate(section)
    spec = SimpleNamespace(tracking=SimpleNamespace(profiler=config))
    parts = {"spec": spec, "ranks": SimpleNamespace(rank=rank), "sizes": SimpleNamespace(directory=directory)}
    return cast(Any, SimpleNamespace(**parts))


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
    learner = a_learner(rank, tmp_path, **section)

    for step in (1, 2, 3):
        with profiling(learner, step):
            torch.ones(4, 4) @ torch.ones(4, 4)

    names = sorted(path.name for path in tmp_path.glob(f"{PROFILES}/*"))
    assert names == [f"trainer-step{step:08d}-rank{rank}.json.gz" for step in recorded]
    for step, name in zip(recorded, names, strict=True):
        events = json.loads(gzip.decompress((tmp_path / PROFILES / name).read_bytes()))["traceEvents"]
        assert {each["name"] for each in events if each.get("cat") == "user_annotation"} == {f"step {step}"}
        assert any(each["name"] == "aten::mm" for each in events)


def test_what_keeps_no_files_and_what_cannot_be_written_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / PROFILES).write_text("in the way")
    trained = []
    for directory in (None, tmp_path):
        with profiling(a_learner(0, directory, steps=(1,)), 1):
            trained.append(directory)

    assert trained == [None, tmp_path]
