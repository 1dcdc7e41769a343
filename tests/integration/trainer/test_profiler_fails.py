"""A profiler that fails at each chosen step: training ends all the same, and the session's owner is told."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.shared.schemas.service import Failure
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from tests.integration.trainer.fleet import YesGateway, a_spec, save_tiny_model, train


async def test_training_ends_beside_a_profiler_that_fails_and_its_owner_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_profiler: Any) -> None:
        raise RuntimeError("the profiler is in use")

    monkeypatch.setattr(torch.profiler.profile, "start", breaks)
    spec = a_spec(
        save_tiny_model(tmp_path / "model"), optimisation={"steps": 3}, tracking={"profiler": {"steps": [1, 2]}}
    )
    told: list[Failure | None] = []

    plane = MemoryDataPlane()
    assert await train(spec, tmp_path / "e", plane, YesGateway(plane), on_profile_failure=told.append)

    problems = [each for each in told if each is not None]
    assert [(each.component, each.fatal, each.cause.partition(":")[0]) for each in problems] == [
        ("profiler", False, "step 1"),
        ("profiler", False, "step 2"),
    ]
    assert told[-1] is None, "the third step is not chosen: there is no problem any more"
