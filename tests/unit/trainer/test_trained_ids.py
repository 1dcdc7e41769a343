"""What a checkpoint says of trained groups is bounded by those that may still come, however many were filtered."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flotilla.services.trainer.checkpoint.manager import Progress
from flotilla.services.trainer.worker.checkpoint_policy import MOST_INTERVALS, CheckpointPolicy, CheckpointWriter
from flotilla.shared.checkpoints.folders import CheckpointState
from flotilla.shared.checkpoints.lineage import INITIAL, VersionLine
from flotilla.shared.config.sections.checkpoint import CheckpointConfig
from flotilla.shared.errors import Unavailable
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.plans import RECENT_STEPS, Plan
from tests.unit.trainer.test_storage import a_state

SIZE, AHEAD, EVERY_STEPS = 64, 512, 10
"""Groups of a step, ids that are issued ahead of what is trained, and steps between two checkpoints."""


class Run:
    """Trains every other group or so, and makes checkpoints; the data plane knows what is open."""

    def __init__(self, source: str | None = None) -> None:
        self.progress = Progress.start()
        self.exactly = set[int]()
        self.is_absent, self.noted = False, 0
        self.closed: list[int] = []
        self._random, self._next, self._open = random.Random(1), 0, list[int]()
        learner = SimpleNamespace(
            spec=SimpleNamespace(groups_per_step=SIZE, data=SimpleNamespace(subscribes_to=source))
        )
        state = cast(Any, learner), self.progress, VersionLine.of([INITIAL], steps_per_version=1, total_steps=10**6)
        around = cast(Any, SimpleNamespace(close=self.closed.append, commit=self._nothing)), cast(Any, None)
        writer = CheckpointWriter(cast(Any, None), *state, *around, cast(Any, None), lambda _: None)
        self.policy = CheckpointPolicy(CheckpointConfig(every_steps=EVERY_STEPS), writer, *state, cast(Any, self))

    async def lowest_open(self, *, are_taken: bool = False) -> int:
        """As the queue says it."""
        if self.is_absent:
            raise Unavailable("Redis is absent")
        lowest = self._open[0] if self._open else self._next
        return min(lowest, self.noted) if are_taken else lowest

    async def record(self, _: Any) -> None:
        """As the queue does."""

    async def _nothing(self, *_: Any) -> None:
        pass

    def step(self) -> None:
        """Train the oldest groups that are not filtered, some of them late."""
        chosen = list[int]()
        while len(chosen) < SIZE:
            while len(self._open) < AHEAD:
                self._open.append(self._next)
                self._next += 1
            group_id = self._open.pop(0 if self._random.random() < 0.9 else self._random.randrange(AHEAD))
            if self._random.random() < 0.5:
                chosen.append(group_id)
        self.exactly.update(chosen)
        number = self.progress.step + 1
        self.progress.add(Plan(number, number - 1, tuple(chosen), (), 0, 0, SIZE, (1,) * SIZE))

    async def until(self, step: int) -> list[CheckpointState]:
        """Train on, and list what the checkpoints say."""
        states = []
        while self.progress.step < step:
            self.step()
            if self.progress.step % EVERY_STEPS == 0:
                await self.policy._close_ended()
                states.append(self.state())
        return states

    def state(self) -> CheckpointState:
        progress = self.progress
        return a_state(progress.step, trained=progress.trained.to_list(), closed=progress.closed)

    def may_come(self) -> set[int]:
        return {*self._open, *range(self._next, self._next + AHEAD)}


async def test_the_list_stays_as_short_as_what_is_outstanding_and_loses_nothing_of_it() -> None:
    run = Run()

    states = await run.until(500)

    assert run._next > 60_000
    assert max(len(state.trained) for state in states) < 2 * MOST_INTERVALS + (2 * RECENT_STEPS + AHEAD // SIZE) * SIZE
    assert len(states[-1].to_text()) < 300_000
    assert all(group_id not in run.progress.trained for group_id in run.may_come())
    assert run.exactly <= set(run.progress.trained)
    assert states[-1].num_trained == len(run.exactly)
    assert run.closed == sorted(run.closed)
    assert states[-1].closed is not None and run.closed[-1] == states[-1].closed.below
    known = {each for each in run.progress.trained if each >= run.closed[-1]}
    assert known == {each for each in run.exactly if each >= run.closed[-1]}, "what came lately is known exactly"


async def test_what_a_server_may_have_forgotten_is_not_closed() -> None:
    run = Run()
    opened: dict[int, int] = {}
    while run.progress.step < 400:
        run.step()
        opened[run.progress.step] = await run.lowest_open()
        if run.progress.step % EVERY_STEPS == 0:
            await run.policy._close_ended()
            before = opened.get(run.progress.step - RECENT_STEPS, 0)
            assert run.progress.closed is None or run.progress.closed.below <= before
    assert run.progress.closed is not None


@pytest.mark.parametrize("why", ["few", "absent", "subscriber"])
async def test_the_list_is_exact_where_it_is_short_or_what_may_come_is_not_known(why: str) -> None:
    run = Run("other" if why == "subscriber" else None)
    run.is_absent = why == "absent"

    states = await run.until(20 if why == "few" else 300)

    assert states[-1].closed is None
    assert "closed" not in states[-1].to_text(), "an earlier release reads it"
    assert set(IntervalSet.from_list(states[-1].trained)) == run.exactly


async def test_where_groups_are_taken_what_was_noted_of_the_source_bounds_the_list() -> None:
    run = Run("other")
    await run.until(100)
    run.noted = 5_000

    await run.until(400)

    assert run.progress.closed is not None and run.progress.closed.below == 5_000
    assert run.exactly <= set(run.progress.trained)


async def test_a_trainer_that_goes_on_knows_what_was_closed_and_closes_more() -> None:
    run = Run()
    await run.until(400)
    closed = run.progress.closed
    assert closed is not None
    again = Run()
    again._open, again._next, again.exactly = run._open, run._next, run.exactly
    again.progress.step, again.progress.closed = run.progress.step, closed
    again.progress.trained.add_many(run.progress.trained)

    await again.policy.begin()
    assert again.closed == [closed.below]
    states = await again.until(600)

    assert again.progress.closed is not None and again.progress.closed.below > closed.below
    assert states[-1].num_trained == len(again.exactly)
