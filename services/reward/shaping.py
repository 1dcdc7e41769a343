"""Penalties, scaling, normalisation and clipping of rewards, in the order that ``ShapingConfig`` states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flotilla.services.reward.normalisation import normalise
from flotilla.shared.config.sections.shaping import (
    LengthRewardConfig,
    OverlongConfig,
    RepetitionConfig,
    ShapingConfig,
    TruncatedConfig,
)
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.statistics.moments import RunningMoments


@dataclass(frozen=True)
class Graded:
    """One graded answer.

    Args:
        reward: the graders' verdict.
        length: sampled tokens.
        is_truncated: whether it ran into the length limit.
        group: its task.
        text: the answer; only read for the repetition penalty.
    """

    reward: float
    length: int
    is_truncated: bool = False
    group: int = 0
    text: str = ""


@dataclass(frozen=True)
class Shaped:
    """The rewards to train on.

    Args:
        rewards: [S] float64.
        clip_fraction: share of the rewards outside the clip.
        running: the moments after these rewards.
    """

    rewards: NDArray[np.float64]
    clip_fraction: float
    running: RunningMoments


def overlong_penalty(length: int, config: OverlongConfig) -> float:
    """Compute the (non-positive) penalty of an answer of this many tokens.

    Source: Yu et al., DAPO, 2025, eq. 13.
    """
    excess = length - (config.max_length - config.buffer)
    if config.capped:
        excess = min(excess, config.buffer)
    return -max(excess, 0) / config.buffer * config.factor


def truncated_reward(reward: float, config: TruncatedConfig) -> float:
    """Scale or replace the reward of an answer that ran into the limit."""
    if config.value is not None:
        return config.value
    assert config.scale is not None
    return reward * config.scale


def length_reward(length: int, config: LengthRewardConfig) -> float:
    """Compute -penalty up to min_length, rising linearly to 0 at max_length."""
    missing = (config.max_length - length) / (config.max_length - config.min_length)
    return -config.penalty * min(max(missing, 0.0), 1.0)


def repetition_penalty(text: str, config: RepetitionConfig) -> float:
    """Compute the (non-positive) penalty for repeated n-grams of lower-cased words; 0 for fewer words than n."""
    words = text.lower().split()
    ngrams = [tuple(words[start : start + config.ngram]) for start in range(len(words) - config.ngram + 1)]
    return -(1 - len(set(ngrams)) / len(ngrams)) * config.penalty if ngrams else 0.0


def penalised(answer: Graded, config: ShapingConfig) -> float:
    """Apply to one answer what depends on it alone: overlong, truncated, length, repetition, scale."""
    reward = answer.reward
    if config.overlong is not None:
        reward += overlong_penalty(answer.length, config.overlong)
    if config.truncated is not None and answer.is_truncated:
        reward = truncated_reward(reward, config.truncated)
    if config.length is not None:
        reward += length_reward(answer.length, config.length)
    if config.repetition is not None:
        reward += repetition_penalty(answer.text, config.repetition)
    return reward * config.scale


def shape(answers: Sequence[Graded], config: ShapingConfig, running: RunningMoments | None = None) -> Shaped:
    """Turn grades into rewards.

    Args:
        answers: a batch, or a single group where nothing is normalised over the batch.
        config: what to do.
        running: moments of all earlier rewards; they are updated with this batch and then used.
    """
    rewards = np.array([penalised(answer, config) for answer in answers], dtype=np.float64)
    moments = (running or RunningMoments()).updated(rewards)
    if config.normalisation is not None:
        rewards = normalise(rewards, [answer.group for answer in answers], config.normalisation, moments)
    clip_fraction = 0.0
    if config.clip is not None and rewards.size:
        clip_fraction = float((np.abs(rewards) > config.clip).mean())
        rewards = rewards.clip(-config.clip, config.clip)
    return Shaped(rewards, clip_fraction, moments)


def shaped_group(group: Group, config: ShapingConfig) -> Group:
    """Shape the rewards of a graded group; trajectories without a reward stay as they are.

    The graders' own verdict is kept among the components, as ``unshaped``.
    """
    scored = [index for index, t in enumerate(group.trajectories) if t.status is GradeStatus.SCORED]
    answers = []
    for index in scored:
        trajectory = group.trajectories[index]
        is_truncated = trajectory.finish_reason.is_truncation
        reward = trajectory.reward
        assert reward is not None
        answers.append(Graded(reward, trajectory.num_sampled, is_truncated, text=trajectory.text))
    trajectories = list(group.trajectories)
    for index, answer, reward in zip(scored, answers, shape(answers, config).rewards.tolist(), strict=True):
        components = {**trajectories[index].components, "unshaped": answer.reward}
        trajectories[index] = replace(trajectories[index], reward=reward, components=components)
    return replace(group, trajectories=tuple(trajectories))
