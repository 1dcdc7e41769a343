"""Builders of the data that tests are about; each defaults all that a test does not care for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group, Trajectory


def a_task(group_id: int = 0, **fields: Any) -> Task:
    """Make a task with one user message and a group of two."""
    defaults: dict[str, Any] = {
        "row": group_id,
        "messages": (Message("user", f"What is {group_id} plus 1?"),),
        "group_size": 2,
        "seed": 1234 + group_id,
        "label": str(group_id + 1),
    }
    return Task(group_id=group_id, **(defaults | fields))


def a_trajectory(
    *,
    prompt_tokens: int = 3,
    sampled_tokens: int = 5,
    version: int = 0,
    versions: Sequence[tuple[int, int]] | None = None,
    reward: float | None = None,
    seed: int = 0,
    **fields: Any,
) -> Trajectory:
    """Make a trajectory of a prompt and one completion, sampled by ``version``; scored if ``reward`` is given."""
    generator = np.random.default_rng(seed)
    length = prompt_tokens + sampled_tokens
    loss_mask = np.zeros(length, dtype=np.uint8)
    loss_mask[prompt_tokens:] = 1
    log_probs = np.where(loss_mask, -generator.random(length), 0).astype(np.float32)
    defaults: dict[str, Any] = {
        "token_ids": generator.integers(0, 1000, length).astype(np.int32),
        "loss_mask": loss_mask,
        "log_probs": log_probs,
        "versions": tuple(versions) if versions is not None else ((0, version),),
        "finish_reason": FinishReason.STOP,
        "text": "an answer",
    }
    made = Trajectory(**(defaults | fields))
    return made if reward is None else made.graded(GradeStatus.SCORED, reward)


def a_group(
    task: Task | int = 0,
    *,
    rewards: Sequence[float | None] | None = None,
    version: int | None = None,
    sampled_tokens: int = 5,
) -> Group:
    """Make the group that answers ``task``, or the task of that id; ungraded unless ``rewards`` are given.

    Tokens are sampled by ``version``, or by the task's ``min_version``.
    """
    answered = a_task(task) if isinstance(task, int) else task
    sampled_by = answered.min_version if version is None else version
    if rewards is None:
        rewards = [None] * answered.group_size
    return Group(
        answered,
        tuple(
            a_trajectory(version=sampled_by, sampled_tokens=sampled_tokens, reward=reward, seed=index)
            for index, reward in enumerate(rewards)
        ),
    )


def graded(group: Group, rewards: Sequence[float]) -> Group:
    """Copy a group with these rewards."""
    pairs = zip(group.trajectories, rewards, strict=True)
    return replace(group, trajectories=tuple(each.graded(GradeStatus.SCORED, reward) for each, reward in pairs))
