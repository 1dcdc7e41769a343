"""Advantages of recorded groups under other rewards, by the functions that training itself computes them with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.trainer.data.batch import TrainingBatch, make_batch, piece_starts, scored_trajectories
from flotilla.services.trainer.data.source import find_problem, requirements_of
from flotilla.services.trainer.learning.advantages import step_advantages, with_teacher
from flotilla.shared.config.sections.advantage import (
    GaeConfig,
    GpgConfig,
    ReinforceConfig,
    ReinforcePlusPlusConfig,
    TokenBaselineConfig,
)
from flotilla.shared.config.sections.algorithm import KlRewardConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.sample_kinds import KeptGroup, TrainedTokens
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import Resolution

ANY_TOKEN = 1 << 31
"""Size of a vocabulary without bound: what was sampled once is a token of the model."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class NewlyGraded:
    """A group as it would be trained.

    Attributes:
        kept: as recorded.
        group: with the new rewards, shaped and masked.
    """

    kept: KeptGroup
    group: Group


def why_not_computed(spec: ExperimentSpec) -> str | None:
    """Return what a spec's advantages need that is in no record; None where they can be computed."""
    config = spec.algorithm
    if isinstance(config.advantage, GaeConfig):
        return "gae needs the critic's values, which are not recorded"
    if isinstance(config.advantage, TokenBaselineConfig):
        return "optimal_token_baseline needs sums over the vocabulary, which are not recorded"
    if isinstance(config.advantage, ReinforceConfig | ReinforcePlusPlusConfig) and config.advantage.follows_the_run:
        return "a step's rewards are compared with those of all steps before, whose mean is not recorded"
    if isinstance(config.kl, KlRewardConfig) and config.kl.target is not None:
        return "the KL in the reward has an adaptive coefficient, which is not recorded"
    if config.distillation is not None and config.distillation.models:
        return "the teacher's log-probs are not recorded where the trainer computes them"
    return None


def why_not_trained(spec: ExperimentSpec, group: Group) -> tuple[Resolution, str] | None:
    """Return why the trainer would refuse a group, by its own rule; None if it trains it."""
    refused = find_problem(group, requirements_of(spec, ANY_TOKEN))
    return None if refused is None else refused[:2]


def compares_groups_alone(spec: ExperimentSpec) -> bool:
    """Whether a group's advantages depend on that group only, whatever it is trained with."""
    config = spec.algorithm.advantage
    if config.whiten is not None or config.kind in {"reinforce", "reinforce_plus_plus", "turn_reinforce"}:
        return False
    return not isinstance(config, GpgConfig) and config.kind not in {"gigpo", "step_reinforce"}


def _without_images(group: Group) -> Group:
    """Leave images out: they change no advantage, and nothing here can place them."""
    trajectories = tuple([replace(each, images=()) if each.images else each for each in group.trajectories])
    return replace(group, task=replace(group.task, images=()), trajectories=trajectories)


def regraded_advantages(spec: ExperimentSpec, groups: Sequence[NewlyGraded]) -> list[list[Floats | None]]:
    """Compute the advantages of groups that are trained together.

    Args:
        spec: the experiment, with the new rewards' section.
        groups: in training order.

    Returns:
        Of each group and member [T] over its tokens, NaN where none was sampled; None for a member without a reward,
        and for all of them where a token needs log-probs that were not recorded since it was not trained.
    """
    shown = [_without_images(each.group) for each in groups]
    nothing: list[list[Floats | None]] = [[None] * len(each.trajectories) for each in shown]
    if not any(scored_trajectories(each) for each in shown):
        return nothing
    batch = make_batch(shown, joins_branches=spec.joins_branches)
    tokens = [each for found, group in zip(groups, shown, strict=True) for each in _recorded(found.kept, group)]
    config = spec.algorithm
    needs_old = isinstance(config.kl, KlRewardConfig) or config.distillation is not None
    if (needs_old and None in tokens) or (config.distillation is not None and batch.teacher_log_probs is None):
        return nothing
    old = _laid(batch, tokens, "old_log_probs") if needs_old else batch.rollout_log_probs
    rewarded = step_advantages(
        spec,
        batch,
        old_log_probs=old,
        ref_log_probs=_laid(batch, tokens, "ref_log_probs") if isinstance(config.kl, KlRewardConfig) else None,
        sum_pi_squared=None,
        values=None,
        kl_coefficient=config.kl.coefficient if config.kl is not None else None,
    )
    taught = with_teacher(config, rewarded, batch, old_log_probs=old, teacher_log_probs=batch.teacher_log_probs)
    advantages = taught.advantages.numpy()
    found, mask, lengths = nothing, batch.sequences.response_mask.numpy(), batch.span_lengths
    number = offset = 0
    for place, group in enumerate(shown):
        scored = {id(each) for each in scored_trajectories(group)}
        for member, trajectory in enumerate(group.trajectories):
            if id(trajectory) not in scored:
                continue
            full = np.full(trajectory.token_ids.shape[0], np.nan, np.float32)
            for begins in piece_starts(trajectory):
                length, at = lengths[number], begins + batch.span_starts[number]
                span = slice(offset, offset + length)
                full[at : at + length] = np.where(mask[span], advantages[span], np.nan)
                number, offset = number + 1, span.stop
            found[place][member] = full
    return found


def _recorded(kept: KeptGroup, group: Group) -> list[tuple[int, TrainedTokens] | None]:
    """List of each sequence of a group where it begins in its trajectory, and what was recorded of that."""
    return [
        None if not kept.tokens or (tokens := kept.tokens[member]) is None else (begins, tokens)
        for member, trajectory in enumerate(group.trajectories)
        if any(trajectory is each for each in scored_trajectories(group))
        for begins in piece_starts(trajectory)
    ]


def _laid(batch: TrainingBatch, tokens: Sequence[tuple[int, TrainedTokens] | None], name: str) -> Tensor:
    """Lay recorded figures of the spans end to end: [T]; 0 where none was sampled.

    Args:
        tokens: of each sequence, where it begins in its trajectory and what was recorded of that.
    """
    spans = []
    for each, start, length in zip(tokens, batch.span_starts, batch.span_lengths, strict=True):
        assert each is not None
        begins, kept = each
        spans.append(np.nan_to_num(getattr(kept, name)[begins + start : begins + start + length]))
    return torch.from_numpy(np.concatenate(spans))
