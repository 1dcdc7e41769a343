"""A step's batch with all that is fixed before its first update."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.objective import selected_tokens
from flotilla.services.trainer.algorithms.sample_weights import sequence_weights
from flotilla.services.trainer.data.batch import TrainingBatch, scored_trajectories
from flotilla.shared.config.sections.algorithm import AlgorithmConfig, KlLossConfig
from flotilla.shared.errors import DataError
from flotilla.shared.schemas.trajectory import Group

LOSSES_OF_ADVANTAGE_ALONE = frozenset({"ppo", "gspo", "cispo", "sapo", "policy_gradient"})
"""Where the advantage is 0, these are 0 with gradient 0: the forward pass of such a sequence can be left out."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step's batch with all that is fixed before its first update; tensors are [T] over the batch's span tokens.

    ``origin`` tells which token of the step's batch each is; None where they are the same.
    """

    batch: TrainingBatch
    old_log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    values: Tensor | None
    returns: Tensor | None
    sequence_weights: Tensor | None
    origin: Tensor | None = None

    def take(self, members: Tensor) -> "Prepared":
        """Make the same of some sequences [S'], in this order and as often as they are named."""
        batch, tokens = self.batch.take(members)
        weights = None if self.sequence_weights is None else self.sequence_weights[members]
        return Prepared(
            batch,
            self.old_log_probs[tokens],
            _of_tokens(self.ref_log_probs, tokens),
            self.advantages[tokens],
            _of_tokens(self.values, tokens),
            _of_tokens(self.returns, tokens),
            None if weights is None else weights / weights.mean(),
            tokens if self.origin is None else self.origin[tokens],
        )

    def weights_of(self, members: Tensor) -> Tensor | None:
        """Take the loss weights of some sequences [S'], if there are any."""
        return None if self.sequence_weights is None else self.sequence_weights[members]


def can_skip_zero_advantages(config: AlgorithmConfig) -> bool:
    """Whether nothing is learned from sequences whose advantage is 0."""
    return (
        not config.needs_critic
        and config.policy_loss.kind in LOSSES_OF_ADVANTAGE_ALONE
        and not config.entropy_coefficient
        and config.supervised is None
        and not isinstance(config.kl, KlLossConfig)
    )


def _of_tokens(values: Tensor | None, tokens: Tensor) -> Tensor | None:
    return None if values is None else values[tokens]


def step_weights(config: AlgorithmConfig, batch: TrainingBatch, groups: Sequence[Group]) -> Tensor | None:
    """Weigh the sequences of a step: [S], mean 1; None if nothing asks for it."""
    section = config.sequence_weights
    if section is None:
        return None
    difficulty = None
    if section.difficulty is not None:
        rows = [_difficulty(group, section.difficulty) for group in groups for _ in scored_trajectories(group)]
        difficulty = torch.tensor(rows, device=batch.rewards.device)
    return sequence_weights(difficulty, batch.sequences.lengths if section.length else None)


def _difficulty(group: Group, column: str) -> float:
    found = group.task.metadata.get(column)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise DataError(
            f"algorithm.sequence_weights.difficulty names the column {column}, which is {found!r} for task "
            f"{group.task.group_id}: it must be a number"
        )
    return float(found)


def selected(
    config: AlgorithmConfig, prepared: Prepared, of_mini_batch: Tensor, generator: torch.Generator
) -> Tensor | None:
    """Choose the tokens of a mini-batch that the loss treats differently: [T] over the batch, or None."""
    return selected_tokens(
        config,
        old_log_probs=prepared.old_log_probs,
        advantages=prepared.advantages,
        response_mask=prepared.batch.sequences.response_mask & of_mini_batch,
        generator=generator,
    )
