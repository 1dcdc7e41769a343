"""A mini-batch's losses and gradients: the critic's, and the policy's."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import Denominators, count_sampled
from flotilla.services.trainer.algorithms.log_probs import TokenStatistics
from flotilla.services.trainer.algorithms.metrics import Metrics, combine, mean_over, once, share
from flotilla.services.trainer.algorithms.objective import (
    Objective,
    TokenFigures,
    denominators_of,
    policy_objective,
    selected_tokens,
)
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.learning.mini_batches import MiniBatch, Prepared
from flotilla.services.trainer.learning.pass_sizes import PassSizes
from flotilla.services.trainer.learning.replayed_routing import disagreement, told
from flotilla.services.trainer.models.critic import Critic
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.models.optimizer import PolicyOptimizer
from flotilla.services.trainer.models.routers import balancing, router_metrics
from flotilla.services.trainer.parallel.ranks import Ranks
from flotilla.shared.config.sections.algorithm import AlgorithmConfig

Note = Callable[[MicroBatch, TokenFigures], None]
"""Records what a loss made of a micro-batch's tokens."""


def differences(log_probs: Tensor, rollout_log_probs: Tensor, micro: MicroBatch) -> Metrics:
    """Compare the log-probabilities [T] of a pass with those that the engine reported.

    Both figures are exactly 0 where all bits are equal, and only there.
    """
    mask = micro.sequences.response_mask
    apart = (log_probs.detach() - rollout_log_probs[micro.tokens]).abs()
    return {"exactness/difference": mean_over(apart, mask), "exactness/unequal_fraction": share(apart > 0, mask)}


def update_critic(critic: Critic, prepared: Prepared, mini_batch: MiniBatch, sizes: PassSizes) -> Metrics:
    """Make the critic's update of one mini-batch, of which its ranks are given their shares."""
    found = sizes.fit(mini_batch.critic_cut, partial(_accumulate_critic, critic, prepared), critic.optimizer.clear)
    if found is None:
        return {}
    critic.update()
    return found


def _accumulate_critic(critic: Critic, prepared: Prepared, micro_batches: Sequence[MicroBatch]) -> Metrics | None:
    ranks = critic.ranks
    assert prepared.values is not None and prepared.returns is not None
    if not micro_batches:
        return None
    own = Denominators.total(count_sampled(micro.sequences) for micro in micro_batches)
    denominators = own if not ranks.is_several else Denominators.from_tensor(ranks.sum(own.as_tensor()))
    tallies = [
        critic.accumulate(micro, prepared.values, prepared.returns, denominators, num_ranks=ranks.data_size)
        for micro in micro_batches
    ]
    return combine(tallies)


