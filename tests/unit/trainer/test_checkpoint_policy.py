"""A disk without room for a checkpoint is waited for, however long that takes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.trainer.checkpoint.manager import Progress
from flotilla.services.trainer.worker import checkpoint_policy
from flotilla.services.trainer.worker.checkpoint_policy import (
    LAST_ATTEMPTS,
    CheckpointOverdue,
    CheckpointPolicy,
    CheckpointWriter,
)
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.sections.checkpoint import BestCheckpointsConfig, CheckpointConfig
from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.service import Failure


class Disk:
    """The manager of checkpoints: has no room for some attempts."""

    def __init__(self, full_for: int, on_attempt: Callable[[int], None] = lambda _: None) -> None:
        self.attempts, self._full_for, self._on_attempt = 0, full_for, on_attempt
        self.figures: list[float | None] = []

    def save(self, *arguments: Any) -> Path:
        self.attempts += 1
        self.figures.append(arguments[-1])
        self._on_attempt(self.attempts)
        if self.attempts <= self._full_for:
            raise Unavailable("no space left")
        return Path("step")


class Queue:
    async def retained(self) -> Any:
        return SimpleNamespace(size_bytes=0, planned=0, entries=0, is_crowded_by=lambda _: False)

    async def record(self, _: Any) -> None:
        pass


class Source:
    async def commit(self, *_: Any) -> None:
        pass


class Around:
    """A policy at step 4 of every second step: its checkpoint is a whole interval late."""

    def __init__(self, disk: Disk, monkeypatch: pytest.MonkeyPatch, **checkpoint: Any) -> None:
        monkeypatch.setattr(checkpoint_policy, "PAUSE_SECONDS", 0.001)
        self.failures: list[Failure | None] = []
        progress = Progress.start()
        learner = SimpleNamespace(spec=SimpleNamespace(groups_per_step=1))
        reporter = SimpleNamespace(sync=lambda: None, checkpoint=lambda _: None)
        self._compute = ThreadPoolExecutor(1)
        line = VersionLine.of([INITIAL], steps_per_version=1, total_steps=9)
        state = cast(Any, learner), progress, line
        around = cast(Any, Source()), cast(Any, reporter), self._compute, self.failures.append
        writer = CheckpointWriter(cast(Any, disk), *state, *around)
        self.policy = CheckpointPolicy(
            CheckpointConfig(every_steps=2, asynchronous=False, **checkpoint), writer, *state, cast(Any, Queue())
        )
        progress.step = 4

    def close(self) -> None:
        self._compute.shutdown()


async def test_training_waits_for_room_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(full_for=5)
    around = Around(disk, monkeypatch)

    await asyncio.wait_for(around.policy.after_step(lambda: False, {}), 20)

    assert disk.attempts == 6
    # Named as long as it lasts, never fatal, and withdrawn.
    assert around.failures[-1] is None
    assert all(failure is not None and not failure.fatal for failure in around.failures[:-1])
    around.close()


async def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = False

    def stop(attempt: int) -> None:
        nonlocal stopped
        stopped = attempt == 3

    disk = Disk(full_for=1000, on_attempt=stop)
    around = Around(disk, monkeypatch)

    await asyncio.wait_for(around.policy.after_step(lambda: stopped, {}), 20)
    assert disk.attempts == 3

    with pytest.raises(CheckpointOverdue):
        await asyncio.wait_for(
            around.policy.at_the_end(is_over=True, is_stopped=lambda: True, publisher=cast(Any, None)), 20
        )
    assert disk.attempts == 3 + LAST_ATTEMPTS
    around.close()


async def test_training_that_has_ended_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(full_for=2 * LAST_ATTEMPTS)
    around = Around(disk, monkeypatch)

    await asyncio.wait_for(
        around.policy.at_the_end(is_over=False, is_stopped=lambda: False, publisher=cast(Any, None)), 20
    )

    assert disk.attempts == 2 * LAST_ATTEMPTS + 1
    around.close()


async def test_a_checkpoint_has_the_mean_of_the_figure_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(full_for=1)
    around = Around(disk, monkeypatch, best=BestCheckpointsConfig(metric="reward/mean"))
    around.policy.progress.step = 0

    for step, value in enumerate((0.1, 0.3, 0.5, 0.7, 0.9, 1.0), start=1):
        around.policy.progress.step = step
        await around.policy.after_step(lambda: False, {"reward/mean": value, "loss/total": 9.0})

    # The first attempt failed after two steps: its figures count towards the next.
    assert disk.figures == pytest.approx([0.2, 0.3, 0.8])
    around.close()
