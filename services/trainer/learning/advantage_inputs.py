"""From a step's batch to what its advantage estimator reads."""

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import AdvantageInputs
from flotilla.services.trainer.data.batch import TrainingBatch
from flotilla.services.trainer.data.turns import TurnLayout, environment_steps, turn_rewards
from flotilla.shared.config.sections.advantage import GdpoConfig, GigpoConfig, StepReinforceConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import DataError


def advantage_inputs(
    spec: ExperimentSpec,
    batch: TrainingBatch,
    *,
    values: Tensor | None,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
    importance_weights: Tensor | None,
) -> AdvantageInputs:
    """Lay out a batch for the spec's estimator; those that compare steps of an environment get a sequence per turn.

    Args:
        spec: the experiment.
        batch: scored trajectories of whole groups.
        values, old_log_probs, ref_log_probs, sum_pi_squared, importance_weights: see ``AdvantageInputs``.

    Raises:
        DataError: a reward lacks a component that the estimator names.
    """
    config, weight = spec.algorithm.advantage, spec.environment_weight
    sequences, scores, group_index, rewards, steps = batch.sequences, batch.rewards, batch.group_index, None, None
    if isinstance(config, GigpoConfig | StepReinforceConfig):
        layout = TurnLayout.of(batch)
        steps = environment_steps(batch, layout, weight)
        sequences, scores, group_index = layout.sequences, scores[layout.owner], group_index[layout.owner]
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
        importance_weights=importance_weights,
        component_scores=component_scores(batch, config) if isinstance(config, GdpoConfig) else None,
        baselines=batch.baselines,
        steps=steps,
        episode_index=batch.episode_index,
    )


def component_scores(batch: TrainingBatch, config: GdpoConfig) -> Tensor:
    """Lay out the named reward components: [S, K]."""
    missing = {name for name in config.components for found in batch.components if name not in found}
    if missing:
        raise DataError(f"algorithm.advantage.components names {sorted(missing)[0]}, which the rewards do not have")
    rows = [[found[name] for name in config.components] for found in batch.components]
    return torch.tensor(rows, dtype=torch.float32, device=batch.rewards.device)