class PolicyGradient:
    """Computes the policy's losses, and leaves their gradients on its parameters.

    Args:
        config: the algorithm section.
        policy: what is trained.
        optimizer: of its weights.
        sizes: how large a pass may be.
        ranks: that share a mini-batch.
    """

    def __init__(
        self, config: AlgorithmConfig, policy: Policy, optimizer: PolicyOptimizer, sizes: PassSizes, ranks: Ranks
    ) -> None:
        self._config, self._policy, self._optimizer = config, policy, optimizer
        self._sizes, self._ranks = sizes, ranks

    def follow(self, config: AlgorithmConfig) -> None:
        """Compute by another section from now on."""
        self._config = config

    def accumulate(
        self,
        prepared: Prepared,
        mini_batch: MiniBatch,
        *,
        kl_coefficient: float | None,
        generator: torch.Generator,
        note: Note | None,
    ) -> Metrics:
        """Leave the gradient of one mini-batch on the parameters.

        Args:
            prepared: the step's samples.
            mini_batch: which of them.
            kl_coefficient: the controller's present value; None without a KL.
            generator: what the losses draw from.
            note: takes the figures of each micro-batch's tokens, if they are wanted.
        """
        state = generator.get_state()

        def begin_again() -> None:
            self._optimizer.clear()
            generator.set_state(state)

        work = partial(self._accumulate, prepared, mini_batch.members, kl_coefficient, generator, note)
        return self._sizes.fit(mini_batch.cut, work, begin_again)

    def _accumulate(
        self,
        prepared: Prepared,
        members: range,
        kl_coefficient: float | None,
        generator: torch.Generator,
        note: Note | None,
        micro_batches: Sequence[MicroBatch],
    ) -> Metrics:
        batch, config = prepared.batch, self._config
        mask, index, shares = batch.sequences.response_mask, batch.sequences.index, batch.sequences.shares
        of_mini_batch = (index >= members.start) & (index < members.stop)
        denominators = denominators_of(
            config,
            old_log_probs=prepared.old_log_probs[of_mini_batch],
            rollout_log_probs=batch.rollout_log_probs[of_mini_batch],
            sequences=PackedSequences(
                index[of_mini_batch] - members.start,
                mask[of_mini_batch],
                members.stop - members.start,
                None if shares is None else shares[members.start : members.stop],
            ),
        )
        selected = selected_tokens(
            config,
            old_log_probs=prepared.old_log_probs,
            advantages=prepared.advantages,
            response_mask=mask & of_mini_batch,
            generator=generator,
        )
        tallies: list[Metrics] = []
        part = 1 / max(sum(not micro.is_empty for micro in micro_batches), 1)
        for micro in micro_batches:
            if micro.is_empty:
                torch.autograd.backward(self._policy.statistics(micro.inputs, with_entropy=True).log_probs.sum() * 0)
                self._optimizer.collect()
                continue
            with told(self._policy, micro), balancing(self._policy.routers, micro.inputs, part):
                found = self._policy.statistics(micro.inputs, with_entropy=True)
                chosen = None if selected is None else selected[micro.tokens]
                objective = self._objective(prepared, micro, found, denominators, chosen, kl_coefficient, generator)
                # Sharded gradients are averaged over the ranks, and this is the loss of the whole mini-batch.
                torch.autograd.backward(objective.loss * self._ranks.data_size)
            self._optimizer.collect()
            routers = router_metrics(self._policy.routers, self._ranks.data_size) | disagreement(self._policy)
            tallies.append({**objective.metrics, **routers})
            if self._policy.is_exact:
                tallies.append(differences(micro.spread(found.log_probs), batch.rollout_log_probs, micro))
            if note is not None and objective.tokens is not None:
                note(micro, objective.tokens)
        self._optimizer.add_zero()
        # Without an advantage nothing is computed, because the loss and its gradient are exactly 0: that is a figure.
        return combine(tallies) or {name: once(torch.zeros(())) for name in ("loss", "policy_loss")}

    def _objective(
        self,
        prepared: Prepared,
        micro: MicroBatch,
        found: TokenStatistics,
        denominators: Denominators,
        selected: Tensor | None,
        kl_coefficient: float | None,
        generator: torch.Generator,
    ) -> Objective:
        """Compute a micro-batch's share of the loss from the policy's log-probabilities."""
        batch, config = prepared.batch, self._config
        assert found.entropy is not None
        return policy_objective(
            config,
            log_probs=micro.spread(found.log_probs),
            old_log_probs=prepared.old_log_probs[micro.tokens],
            rollout_log_probs=batch.rollout_log_probs[micro.tokens],
            advantages=prepared.advantages[micro.tokens],
            sequences=micro.sequences,
            denominators=denominators,
            ref_log_probs=None if prepared.ref_log_probs is None else prepared.ref_log_probs[micro.tokens],
            entropy=micro.spread(found.entropy if config.entropy_coefficient else found.entropy.detach()),
            scores=batch.rewards[micro.members],
            selected=selected,
            sequence_weights=prepared.weights_of(micro.members),
            kl_coefficient=kl_coefficient,
            generator=generator,
        )
