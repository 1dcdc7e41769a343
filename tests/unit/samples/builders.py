"""Files of samples that tests are about."""

from collections.abc import Sequence

import numpy as np

from flotilla.shared.samples.folder import step_name
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind, TrainedTokens
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.testing.builders import a_task, a_trajectory


def trained_tokens(trajectory: Trajectory, advantage: float = 1.0) -> TrainedTokens:
    """Make figures for each sampled token, NaN for the others."""
    is_sampled = trajectory.loss_mask.astype(bool)

    def placed(value: float) -> np.ndarray:
        return np.where(is_sampled, value, np.nan).astype(np.float32)

    log_probs = np.where(is_sampled, trajectory.log_probs, np.nan).astype(np.float32)
    return TrainedTokens(placed(advantage), log_probs, log_probs + 0.5, placed(1), placed(0), None, ((0, 0),))


def a_step(
    step: int = 1,
    *,
    rewards: Sequence[float] = (1.0, 0.0),
    num_groups: int = 2,
    first: int = 0,
    sampled_tokens: int = 5,
    seed: int = 0,
) -> SampleFile:
    """Make the file of a trained step; groups are numbered from ``first``."""
    groups = []
    for number in range(first, first + num_groups):
        members = tuple(
            a_trajectory(reward=reward, sampled_tokens=sampled_tokens, seed=seed + 10 * number + member)
            for member, reward in enumerate(rewards)
        )
        groups.append(Group(a_task(number, group_size=len(rewards)), members, f"What is {number} plus 1?"))
    kept = [
        KeptGroup(group, SampleKind.TRAINED, tokens=[trained_tokens(t) for t in group.trajectories]) for group in groups
    ]
    facts = {"num_groups": num_groups, "parent": f"l{step - 1}", "lineage": f"l{step}", "metrics": {"loss/total": 0.5}}
    return SampleFile(step_name(step), kept, step, step - 1, facts)
