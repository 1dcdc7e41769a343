"""A step's figures are as durable as the checkpoint that contains the step."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.trainer.checkpoint.manager import Progress
from flotilla.services.trainer.data.plan import StepGroups
from flotilla.services.trainer.learning.learner import StepResult
from flotilla.services.trainer.models.optimizer import UpdateResult
from flotilla.services.trainer.worker.control import RunControl
from flotilla.services.trainer.worker.loop import TrainingLoop
from flotilla.services.trainer.worker.reporter import Reporter
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.streams.plans import Plan
from tests.unit.gateway.builders import running
from tests.unit.trainer.builders import a_group
from tests.unit.trainer.test_reporter import Gateway


class KilledAfterTheCheckpoint:
    """A checkpoint policy whose worker is killed when the checkpoint of a step is durable."""

    def __init__(self, at: int, line: VersionLine) -> None:
        self.progress, self.line = Progress.start(), line
        self._at = at

    async def after_step(self, is_stopped: Callable[[], bool], values: Mapping[str, float]) -> None:
        if self.progress.step == self._at:
            raise KeyboardInterrupt

    def take_figures(self) -> dict[str, float]:
        return {"checkpoint/early": 0.0}


class Planner:
    live = SimpleNamespace(trained_with=lambda _version: ())
    max_lag = 1
    has_own_groups = True

    def aged_from(self, version: int) -> tuple[int, Callable[[int, int], int]]:
        return version, lambda trained, sampled: trained - sampled

    async def spec_of(self, _step: int) -> Any:
        return Learner.spec

    async def groups_of(self, step: int, *_: Any) -> StepGroups:
        plan = Plan(step, step - 1, (step,), (), 0, 0, 3, (3,))
        return StepGroups(plan, (a_group([1.0, 0.0], 1),), False, wait_seconds=0.0, pace_seconds=0.0)


class Learner:
    spec = SimpleNamespace(
        optimisation=SimpleNamespace(steps=3),
        asynchrony=SimpleNamespace(resolved_max_lag=1),
        groups_per_step=1,
        finished_job=None,
    )

    def train(self, _groups: Any, step: int) -> StepResult:
        update = UpdateResult(grad_norm=1.0, learning_rate=0.1, is_applied=True)
        return StepResult((update,), {"loss/total": float(step)})

    def keep_version(self, *_: Any) -> None:
        pass


class Samples:
    def trained(self, *_: Any) -> None:
        pass

    def figures(self) -> dict[str, float]:
        return {}


class Publisher:
    is_idle, last_seconds = True, 0.0

    async def settled(self) -> None:
        pass

    async def publish(self, *_: Any) -> None:
        pass


async def test_a_worker_killed_after_a_checkpoint_loses_no_figures_of_its_step(tmp_path: Path) -> None:
    unsent = tmp_path / "unsent.jsonl"
    gateway = Gateway(is_there=True)
    killed = Reporter(gateway, "e", unsent)
    line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=3)
    control = RunControl(on_state=lambda _: None)
    control.resume()
    with ThreadPoolExecutor(1) as compute:
        loop = TrainingLoop(
            cast(Any, Learner()),
            cast(Any, Planner()),
            cast(Any, Publisher()),
            cast(Any, KilledAfterTheCheckpoint(at=2, line=line)),
            killed,
            control,
            compute,
            cast(Any, Samples()),
        )
        async with running(killed.run()):
            # Not an Exception: nothing in the worker handles a kill.
            with pytest.raises(KeyboardInterrupt):
                await loop.run()
            assert await killed.flush(2.0)

    assert gateway.steps == [1]
    reporter = Reporter(gateway, "e", unsent)
    reporter.resend(2)
    async with running(reporter.run()):
        assert await reporter.flush(2.0)

    assert gateway.steps == [1, 2]
    assert gateway.values["loss/total"] == 2.0
    assert "time/compute_seconds" in gateway.values
    # Not known when it was written, and so not told.
    assert "time/checkpoint_seconds" not in gateway.values
