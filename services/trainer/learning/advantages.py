"""From a step's batch, and the models' log-probabilities of it, to its advantages."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import AdvantageInputs, Advantages, compute_advantages
from flotilla.services.trainer.algorithms.advantages.distillation import distilled
from flotilla.services.trainer.algorithms.importance import correct
from flotilla.services.trainer.data.batch import TrainingBatch, TurnLayout, environment_steps, turn_rewards
from flotilla.shared.config.sections.advantage import GdpoConfig, GigpoConfig, StepReinforceConfig
from flotilla.shared.config.sections.algorithm import AlgorithmConfig, KlRewardConfig
from flotilla.shared.config.sections.distillation import DistillationConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError
from flotilla.shared.statistics.moments import NOTHING_SEEN, RunningMoments


def step_advantages(
    spec: ExperimentSpec,
    batch: TrainingBatch,
    *,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
    values: Tensor | None,
    kl_coefficient: float | None,
    moments: RunningMoments = NOTHING_SEEN,
) -> Advantages:
    """Compute the advantages of a step's rewards; ``with_teacher`` comes after.

    Args:
        spec: the experiment.
        batch: scored trajectories of whole groups.
        old_log_probs, ref_log_probs, sum_pi_squared, values: see ``AdvantageInputs``.
        kl_coefficient: the controller's present value; counts where the KL is in the reward.
        moments: of the rewards of the steps before.

    Raises:
        DataError: a reward lacks a component that the estimator names.
    """
    config = spec.algorithm
    inputs = advantage_inputs(
        spec,
        batch,
        values=values,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        sum_pi_squared=sum_pi_squared,
    )
    kl = config.kl if isinstance(config.kl, KlRewardConfig) else None
    inputs = replace(inputs, moments=moments)
    return compute_advantages(config.advantage, inputs, kl=kl, kl_coefficient=kl_coefficient if kl else None)


def remembered(moments: tuple[int, float, float] | None) -> RunningMoments:
    """Return what a run knows of earlier rewards: their number, mean and variance; None where it begins."""
    return NOTHING_SEEN if moments is None else RunningMoments(*moments)


def with_teacher(
    config: AlgorithmConfig,
    found: Advantages,
    batch: TrainingBatch,
    *,
    old_log_probs: Tensor,
    teacher_log_probs: Tensor | None,
) -> Advantages:
    """Add a teacher's advantages to those of a step, or replace them; unchanged without a teacher.

    Args:
        config: the section.
        found: of the rewards.
        batch: of the step.
        old_log_probs: [T] nats.
        teacher_log_probs: [T] nats; needed if the section distils.
    """
    if config.distillation is None:
        return found
    assert teacher_log_probs is not None
    return distilled(found, config.distillation, old_log_probs, teacher_log_probs, batch.sequences)


def taught_by_each(config: DistillationConfig, data_sources: Sequence[str | None]) -> list[list[int]]:
    """Return the numbers of the sequences that each teacher in the trainer has.

    Args:
        config: the section; one with a path has one teacher, of all.
        data_sources: of each sequence.

    Raises:
        DataError: a sequence has no teacher.
    """
    if not config.teachers:
        return [list(range(len(data_sources)))]
    found = [[n for n, each in enumerate(data_sources) if each in teacher.data_sources] for teacher in config.teachers]
    if sum(map(len, found)) < len(data_sources):
        missing = next(each for each in data_sources if each not in (config.data_sources or ()))
        raise DataError(f"algorithm.distillation.teachers: none teaches the data source {missing!r}")
    return found


def check_unillustrated(batch: TrainingBatch, members: Sequence[int], config: DistillationConfig) -> None:
    """Check that a teacher which takes no images has none to see.

    Args:
        batch: the step's.
        members: numbers of the sequences that it teaches.
        config: the section, for the message.

    Raises:
        DataError: one of them has images.
    """
    shown = batch.illustrations
    seen = next((number for number in members if shown is not None and shown[number] is not None), None)
    if seen is not None:
        name = f"teachers (of the data source {batch.data_sources[seen]!r})" if config.teachers else "path"
        raise DataError(
            f"algorithm.distillation.{name}: the model takes no images, and the group {int(batch.group_ids[seen])} has "
            "some: name a vision-language model of the same tokenizer and processor"
        )


def advantage_inputs(
    spec: ExperimentSpec,
    batch: TrainingBatch,
    *,
    values: Tensor | None,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
) -> AdvantageInputs:
    """Lay out a batch for the spec's estimator; those that compare steps of an environment get a sequence per turn.

    Args:
        spec: the experiment.
        batch: scored trajectories of whole groups.
        values, old_log_probs, ref_log_probs, sum_pi_squared: see ``AdvantageInputs``.

    Raises:
        DataError: a reward lacks a component that the estimator names.
    """
    config, weight = spec.algorithm.advantage, spec.environment_weight
    components = _component_scores(batch, config) if isinstance(config, GdpoConfig) else None
    importance, correction = None, spec.algorithm.resolved_correction
    if sum_pi_squared is not None and correction is not None:
        assert old_log_probs is not None
        corrected = correct(correction, old_log_probs, batch.rollout_log_probs, batch.sequences)
        # What is rejected has no gradient, so none of its variance either.
        importance = torch.where(corrected.response_mask, corrected.weights, 0.0)
    sequences, scores, group_index, rewards, steps = batch.sequences, batch.rewards, batch.group_index, None, None
    episodes = batch.episode_index
    if isinstance(config, GigpoConfig | StepReinforceConfig):
        layout = TurnLayout.of(batch)
        steps = environment_steps(batch, layout, weight)
        sequences, scores, group_index = layout.sequences, scores[layout.owner], group_index[layout.owner]
        episodes = None  # the steps are distinguished by episode already
    else:
        rewards = turn_rewards(batch, weight)
    return AdvantageInputs(
        sequences=sequences,
        scores=scores,
        group_index=group_index,
        turn_rewards=rewards,
        values=values,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        sum_pi_squared=sum_pi_squared,
        importance_weights=importance,
        component_scores=components,
        baselines=batch.baselines,
        steps=steps,
        episode_index=episodes,
    )


def _component_scores(batch: TrainingBatch, config: GdpoConfig) -> Tensor:
    """Lay out the named reward components: [S, K]."""
    missing = {name for name in config.components for found in batch.components if name not in found}
    if missing:
        raise DataError(f"algorithm.advantage.components names {sorted(missing)[0]}, which the rewards do not have")
    rows = [[found[name] for name in config.components] for found in batch.components]
    return torch.tensor(rows, dtype=torch.float32, device=batch.rewards.device)
