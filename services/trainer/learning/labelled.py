"""Learning from single answers that are marked as desirable or not: Kahneman-Tversky optimisation (KTO).

A mini-batch's loss is a function of the answers' log-ratios to the reference and of a reference point. For that point
each prompt is read with the answer to the next prompt of its mini-batch, too: both are in one group, whose prompt is
computed once. The log-ratios of all come first, without gradient; the loss's derivative by those of the answers
themselves then weighs them in a second pass. So the point is the same on all ranks, and no gradient depends on how a
mini-batch was cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.metrics import Metrics, combine, mean_over, once, summarise
from flotilla.services.trainer.algorithms.preference import kl_of_mismatched, kto_loss, matched_reference_points
from flotilla.services.trainer.data.batch import TrainingBatch, make_batch, scored_trajectories
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.learning.finished import HELD_OUT, FinishedLearner
from flotilla.shared.config.sections.job import KtoConfig
from flotilla.shared.schemas.trajectory import Group, Trajectory


class KtoLearner(FinishedLearner):
    """Kahneman-Tversky optimisation: an answer's number is the sum of its tokens' log-probs."""

    def _batch(self, groups: Sequence[Group]) -> TrainingBatch:
        return make_batch(self._laid(groups, self.spec.optimisation.groups_per_mini_batch)).to(self.device)

    def _laid(self, groups: Sequence[Group], size: int) -> Sequence[Group]:
        if not self._has_mismatched:
            return groups
        bounds = [each for each in (self._kto.max_tokens, self._positions) if each is not None]
        return with_mismatched(groups, size, min(bounds, default=None))

    @property
    def _positions(self) -> int | None:
        """How many tokens the model can read; None if its configuration has no limit.

        Each row by itself fits, but a long prompt with the answer to another one may not.
        """
        config: Any = self.loaded.model.config
        found = getattr(config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def _kto(self) -> KtoConfig:
        assert isinstance(self.job, KtoConfig)
        return self.job

    @property
    def _has_mismatched(self) -> bool:
        return self._kto.reference_point == "mismatched"

    def _learn(self, batch: TrainingBatch, members: range, fixed: Tensor | None) -> Metrics:
        assert fixed is not None
        ratios = self._log_probs(batch, members) - fixed[members.start : members.stop]
        ratios.requires_grad_()
        loss, figures = self._loss(ratios, batch.rewards[members.start : members.stop])
        [of_ratios] = torch.autograd.grad(loss, ratios)
        weights = torch.zeros_like(fixed).index_copy(0, torch.arange(*_ends(members), device=self.device), of_ratios)
        own = self._own(members)
        gradient = partial(self._accumulate_finished, batch, members, weights)
        tallies = self.sizes.fit(self._cut_of(batch, own), gradient, self.optimizer.clear)
        # Every rank computes these alike: they count once.
        return combine([figures, tallies]) if self.ranks.is_leader else tallies

    def _accumulate_finished(
        self, batch: TrainingBatch, members: range, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]
    ) -> Metrics:
        assert fixed is not None
        return combine(self._backward_each(micro_batches, lambda micro: (self._weighted_log_probs(micro, fixed), {})))

    @torch.no_grad()
    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Compute what the loss is on groups that are not trained, with one reference point for all of them."""
        laid = self._laid(groups, len(groups))
        size = self.spec.optimisation.groups_per_mini_batch
        ratios, rewards = [], []
        for start in range(0, len(laid), size):
            batch = make_batch(laid[start : start + size]).to(self.device)
            reference = self._fixed(batch)
            assert reference is not None
            ratios.append(self._log_probs(batch, range(batch.num_sequences)) - reference)
            rewards.append(batch.rewards)
        _, figures = self._loss(torch.cat(ratios), torch.cat(rewards))
        return {f"{HELD_OUT}/{name}": value for name, value in summarise(figures).items()}

    def _measured(self, batch: TrainingBatch, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]) -> Metrics:
        raise AssertionError("measured over all groups at once")

    def _own(self, members: range) -> range:
        """Take the answers themselves among sequences of whole groups."""
        return members[::2] if self._has_mismatched else members

    def _log_probs(self, batch: TrainingBatch, members: range) -> Tensor:
        """Compute the log-probs of some sequences [S'], under the policy, without gradient."""
        found, _ = self.sizes.fit(self._cut_of(batch, members), partial(self._evaluate, self.policy, batch))
        return batch.sequences.sum(found)[members.start : members.stop].detach()

    def _loss(self, ratios: Tensor, rewards: Tensor) -> tuple[Tensor, Metrics]:
        """Compute the loss of log-ratios [S'] of whole groups, and its figures."""
        config, step = self._kto, 2 if self._has_mismatched else 1
        own, is_desirable = ratios[::step], rewards[::step] > 0
        if config.reference_point == "matched":
            points = matched_reference_points(own, is_desirable)
        else:
            point = kl_of_mismatched(ratios[1::2]) if self._has_mismatched else own.new_zeros(())
            points = point.expand_as(own)
        loss = kto_loss(
            own,
            is_desirable,
            points,
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        implicit, every = config.beta * own, torch.ones_like(is_desirable)
        figures = {
            "loss": once(loss),
            "preference/desirable_fraction": mean_over(is_desirable.float(), every),
            "preference/reference_point": mean_over(points, every),
        }
        for name, mask in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            if bool(mask.any()):
                figures[f"preference/{name}"] = mean_over(implicit, mask)
        return loss, figures


def with_mismatched(groups: Sequence[Group], size: int, max_tokens: int | None) -> list[Group]:
    """Add to each group its prompt with the answer to the next prompt, in turns within each ``size`` groups.

    Args:
        groups: of one answer each.
        size: of a mini-batch.
        max_tokens: such a sequence is cut here; null for no bound.
    """
    made = []
    for start in range(0, len(groups), size):
        members = groups[start : start + size]
        for group, following in zip(members, [*members[1:], members[0]], strict=True):
            [own], [other] = scored_trajectories(group), scored_trajectories(following)
            made.append(replace(group, trajectories=(own, _joined(own, other, max_tokens))))
    return made


def _joined(prompt_of: Trajectory, answer_of: Trajectory, max_tokens: int | None) -> Trajectory:
    """Put the answer of one sequence behind the prompt of another."""
    ids, masks = [], []
    for each, part in ((prompt_of, slice(None, _start(prompt_of))), (answer_of, slice(_start(answer_of), None))):
        ids.append(each.token_ids[part])
        masks.append(each.loss_mask[part])
    token_ids, mask = np.concatenate(ids)[:max_tokens], np.concatenate(masks)[:max_tokens]
    log_probs = np.zeros(len(token_ids), dtype=np.float32)
    return replace(answer_of, token_ids=token_ids, loss_mask=mask, log_probs=log_probs)


def _start(trajectory: Trajectory) -> int:
    """Find the first token that is learned."""
    return int(np.argmax(trajectory.loss_mask))


def _ends(members: range) -> tuple[int, int]:
    return members.start, members.stop
