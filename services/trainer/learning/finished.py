"""Learning from finished answers: demonstrations, and pairs of which one answer is preferred.

A mini-batch's loss is a function of one number per token or per sequence. Where it is one per sequence of a pair, that
number is computed first, without gradient; the loss's derivative by it then weighs each sequence in a second pass. So
the members of a pair may be in different micro-batches, and no gradient depends on how a mini-batch was cut.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import aggregate, count_sampled
from flotilla.services.trainer.algorithms.divergence import divergence_of
from flotilla.services.trainer.algorithms.metrics import Metrics, Tally, combine, mean_over, once, summarise
from flotilla.services.trainer.algorithms.preference import PreferenceLoss, dpo_loss, pairwise_loss
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.data.batch import TrainingBatch, make_batch
from flotilla.services.trainer.data.micro_batch import MicroBatch
from flotilla.services.trainer.learning.learner import Learner, StepResult, algorithm_names, mean_of_updates
from flotilla.services.trainer.learning.mini_batches import split_by_groups
from flotilla.services.trainer.models.optimizer import UpdateResult
from flotilla.services.trainer.models.routers import balancing, router_metrics
from flotilla.shared.config.sections.job import DpoLossConfig, FinishedJob, PreferenceConfig, SftConfig
from flotilla.shared.schemas.trajectory import Group

HELD_OUT = "held_out"
TEACHER_KL = "distillation_kl"


class FinishedLearner(Learner):
    """Learns from groups that no policy sampled."""

    def _train(self, groups: Sequence[Group], step: int) -> StepResult:
        self.sizes.begin(step)
        batch = self._batch(groups)
        fixed = self._fixed(batch) if self.reference is not None else None
        results: list[UpdateResult] = []
        tallies: list[Metrics] = []
        with self._dropping(self.spec.seed * 1_000_003 + step):
            for _ in range(self.spec.optimisation.epochs_per_step):
                for members in split_by_groups(batch, self.spec.optimisation.groups_per_mini_batch):
                    tallies.append(self._learn(batch, members, fixed))
                    self.optimizer.add_zero()
                    results.append(self._update())
        summary = summarise(self.ranks.combine(combine(tallies)))
        values = algorithm_names(mean_of_updates(summary, len(results)))
        return StepResult(tuple(results), values)

    @torch.no_grad()
    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Compute what the loss is on groups that are not trained, under ``held_out/...``."""
        tallies = []
        size = self.spec.optimisation.groups_per_mini_batch
        for start in range(0, len(groups), size):
            batch = make_batch(groups[start : start + size]).to(self.device)
            cut = self._cut_of(batch, range(batch.num_sequences))
            tallies.append(self.sizes.fit(cut, partial(self._measured, batch, self._fixed(batch))))
        return {f"{HELD_OUT}/{name}": value for name, value in self._derived(summarise(combine(tallies))).items()}

    def _batch(self, groups: Sequence[Group]) -> TrainingBatch:
        """Lay out a step's groups on the device."""
        return make_batch(groups).to(self.device)

    def _learn(self, batch: TrainingBatch, members: range, fixed: Tensor | None) -> Metrics:
        """Leave the gradient of one mini-batch on the parameters, in passes that fit into the device's memory."""
        gradient = partial(self._accumulate_finished, batch, members, fixed)
        return self.sizes.fit(self._cut_of(batch, members), gradient, self.optimizer.clear)

    @property
    def job(self) -> FinishedJob:
        """The job's section."""
        job = self.spec.finished_job
        assert job is not None, "chosen by the job's kind"
        return job

    def _fixed(self, batch: TrainingBatch) -> Tensor | None:
        """Compute what does not change with the weights: the reference's log-probs [S]."""
        log_probs = self._reference_log_probs(batch, self._cut_of(batch, range(batch.num_sequences)))
        return None if log_probs is None else batch.sequences.sum(log_probs)

    def _backward(self, loss: Tensor) -> None:
        # Sharded gradients are averaged over the ranks, and this is the share of a whole mini-batch's loss.
        torch.autograd.backward(loss * self.ranks.data_size if self.ranks.is_several else loss)
        self.optimizer.collect()

    def _backward_each(
        self, micro_batches: Sequence[MicroBatch], surrogate: Callable[[MicroBatch], tuple[Tensor, Metrics]]
    ) -> list[Metrics]:
        """Take the gradient of what has the loss's, micro-batch by micro-batch, with that of the routers' losses."""
        tallies: list[Metrics] = []
        share = share_of_one(micro_batches)
        for micro in micro_batches:
            with nullcontext() if micro.is_empty else balancing(self.policy.routers, micro.inputs, share):
                value, metrics = surrogate(micro)
                self._backward(value)
            of_routers = {} if micro.is_empty else router_metrics(self.policy.routers, self.ranks.data_size)
            tallies.append(metrics | of_routers)
        return tallies

    def _weighted_log_probs(self, micro: MicroBatch, weights: Tensor) -> Tensor:
        """Compute the sum of the log-probs of a micro-batch's tokens, each times the weight [S] of its sequence."""
        found = self.policy.statistics(micro.inputs, with_entropy=False).log_probs
        if micro.is_empty:
            return found.sum() * 0
        of_tokens = micro.sequences.spread(weights[micro.members])
        return (of_tokens * micro.spread(found) * micro.sequences.response_mask).sum()

    @abstractmethod
    def _accumulate_finished(
        self, batch: TrainingBatch, members: range, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]
    ) -> Metrics:
        """Leave the gradient of one mini-batch on the parameters."""

    @abstractmethod
    def _measured(self, batch: TrainingBatch, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]) -> Metrics:
        """Tally the loss of a batch, each figure over what it is a mean of."""

    def _derived(self, values: dict[str, float]) -> dict[str, float]:
        return values


