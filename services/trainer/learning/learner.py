"""The computation of one step: from groups to updated weights. Everything here blocks and knows no service.

    groups -> micro-batches -> old and reference log-probs -> advantages -> loss -> gradients -> step

A step's groups are split in order into K mini-batches, each of which makes one optimiser update, ``epochs_per_step``
times over; ``optimisation.shuffle`` draws other parts. Advantages are computed once, over all groups of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import Advantages
from flotilla.services.trainer.algorithms.kl import adapted_coefficient
from flotilla.services.trainer.algorithms.metrics import Metrics, combine, summarise
from flotilla.services.trainer.data.batch import TrainingBatch, make_batch
from flotilla.services.trainer.data.micro_batch import MicroBatch, RowRules, make_micro_batches
from flotilla.services.trainer.learning.advantages import (
    check_unillustrated,
    remembered,
    step_advantages,
    taught_by_each,
    with_teacher,
)
from flotilla.services.trainer.learning.gradients import PolicyGradient, update_critic
from flotilla.services.trainer.learning.mini_batches import (
    MiniBatch,
    Prepared,
    passes_over,
    redrawn,
    split_by_groups,
    weights_of_step,
)
from flotilla.services.trainer.learning.pass_sizes import Cut, PassSizes, need_of
from flotilla.services.trainer.learning.replayed_routing import OldRouting, told, untold
from flotilla.services.trainer.learning.trace import TokenTrace, TracedStep
from flotilla.services.trainer.learning.trainable import (
    Weights,
    choose_trained,
    freeze_tower,
    image_weights,
    kept_weights,
    prepare_routers,
    processor_for,
    show_images,
)
from flotilla.services.trainer.models.critic import Critic, make_critic
from flotilla.services.trainer.models.loading import LoadedModel
from flotilla.services.trainer.models.log_probs import Policy
from flotilla.services.trainer.models.optimizer import PolicyOptimizer, UpdateResult
from flotilla.services.trainer.models.versions import VersionedWeights, WeightAverage
from flotilla.services.trainer.parallel.layers import prepare_layers
from flotilla.services.trainer.parallel.ranks import ONE_RANK, Ranks
from flotilla.services.trainer.parallel.sequence import SequenceParallel
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.trajectory import Group

RENAMED: Mapping[str, str] = {
    "loss": "loss/total",
    "policy_loss": "loss/policy",
    "kl_loss": "loss/kl",
    "supervised_loss": "loss/supervised",
    "value_loss": "loss/value",
    "value": "value/mean",
    "value_clip_fraction": "value/clip_fraction",
    "kl": "kl/mean",
    "distillation_kl": "distillation/kl",
    "ratio": "ratio/mean",
    "approx_kl": "ratio/approx_kl",
    "clip_fraction": "ratio/clip_fraction",
    "clip_fraction_lower": "ratio/clip_fraction_lower",
    "advantage": "advantage/mean",
    "advantage_squared": "advantage/mean_square",
    "advantage_clip_fraction": "advantage/clip_fraction",
    "flat_group_fraction": "groups/flat_fraction",
    "group_std": "reward/std_within_group",
}
SUMS_OVER_UPDATES = ("loss", "policy_loss", "kl_loss", "supervised_loss", "value_loss", "router/balance", "router/z")
"""Reported per update: their tallies add up over the updates of a step."""


def mean_of_updates(summary: Mapping[str, float], num_updates: int) -> dict[str, float]:
    """Divide what was summed over a step's updates by their number."""
    return {
        name: value / num_updates if name in SUMS_OVER_UPDATES and num_updates else value
        for name, value in summary.items()
    }


def algorithm_names(summary: Mapping[str, float]) -> dict[str, float]:
    """Give the algorithms' figures the names they are reported under; ``score`` is reported as the reward."""
    return {RENAMED.get(name, name): value for name, value in summary.items() if name != "score"}


@dataclass(frozen=True)
class StepResult:
    """What training one step gave.

    Attributes:
        updates: one result per optimiser update.
        metrics: losses, ratios, corrections and advantages, by the name they are reported under.
        traced: what was found about each token; None where the spec keeps no samples.
    """

    updates: tuple[UpdateResult, ...]
    metrics: Mapping[str, float]
    traced: TracedStep | None = None


