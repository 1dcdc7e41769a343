"""The distance between engines and trainer is told of each rollout, of tokens that the trained version sampled."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla.services.trainer.learning.trace import engine_gaps
from flotilla.shared.schemas.sample_kinds import TrainedTokens
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.testing.builders import a_group, a_task


def a_traced(
    group: Group, apart: float, lags: tuple[tuple[int, int], ...] = ((0, 0),)
) -> tuple[Group, list[TrainedTokens]]:
    found = []
    for trajectory in group.trajectories:
        nothing = np.zeros_like(trajectory.log_probs)
        sampled = trajectory.loss_mask.astype(bool)
        now = np.where(sampled, trajectory.log_probs + apart, np.nan).astype(np.float32)
        found.append(TrainedTokens(nothing, nothing, now, nothing, nothing, None, lags))
    return group, found


def test_each_rollout_has_the_mean_over_its_own_tokens_of_lag_0() -> None:
    groups = [a_group(a_task(number)).sampled_by(name) for number, name in enumerate(("r-1", "r-2", "r-2"))]
    traced = [a_traced(groups[0], 0.25), a_traced(groups[1], -0.5), a_traced(groups[2], 9.0, ((0, 1),))]

    assert engine_gaps(traced) == {"engine_gap/r-1": pytest.approx(0.25), "engine_gap/r-2": pytest.approx(0.5)}


def test_what_nobody_has_sampled_alone_counts_for_nobody() -> None:
    group = a_group(a_task(0))
    resumed = replace(group.trajectories[0], resumed_tokens=1)
    shared = Group(group.task, (resumed, *group.trajectories[1:])).sampled_by("r-1")

    assert [each.rollout for each in shared.trajectories] == [None, "r-1"]
    assert engine_gaps([a_traced(group, 0.25)]) == {}
    read = Trajectory.from_wire(shared.trajectories[1].to_wire())
    assert read.rollout == "r-1" and "rollout" not in group.trajectories[0].to_wire()