class SupervisedLearner(FinishedLearner):
    """Raises the likelihood of the answers, and learns what a teacher expects at their tokens, where there is one."""

    def _accumulate_finished(
        self, batch: TrainingBatch, members: range, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]
    ) -> Metrics:
        assert isinstance(self.job, SftConfig)
        denominators = count_sampled(_only(batch.sequences, members))
        aggregation = self.job.aggregation

        def surrogate(micro: MicroBatch) -> tuple[Tensor, Metrics]:
            log_probs, divergence = self._token_figures(micro)
            if micro.is_empty:
                return sum((each.sum() * 0 for each in divergence), log_probs.sum() * 0), {}
            mask = micro.sequences.response_mask
            values = self._mixed(micro.spread(log_probs), *map(micro.spread, divergence))
            loss = aggregate(values, micro.sequences, denominators, aggregation)
            figures = {"loss": once(loss), "nll": mean_over(-micro.spread(log_probs), mask)}
            for each in divergence:
                figures[TEACHER_KL] = mean_over(micro.spread(each), mask)
            return loss, figures

        return combine(self._backward_each(micro_batches, surrogate))

    def _token_figures(self, micro: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the log-probs of a micro-batch's labels [N] and, under a teacher, its KL at each [N]."""
        assert isinstance(self.job, SftConfig)
        if self.job.distillation is None:
            return self.policy.statistics(micro.inputs, with_entropy=False).log_probs, ()
        [teacher] = self.teachers
        with torch.no_grad():
            logits = teacher.logits(micro.inputs)
        measure = self.job.distillation.divergence
        log_probs, divergence = self.policy.compared(micro.inputs, logits, partial(divergence_of, measure=measure))
        return log_probs, (divergence,)

    def _mixed(self, log_probs: Tensor, divergence: Tensor | None = None) -> Tensor:
        """Compute the loss of each token."""
        assert isinstance(self.job, SftConfig)
        if divergence is None or self.job.distillation is None:
            return -log_probs
        share = self.job.distillation.coefficient
        return share * divergence - (1 - share) * log_probs

    def _measured(self, batch: TrainingBatch, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]) -> Metrics:
        mask = batch.sequences.response_mask
        if not self.teachers:
            log_probs, _ = self._evaluate(self.policy, batch, micro_batches)
            return {"loss": mean_over(-log_probs, mask)}
        found = torch.zeros(2, len(mask), device=mask.device)
        for micro in micro_batches:
            log_probs, [divergence] = self._token_figures(micro)
            if not micro.is_empty:
                found[:, micro.tokens] = torch.stack([micro.spread(log_probs), micro.spread(divergence)])
        log_probs, divergence = self.ranks.sum(found)
        figures = {"loss": self._mixed(log_probs, divergence), "nll": -log_probs, "distillation/kl": divergence}
        return {name: mean_over(values, mask) for name, values in figures.items()}

    def _derived(self, values: dict[str, float]) -> dict[str, float]:
        return values | {"perplexity": math.exp(min(values.get("nll", values["loss"]), 700.0))}