class Learner:
    """Owns the policy's weights and their optimiser.

    Args:
        spec: the experiment.
        loaded: the policy, with weights or to be read in parts.
        reference: the policy that the KL is measured from; needed if the spec has a KL and no adapters, without which
            the policy is its own reference.
        teachers: of distillation, in the spec's order; needed if it names paths.
        critic: that the critic begins as; needed if the spec names one.
        ranks: that train together; each is given the same weights, calls the same methods and returns the same.

    Raises:
        ModelError: packing was asked for and the model cannot be packed.
    """

    _shares_prompts = True

    def __init__(
        self,
        spec: ExperimentSpec,
        loaded: LoadedModel,
        reference: LoadedModel | None = None,
        teachers: Sequence[LoadedModel] = (),
        critic: LoadedModel | None = None,
        *,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.spec, self.loaded, self.ranks = spec, loaded, ranks
        self.around_step: Callable[[int], AbstractContextManager[object]] = nullcontext
        self.on_profile_failure: Callable[[str | None], None] = lambda _: None
        self.is_exact = spec.exactness is not None
        self.policy = Policy.of(loaded, spec.policy_temperature, ranks, is_exact=self.is_exact)
        self.device = self.policy.device
        of_others = partial(
            Policy.of, temperature=spec.policy_temperature, ranks=ranks, is_trained=False, is_exact=self.is_exact
        )
        self.reference = None if reference is None else of_others(reference)
        self.teachers = tuple(of_others(each) for each in teachers)
        self.updates_per_step = spec.asynchrony.require_batches * spec.optimisation.epochs_per_step
        total = spec.optimisation.steps * self.updates_per_step
        moments = spec.parallelism.offload.optimiser
        for begun in filter(None, (loaded, critic)):
            freeze_tower(spec, begun.model)
        self.critic = make_critic(spec, loaded, critic, total, ranks)
        for each in self._computing:
            if (group := self._ranks_of(each).sequence_group) is not None:
                each.split_sequences(SequenceParallel(group))
        # After the critic's copy, which trains whole, but for its tower.
        self.adapters = choose_trained(loaded.model, spec)
        self.processor = processor_for(spec, loaded)
        for module in [loaded.model, *([] if self.critic is None else [self.critic.body])]:
            prepare_layers(module, spec, self.device)
        prepare_routers(self.policy, spec)
        self.weights = self._lay_out()
        self._packing = spec.optimisation.packing
        for each in (self.policy, *self._read_alike):
            self._packing = each.resolve_packing(self._packing)
        seeing = filter(None, (self.policy, self.reference))
        taught = zip(teachers, self.teachers, strict=True)
        self.towers = show_images(spec, self.processor, seeing, taught, self.critic, critic, ranks)
        parameters = loaded.model.named_parameters()
        self.optimizer = PolicyOptimizer(parameters, spec.optimisation, total, is_offloaded=moments)
        decay = spec.optimisation.average_decay
        self.average = None if decay is None else WeightAverage(self.optimizer.masters, decay)
        others = [] if self.critic is None else [self.critic.optimizer]
        self.sizes = PassSizes(spec, ranks, need_of(self.policy, [self.optimizer, *others], spec, ranks))
        self._gradient = PolicyGradient(spec.algorithm, self.policy, self.optimizer, self.sizes, ranks)
        self.kl_coefficient = self.configured_kl = _configured_kl(spec)
        self.reward_moments = remembered(None)
        self.versions: VersionedWeights | None = None
        if spec.algorithm.old_log_probs == "recompute_at_version":
            self.versions = VersionedWeights(kept_weights(loaded.model, self.adapters, ranks, self.weights))
            self.versions.keep(spec.first_version, 0)
        if self.adapters is not None and spec.needs_reference:
            self.reference = self.policy

    @property
    def _computing(self) -> list[Policy | Critic]:
        return [each for each in (self.policy, self.reference, *self.teachers, self.critic) if each is not None]

    @property
    def _read_alike(self) -> Sequence[Policy]:
        """Models beside the policy that are given its own rows, not a cut of their own."""
        return self.teachers if self.spec.finished_job is not None else ()

    def _ranks_of(self, model: Policy | Critic) -> Ranks:
        return model.ranks if isinstance(model, Critic) else self.ranks

    def _lay_out(self) -> Weights:
        if self.ranks.is_several:
            for each in self._computing:
                each.shard(self._ranks_of(each))
            if self.adapters is not None:
                self.adapters.begin()
        for each in self._computing if not self.spec.optimisation.compile_layers else ():
            each.choose_attention(self.policy)
        return image_weights(self.loaded.model, self.adapters, self.ranks, self.spec)

    def train(self, groups: Sequence[Group], step: int) -> StepResult:
        """Train one step.

        Args:
            groups: in training order; each with a scored trajectory.
            step: its number, from 1; seeds what the losses draw.
        """
        with self.around_step(step):
            return self._train(groups, step)

    def _train(self, groups: Sequence[Group], step: int) -> StepResult:
        config = self.spec.algorithm
        self.sizes.begin(step)
        difficulty = None if config.sequence_weights is None else config.sequence_weights.difficulty
        joins = self.spec.joins_branches
        batch = make_batch(
            groups,
            joins_branches=joins,
            difficulty=difficulty,
            processor=self.processor,
            replays_engine=config.router_replay == "R3",
        ).to(self.device)
        prepared, advantages = self._prepare(batch)
        trace = TokenTrace(prepared) if self.spec.samples is not None else None
        seed = self.spec.seed * 1_000_003 + step
        generator = torch.Generator(self.device).manual_seed(seed)
        prepared = redrawn(prepared, config.resampling, seed)
        results: list[UpdateResult] = []
        tallies: list[Metrics] = []
        of_critic = tallies if self.critic is None or self.critic.ranks is self.ranks else []
        with self._dropping(seed):
            ranges = split_by_groups(batch, self.spec.optimisation.groups_per_mini_batch)
            for ordered, mini_batches in passes_over(prepared, ranges, self.spec.optimisation, seed, self._mini_batch):
                for each in mini_batches:
                    if self.critic is not None:
                        of_critic.append(update_critic(self.critic, ordered, each, self.sizes))
                    if self.critic is None or step > self.critic.config.warmup_steps:
                        note = None if trace is None else partial(trace.note, ordered, update=len(results))
                        tallies.append(
                            self._gradient.accumulate(
                                ordered, each, kl_coefficient=self.kl_coefficient, generator=generator, note=note
                            )
                        )
                    results.append(self._update())
        metrics = self.ranks.combine(combine(tallies))
        if self.critic is not None and of_critic is not tallies:
            metrics |= self.critic.ranks.combine(combine(of_critic))
        if trace is not None:
            trace.collect(self.ranks)
        self.kl_coefficient = adapted_coefficient(
            self.kl_coefficient,
            config.kl,
            of_reward=advantages.observed_kl,
            of_loss=metrics.get("kl"),
            num_sequences=batch.num_sequences,
        )
        summary = summarise(metrics) | summarise(advantages.metrics)
        values = algorithm_names(mean_of_updates(summary, len(results)))
        return StepResult(tuple(results), values, None if trace is None else trace.arrays())

    def follow(self, spec: ExperimentSpec) -> None:
        """Train from the next step on by a spec that differs in keys that can change while an experiment runs."""
        configured = _configured_kl(spec)
        if configured != self.configured_kl:
            self.kl_coefficient = self.configured_kl = configured
        self.spec = spec
        self._gradient.follow(spec.algorithm)
        self.optimizer.follow(spec.optimisation)
        if self.critic is not None:
            self.critic.follow(spec.optimisation)

    def remember_rewards(self, moments: tuple[int, float, float] | None) -> None:
        """Take the number, mean and variance of all earlier rewards from a checkpoint; None: it has none."""
        self.reward_moments = remembered(moments)

    def keep_version(self, version: int, oldest: int) -> None:
        """Remember the present weights as this version, and none before ``oldest``, if log-probs need them."""
        if self.versions is not None:
            self.versions.keep(version, oldest)

    def _prepare(self, batch: TrainingBatch) -> tuple[Prepared, Advantages]:
        """Compute all that is fixed before a step's first update: log-probs, values and advantages."""
        cut = self._cut_of(batch, range(batch.num_sequences))
        recorded = OldRouting(batch, self.policy.routing.sizes) if self.spec.algorithm.router_replay == "R2" else None
        old, squares = self._old_log_probs(batch, cut, recorded)
        reference = self._reference_log_probs(batch, cut)
        values = self._critic_values(batch, cut)
        teacher = self._teacher_log_probs(batch)
        found = step_advantages(
            self.spec,
            batch,
            old_log_probs=old,
            ref_log_probs=reference,
            sum_pi_squared=squares,
            values=values,
            kl_coefficient=self.kl_coefficient,
            moments=self.reward_moments,
        )
        self.reward_moments = found.moments
        found = with_teacher(self.spec.algorithm, found, batch, old_log_probs=old, teacher_log_probs=teacher)
        if self.critic is not None and found.returns is not None:
            self.critic.observe(found.returns, batch.sequences.response_mask)
        weights = weights_of_step(batch, self.spec.algorithm.sequence_weights)
        if recorded is not None:
            batch = replace(batch, experts=recorded.of_all(self.ranks))
        return Prepared(batch, old, reference, found.advantages, values, found.returns, weights), found

    def _cut_of(
        self,
        batch: TrainingBatch,
        members: Sequence[int],
        *,
        teacher: Policy | None = None,
        ranks: Ranks | None = None,
    ) -> Cut:
        """Return what cuts some sequences into this rank's micro-batches, once for all that is computed of them.

        Args:
            batch: on the device.
            members: numbers of the sequences.
            teacher: that reads them, in the policy's place.
            ranks: that share them, if others than the policy's.
        """
        policy, ranks = teacher or self.policy, ranks or self.ranks
        models = (policy, self.policy, self.reference or policy, self.critic or policy, *self._read_alike)
        rows = RowRules(
            "padded" if self.is_exact else self._packing if teacher is None else teacher.resolve_packing("auto"),
            shares_prompts=self._shares_prompts and policy.can_share_prompts,
            hidden_size=policy.hidden_size,
            attends_apart=not self.spec.optimisation.compile_layers and all(each.attends_apart for each in models),
            is_varlen=policy.is_varlen,
        )
        make = partial(
            make_micro_batches,
            batch,
            members,
            rows,
            device=self.device,
            rank=ranks.data_rank,
            num_ranks=ranks.data_size,
        )
        # A pass with one token of room has one sequence.
        return lru_cache(maxsize=1)(lambda max_tokens: make(max_tokens=1 if self.is_exact else max_tokens))

    def _critic_cut(self, batch: TrainingBatch, members: Sequence[int], own: Cut) -> Cut:
        """Cut the critic's share: as the policy's own, unless ranks are divided otherwise for the critic."""
        if self.critic is None or self.critic.ranks is self.ranks:
            return own
        return self._cut_of(batch, members, ranks=self.critic.ranks)

    def _old_log_probs(
        self, batch: TrainingBatch, cut: Cut, recorded: OldRouting | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs [T] of the proximal policy, as the spec says, and sum p^2 [T] where advantages need it.

        What its routers choose is recorded where ``recorded`` is for it.
        """
        config = self.spec.algorithm
        old, squares = batch.rollout_log_probs, None
        needs_squares = config.advantage.kind == "optimal_token_baseline"
        if config.old_log_probs == "recompute" or needs_squares:
            evaluate = partial(self._evaluate_policy, batch, with_squares=needs_squares, recorded=recorded)
            current, squares = self.sizes.fit(cut, evaluate)
            old = current if config.old_log_probs == "recompute" else old
        if config.old_log_probs == "recompute_at_version":
            old = self.sizes.fit(cut, partial(self._evaluate_at_versions, batch))
        return old, squares

    def _reference_log_probs(self, batch: TrainingBatch, cut: Cut) -> Tensor | None:
        """Compute log-probs [T] under the reference, if there is one."""
        if self.reference is None:
            return None
        with self.reference.on_device() if self.adapters is None else self.adapters.disabled():
            return self.sizes.fit(cut, partial(self._evaluate, self.reference, batch))[0]

    def _critic_values(self, batch: TrainingBatch, cut: Cut) -> Tensor | None:
        """Compute the critic's values [T], if there is one."""
        if self.critic is None:
            return None
        own = self._critic_cut(batch, range(batch.num_sequences), cut)
        return self.critic.ranks.sum(self.sizes.fit(own, partial(self.critic.evaluate, batch.rollout_log_probs)))

    def _teacher_log_probs(self, batch: TrainingBatch) -> Tensor | None:
        """Compute log-probs [T] under each sequence's teacher, or take those that came with the samples from a URL."""
        config = self.spec.algorithm.distillation
        if config is None or not self.teachers:
            return batch.teacher_log_probs
        found = torch.zeros_like(batch.rollout_log_probs)
        for teacher, members in zip(self.teachers, taught_by_each(config, batch.data_sources), strict=True):
            if teacher.tower is None:
                check_unillustrated(batch, members, config)
            if members:
                cut = self._cut_of(batch, members, teacher=teacher)
                found += self.sizes.fit(cut, partial(self._evaluate, teacher, batch))[0]
        return found

    def _evaluate_policy(
        self,
        batch: TrainingBatch,
        micro_batches: Sequence[MicroBatch],
        *,
        with_squares: bool = False,
        recorded: OldRouting | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what ``_evaluate`` does for the policy, whose routers replay choices, or are recorded."""
        route = partial(told, self.policy, recorded=recorded)
        return self._evaluate(self.policy, batch, micro_batches, with_squares=with_squares, route=route)

    @torch.no_grad()
    def _evaluate(
        self,
        policy: Policy,
        batch: TrainingBatch,
        micro_batches: Sequence[MicroBatch],
        *,
        with_squares: bool = False,
        route: Callable[[MicroBatch], AbstractContextManager[None]] = untold,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probs [T], and sum p^2 [T] if wanted, without gradient.

        Args:
            policy: that computes.
            batch: the step's.
            micro_batches: this rank's.
            with_squares: whether sum p^2 is wanted.
            route: is entered around the pass of each micro-batch; by itself, routers choose for themselves.
        """
        log_probs = torch.zeros_like(batch.rollout_log_probs)
        squares = torch.zeros_like(log_probs) if with_squares else None
        for micro in micro_batches:
            with route(micro):
                found = policy.statistics(micro.inputs, with_entropy=False, with_sum_pi_squared=with_squares)
            if micro.is_empty:
                continue
            log_probs[micro.tokens] = micro.spread(found.log_probs)
            if squares is not None and found.sum_pi_squared is not None:
                squares[micro.tokens] = micro.spread(found.sum_pi_squared)
        return self.ranks.sum(log_probs), squares if squares is None else self.ranks.sum(squares)

    def _evaluate_at_versions(self, batch: TrainingBatch, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Compute log-probs [T] of each token under the version that sampled it."""
        assert self.versions is not None
        log_probs = torch.zeros_like(batch.rollout_log_probs)
        mask = batch.sequences.response_mask
        for version in torch.unique(batch.versions[mask]).tolist():
            is_of_version = mask & (batch.versions == version)
            # Every rank makes as many passes as the others: which are needed is known of its own only.
            is_needed = [self.ranks.is_several or bool(is_of_version[micro.tokens].any()) for micro in micro_batches]
            holders = [micro for micro, wanted in zip(micro_batches, is_needed, strict=True) if wanted]
            with self.versions.using(version):
                found, _ = self._evaluate_policy(batch, holders)
            log_probs = torch.where(is_of_version, found, log_probs)
        return log_probs

    def _mini_batch(self, prepared: Prepared, members: range) -> MiniBatch:
        taught = prepared.teaching(members, self.spec.algorithm, has_routers=self.spec.optimisation.router is not None)
        cut = self._cut_of(prepared.batch, taught)
        return MiniBatch(members, cut, self._critic_cut(prepared.batch, members, cut))

    def _dropping(self, seed: int) -> AbstractContextManager[None]:
        """Apply dropout to the inputs of adapters in training, each rank its own, if the spec asks for it."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.dropping(seed * self.ranks.size + self.ranks.rank)

    def _update(self) -> UpdateResult:
        """Step the optimiser with the present gradients."""
        result = self.optimizer.update()
        if self.average is not None:
            self.average.update()
        return result


def _configured_kl(spec: ExperimentSpec) -> float | None:
    return None if spec.algorithm.kl is None else spec.algorithm.kl.coefficient
