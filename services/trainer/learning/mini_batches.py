"""A step's samples, ready to be trained, and the mini-batches that they are trained in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.sample_weights import redraw, sequence_weights
from flotilla.services.trainer.data.batch import TrainingBatch
from flotilla.services.trainer.learning.pass_sizes import Cut
from flotilla.shared.config.sections.algorithm import (
    AlgorithmConfig,
    KlLossConfig,
    ResamplingConfig,
    SequenceWeightsConfig,
)
from flotilla.shared.config.sections.optimisation import OptimisationConfig

LOSSES_OF_ADVANTAGE_ALONE = frozenset({"ppo", "gspo", "cispo", "sapo", "policy_gradient"})
"""Where the advantage is 0, these are 0 with gradient 0: the forward pass of such a sequence can be left out, unless
routers learn from it."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step's batch with all that is fixed before its first update; tensors are [T] over the batch's span tokens.

    ``origin`` is the token of the step's batch that each is; None where they are the same.
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
        weights = self.weights_of(members)
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

    def teaching(self, members: range, config: AlgorithmConfig, *, has_routers: bool = False) -> Sequence[int]:
        """List those of some sequences that have a gradient; one of the advantage alone has none where that is 0.

        Args:
            members: numbers of the sequences.
            config: of their losses.
            has_routers: whether every token has losses of the model's routers, too.
        """
        if has_routers or not _can_skip_zero_advantages(config):
            return members
        sums = self.batch.sequences.sum(self.advantages.abs()).tolist()
        return [number for number in members if sums[number] > 0]


@dataclass(frozen=True)
class MiniBatch:
    """What makes one optimiser update.

    Attributes:
        members: numbers of its sequences.
        cut: into the policy's passes, those of them that need one.
        critic_cut: into the critic's.
    """

    members: range
    cut: Cut
    critic_cut: Cut


def weights_of_step(batch: TrainingBatch, section: SequenceWeightsConfig | None) -> Tensor | None:
    """Compute the loss weights of a step's sequences [S]; None where the spec weighs none."""
    if section is None:
        return None
    return sequence_weights(batch.difficulty, batch.sequences.lengths if section.length else None)


def redrawn(prepared: Prepared, config: ResamplingConfig | None, seed: int) -> Prepared:
    """Draw a step's sequences again by their rewards, where the spec has it."""
    # The places are drawn, not the groups: mini-batches keep their sizes, and advantages their groups.
    return prepared if config is None else prepared.take(redraw(config, prepared.batch.rewards, seed))


def split_by_groups(batch: TrainingBatch, size: int) -> list[range]:
    """Split the sequences by groups, in order, into contiguous ranges of ``size`` whole groups."""
    starts = torch.searchsorted(batch.group_index.cpu(), torch.arange(0, batch.num_groups, size)).tolist()
    return [range(start, end) for start, end in zip(starts, [*starts[1:], batch.num_sequences], strict=True)]


def passes_over(
    prepared: Prepared,
    ranges: Sequence[range],
    config: OptimisationConfig,
    seed: int,
    make: Callable[[Prepared, range], MiniBatch],
) -> Iterator[tuple[Prepared, list[MiniBatch]]]:
    """Return the step's samples, and its mini-batches, once for each pass over them."""
    if not config.shuffle:
        mini_batches = [make(prepared, members) for members in ranges]
        yield from [(prepared, mini_batches)] * config.epochs_per_step
        return
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.epochs_per_step):
        order = torch.randperm(prepared.batch.num_sequences, generator=generator)
        ordered = prepared.take(order.to(prepared.advantages.device))
        yield ordered, [make(ordered, members) for members in ranges]


def _can_skip_zero_advantages(config: AlgorithmConfig) -> bool:
    return (
        not config.needs_critic
        and config.policy_loss.kind in LOSSES_OF_ADVANTAGE_ALONE
        and not config.entropy_coefficient
        and config.supervised is None
        and not isinstance(config.kl, KlLossConfig)
    )


def _of_tokens(values: Tensor | None, tokens: Tensor) -> Tensor | None:
    return None if values is None else values[tokens]