class _PairLearner(FinishedLearner):
    """Learns from pairs through one number per answer."""

    def _accumulate_finished(
        self, batch: TrainingBatch, members: range, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]
    ) -> Metrics:
        with torch.no_grad():
            values = self._values(batch, micro_batches)
        values = values.detach().requires_grad_()
        found = self._pair_loss(batch, values, members, fixed)
        [weights] = torch.autograd.grad(found.loss, values)
        extra = self._token_weights(batch, members)
        surrogate = partial(self._weighted, batch, weights=weights, extra=extra)
        # Every rank computes these alike: they count once.
        tallies: list[Metrics] = [_figures(found)] if self.ranks.is_leader else []
        return combine(tallies + self._backward_each(micro_batches, surrogate))

    def _measured(self, batch: TrainingBatch, fixed: Tensor | None, micro_batches: Sequence[MicroBatch]) -> Metrics:
        members = range(batch.num_sequences)
        found = self._pair_loss(batch, self._values(batch, micro_batches), members, fixed)
        pairs = torch.tensor(float(len(found.chosen_rewards)), device=found.loss.device)
        return _figures(found) | {"loss": Tally(found.loss * pairs, pairs)}

    @abstractmethod
    def _values(self, batch: TrainingBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Compute the number of each answer: [S], 0 for those in no micro-batch."""

    @abstractmethod
    def _pair_loss(self, batch: TrainingBatch, values: Tensor, members: range, fixed: Tensor | None) -> PreferenceLoss:
        """Compute the mini-batch's loss from them."""

    @abstractmethod
    def _weighted(
        self, batch: TrainingBatch, micro: MicroBatch, weights: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        """Compute what has the loss's gradient: the answers' numbers, each times its weight."""

    def _token_weights(self, batch: TrainingBatch, members: range) -> Tensor | None:
        return None


class PreferenceLearner(_PairLearner):
    """Direct preference optimisation: an answer's number is the sum of its tokens' log-probs."""

    def _values(self, batch: TrainingBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        log_probs, _ = self._evaluate(self.policy, batch, micro_batches)
        return batch.sequences.sum(log_probs)

    def _pair_loss(self, batch: TrainingBatch, values: Tensor, members: range, fixed: Tensor | None) -> PreferenceLoss:
        assert isinstance(self.job, PreferenceConfig) and fixed is not None
        chosen, rejected = pairs_of(batch, members)
        config = self.job.loss
        return dpo_loss(
            values[chosen],
            values[rejected],
            fixed[chosen],
            fixed[rejected],
            beta=config.beta,
            label_smoothing=config.label_smoothing if isinstance(config, DpoLossConfig) else 0.0,
            ipo=not isinstance(config, DpoLossConfig),
        )

    def _token_weights(self, batch: TrainingBatch, members: range) -> Tensor | None:
        """Weigh the tokens [T] of preferred answers so that their sum is the supervised term."""
        assert isinstance(self.job, PreferenceConfig)
        if not self.job.supervised_coefficient:
            return None
        chosen, _ = pairs_of(batch, members)
        is_chosen = torch.zeros(batch.num_sequences, device=self.device)
        is_chosen[chosen] = 1.0
        tokens = batch.sequences.spread(is_chosen) * batch.sequences.response_mask
        return -self.job.supervised_coefficient * tokens / tokens.sum().clamp(min=1)

    def _weighted(
        self, batch: TrainingBatch, micro: MicroBatch, weights: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        found = self.policy.statistics(micro.inputs, with_entropy=False).log_probs
        if micro.is_empty:
            return found.sum() * 0, {}
        log_probs = micro.spread(found)
        of_tokens = micro.sequences.spread(weights[micro.members])
        metrics: Metrics = {}
        if extra is not None:
            term = (extra[micro.tokens] * log_probs).sum()
            of_tokens = of_tokens + extra[micro.tokens]
            metrics = {"supervised_loss": once(term), "loss": once(term)}
        return (of_tokens * log_probs * micro.sequences.response_mask).sum(), metrics


class RewardModelLearner(_PairLearner):
    """Bradley-Terry: an answer's number is the score that the model's head gives at its last token."""

    # An answer's last token must be found from its predictor, which may be the end of a prompt elsewhere.
    _shares_prompts = False

    def _values(self, batch: TrainingBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        scores = torch.zeros(batch.num_sequences, device=self.device)
        for micro in micro_batches:
            found = self._scores(micro)
            scores = scores if micro.is_empty else scores.index_copy(0, micro.members, found)
        return self.ranks.sum(scores)

    def _pair_loss(self, batch: TrainingBatch, values: Tensor, members: range, fixed: Tensor | None) -> PreferenceLoss:
        chosen, rejected = pairs_of(batch, members)
        loss = pairwise_loss(values[chosen], values[rejected])
        return PreferenceLoss(loss, values[chosen].detach(), values[rejected].detach())

    def _weighted(
        self, batch: TrainingBatch, micro: MicroBatch, weights: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        found = self._scores(micro)
        return (found.sum() * 0 if micro.is_empty else (weights[micro.members] * found).sum()), {}

    def _scores(self, micro: MicroBatch) -> Tensor:
        """Compute the scores of a micro-batch's answers [S'], with gradient."""
        if micro.is_empty:
            return self.policy.scores(micro.inputs, micro.inputs.predictors)
        counts = micro.sequences.lengths.long()
        # A label's predictor is the position before it.
        last = micro.inputs.predictors[counts.cumsum(0) - 1] + 1
        return self.policy.scores(micro.inputs, last)


def pairs_of(batch: TrainingBatch, members: range) -> tuple[Tensor, Tensor]:
    """Find the numbers of the preferred answers [P] and of the others [P] among some sequences of whole groups.

    Raises:
        ValueError: a group is no pair.
    """
    numbers = torch.arange(members.start, members.stop, device=batch.rewards.device)
    groups = batch.group_index[members.start : members.stop]
    if len(numbers) % 2 or bool((groups[0::2] != groups[1::2]).any()):
        raise ValueError("a group of pairs has two answers with a reward")
    is_first = batch.rewards[numbers[0::2]] >= batch.rewards[numbers[1::2]]
    first, second = numbers[0::2], numbers[1::2]
    return torch.where(is_first, first, second), torch.where(is_first, second, first)


def share_of_one(micro_batches: Sequence[MicroBatch]) -> float:
    """Return the share of the passes that each is which has tokens of its own."""
    return 1 / max(sum(not micro.is_empty for micro in micro_batches), 1)


def _figures(found: PreferenceLoss) -> Metrics:
    chosen, rejected = found.chosen_rewards, found.rejected_rewards
    every = torch.ones_like(chosen, dtype=torch.bool)
    return {
        "loss": once(found.loss),
        # A tie is right as often as not: so begins a policy that is the reference.
        "preference/accuracy": mean_over((chosen > rejected).float() + (chosen == rejected).float() / 2, every),
        "preference/margin": mean_over(chosen - rejected, every),
        "preference/chosen": mean_over(chosen, every),
        "preference/rejected": mean_over(rejected, every),
    }


def _only(sequences: PackedSequences, members: range) -> PackedSequences:
    """Take the tokens of some sequences alone as sampled."""
    inside = (sequences.index >= members.start) & (sequences.index < members.stop)
    return sequences.with_mask(sequences.response_mask & inside)
