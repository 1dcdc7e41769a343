"""From a batch's rewards to its advantages, in the configured order.

Order: KL in the reward (before or after the baseline) -> baseline per sequence or reward-to-go -> whitening -> clip.
The batch is everything that one plan of the trainer holds: groups must be complete in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.advantages import agentic, groups, returns
from flotilla.services.trainer.algorithms.advantages.agentic import EnvironmentSteps
from flotilla.services.trainer.algorithms.advantages.groups import Groups
from flotilla.services.trainer.algorithms.advantages.token_baseline import optimal_token_baseline, score_energy
from flotilla.services.trainer.algorithms.kl import kl_estimate, subtract_kl_from_rewards
from flotilla.services.trainer.algorithms.metrics import Metrics, Tally, mean_over, share
from flotilla.services.trainer.algorithms.sequences import PackedSequences, suffix_sum
from flotilla.shared.config.sections import advantage as configs
from flotilla.shared.config.sections.advantage import AdvantageConfig, WhitenConfig
from flotilla.shared.config.sections.algorithm import KlRewardConfig
from flotilla.shared.statistics.moments import NOTHING_SEEN, RunningMoments

Value = TypeVar("Value")
BATCH_STD_EPSILON = 1e-6


AllSum = Callable[[Tensor], Tensor]


def on_one_rank(values: Tensor) -> Tensor:
    """Stand in for a sum across ranks where there is one."""
    return values


def whiten(values: Tensor, mask: Tensor, config: WhitenConfig, all_sum: AllSum = on_one_rank) -> Tensor:
    """Shift to mean 0 and scale to variance 1 over the tokens where the mask holds.

    Args:
        values: [T].
        mask: [T] bool.
        config: variance, floor and epsilon.
        all_sum: sums a tensor across the ranks that share the batch.

    Returns:
        [T] float32, 0 where the mask is False. One token alone has no variance: it becomes 0, or stays as it is.
    """
    # In float64 sums of equal float32 values are exact, and so is their mean: what is equal becomes exactly 0.
    inside = torch.where(mask, values.double(), 0.0)
    count, total = all_sum(torch.stack([mask.sum().double(), inside.sum()])).unbind()
    centred = torch.where(mask, inside - total / count.clamp(min=1), 0.0)
    if not config.centre_only:
        squares = all_sum(centred.square().sum())
        variance = squares / (count - 1 if config.variance == "unbiased" else count).clamp(min=1)
        floored = variance + config.epsilon if config.floor == "add" else variance.clamp(min=config.epsilon)
        centred = centred * floored.rsqrt()
    return (centred if config.of_one == "zero" else torch.where(count > 1, centred, inside)).float()


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """A batch of S sequences in T packed tokens; what an estimator does not use may stay None.

    Args:
        sequences: the layout.
        scores: [S] rewards.
        group_index: [S] group ids, in any order.
        token_rewards: [T] rewards per token; absent, each score sits on its sequence's last sampled token.
        turn_rewards: [T] parts of the scores that were earned before the end: they move there from the last token.
        values: [T] of the critic (gae).
        old_log_probs: [T] nats (KL in the reward, optimal token baseline).
        ref_log_probs: [T] nats (KL in the reward).
        sum_pi_squared: [T] (optimal token baseline).
        importance_weights: [T] (optimal token baseline, off-policy).
        component_scores: [S, K] (gdpo).
        baselines: [S] rewards of greedy answers (remax).
        steps: the environment's steps (gigpo, step_reinforce).
        episode_index: [S] numbers of the episodes that the sequences are branches of, and that are compared in their
            place, each with the mean of its branches' scores; absent, each is an episode of its own.
        moments: of the rewards of the run's steps before (reward-to-go compared with the run).
    """

    sequences: PackedSequences
    scores: Tensor
    group_index: Tensor | None = None
    token_rewards: Tensor | None = None
    turn_rewards: Tensor | None = None
    values: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    importance_weights: Tensor | None = None
    component_scores: Tensor | None = None
    baselines: Tensor | None = None
    steps: EnvironmentSteps | None = None
    episode_index: Tensor | None = None
    moments: RunningMoments = NOTHING_SEEN


@dataclass(frozen=True, eq=False)
class Advantages:
    """What the losses need.

    Args:
        advantages: [T], 0 where the mask is False.
        returns: [T] the critic's targets or reward-to-go, before whitening; None for estimators without.
        observed_kl: scalar, mean KL per token and sequence for the adaptive controller; None without KL in the reward.
        metrics: advantage statistics.
        moments: of the run's rewards with these; as they were for estimators that do not compare with them.
    """

    advantages: Tensor
    returns: Tensor | None
    observed_kl: Tensor | None
    metrics: Metrics
    moments: RunningMoments = NOTHING_SEEN


def compute_advantages(
    config: AdvantageConfig,
    inputs: AdvantageInputs,
    *,
    kl: KlRewardConfig | None = None,
    kl_coefficient: float | None = None,
    all_sum: AllSum = on_one_rank,
) -> Advantages:
    """Compute the configured advantages of a batch.

    Args:
        config: the estimator.
        inputs: the batch.
        kl: KL in the reward, if any.
        kl_coefficient: the controller's present value; absent, the config's.
        all_sum: sums a tensor across ranks, where ranks hold different groups; used by whitening.

    Raises:
        ValueError: the estimator needs an input that is None.
    """
    token_kl, coefficient, observed = None, 0.0, None
    if kl is not None:
        token_kl, observed = _token_kl(kl, inputs)
        coefficient = kl.coefficient if kl_coefficient is None else kl_coefficient
    charge = None if token_kl is None else coefficient * token_kl
    order = "before_baseline" if kl is None else kl.order
    if isinstance(config, configs.ReinforceConfig | configs.ReinforcePlusPlusConfig) and config.follows_the_run:
        inputs = replace(inputs, moments=inputs.moments.updated(_compared(inputs, charge, order).cpu()))
    raw, targets = _estimate(config, inputs, charge, order)
    mask = inputs.sequences.response_mask
    advantages = torch.where(mask, raw, 0.0)
    if config.whiten is not None:
        advantages = whiten(advantages, mask, config.whiten, all_sum)
    metrics = _metrics(raw, inputs)
    if config.clip is not None:
        metrics["advantage_clip_fraction"] = share(advantages.abs() > config.clip, mask)
        advantages = advantages.clamp(-config.clip, config.clip)
    return Advantages(advantages, targets, observed, metrics, inputs.moments)


def _token_kl(kl: KlRewardConfig, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    value = kl_estimate(
        _given(inputs.old_log_probs, "old_log_probs").detach(),
        _given(inputs.ref_log_probs, "ref_log_probs"),
        estimator=kl.estimator,
        log_ratio_bounds=kl.log_ratio_bounds,
        value_clamp=kl.value_clamp,
    )
    value = torch.where(inputs.sequences.response_mask, value, 0.0)
    _, observed = subtract_kl_from_rewards(torch.zeros_like(value), value, inputs.sequences, 0.0)
    return value, observed


def _estimate(
    config: AdvantageConfig, inputs: AdvantageInputs, charge: Tensor | None, order: str
) -> tuple[Tensor, Tensor | None]:
    match config:
        case configs.GaeConfig():
            return returns.gae(
                _token_rewards(inputs, _bounded(inputs.scores, config), charge),
                _given(inputs.values, "values"),
                inputs.sequences,
                gamma=config.gamma,
                lam=config.lam,
                masked_tokens=config.masked_tokens,
            )
        case configs.ReinforceConfig() | configs.ReinforcePlusPlusConfig():
            scores = _bounded(_standardised(config, inputs, charge, order), config)
            rewards = _token_rewards(inputs, scores, charge)
            to_go = returns.discounted_returns(
                rewards, inputs.sequences, gamma=config.gamma, masked_tokens=config.masked_tokens
            )
            return to_go, to_go
        case configs.TurnReinforceConfig():
            rewards = _token_rewards(inputs, _bounded(inputs.scores, config), _charge_at_turn_ends(inputs, charge))
            to_go = returns.turn_returns(rewards, inputs.sequences, gamma=config.gamma)
            return to_go, to_go
        case configs.RemaxConfig():
            rewards = _token_rewards(inputs, _bounded(inputs.scores, config), charge)
            return returns.remax(rewards, _given(inputs.baselines, "baselines"), inputs.sequences)
        case configs.TokenBaselineConfig():
            old_log_probs = _given(inputs.old_log_probs, "old_log_probs")
            squares = _given(inputs.sum_pi_squared, "sum_pi_squared")
            return optimal_token_baseline(
                _token_rewards(inputs, _bounded(inputs.scores, config), charge),
                score_energy(old_log_probs, squares, inputs.importance_weights),
                inputs.sequences,
                Groups.of(_given(inputs.group_index, "group_index")),
                positions=config.positions,
                drop_tail=config.drop_tail,
                epsilon=config.epsilon,
            )
        case _:
            return _outcome(config, inputs, charge, order), None


def _outcome(config: AdvantageConfig, inputs: AdvantageInputs, charge: Tensor | None, order: str) -> Tensor:
    """Compare whole sequences, then give each token its sequence's advantage."""
    sequences, scores = inputs.sequences, inputs.scores.float()
    if inputs.token_rewards is not None:
        # Rewards per token count wherever they sit, sampled tokens or not, as the environment gave them.
        scores = sequences.with_mask(torch.ones_like(sequences.response_mask)).sum(inputs.token_rewards.float())
    if charge is not None and order == "before_baseline":
        scores = scores - sequences.sum(charge)
    shaped = _bounded(_compare_episodes(config, scores, inputs), config)
    if charge is None or order == "before_baseline":
        return sequences.spread(shaped) * sequences.response_mask
    rewards = returns.rewards_at_last_token(shaped, sequences) - charge
    return suffix_sum(rewards, sequences) * sequences.response_mask


def _compare_episodes(config: AdvantageConfig, scores: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Compare episodes, and give each branch [S] the advantage of its episode."""
    lengths, components = inputs.sequences.lengths, inputs.component_scores
    if inputs.episode_index is None:
        return _compare(config, scores, lengths, inputs)
    episodes = Groups.of(inputs.episode_index)
    first = episodes.first
    if components is not None:
        components = torch.stack([episodes.mean(each)[first] for each in components.unbind(1)], 1)
    group_index = _given(inputs.group_index, "group_index")[first]
    of_episodes = replace(inputs, group_index=group_index, component_scores=components)
    compared = _compare(config, episodes.mean(scores)[first], episodes.sum(lengths)[first], of_episodes)
    return compared[episodes.index]


def _compare(config: AdvantageConfig, scores: Tensor, lengths: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Compare members of groups: scores [N] and sampled tokens [N] of each."""
    group_index = _given(inputs.group_index, "group_index")
    members = Groups.of(group_index)
    match config:
        case configs.GrpoConfig():
            if not config.normalise_by_std:
                return groups.centred(scores, members, group_of_one=config.group_of_one)
            return groups.grpo(scores, members, epsilon=config.epsilon, group_of_one=config.group_of_one)
        case configs.DrGrpoConfig() | configs.ReinforceBaselineConfig():
            return groups.centred(scores, members, group_of_one=config.group_of_one)
        case configs.PassAtKConfig():
            return groups.grpo_passk(scores, members, normalise_by_std=config.normalise_by_std, epsilon=config.epsilon)
        case configs.RlooConfig():
            return groups.rloo(scores, members, group_of_one=config.group_of_one)
        case configs.OpoConfig():
            return groups.opo(scores, lengths, members, group_of_one=config.group_of_one)
        case configs.GpgConfig():
            return groups.gpg(
                scores,
                members,
                divisor=config.divisor,
                scale_over=config.scale_over,
                group_of_one=config.group_of_one,
            )
        case configs.GdpoConfig():
            components = _given(inputs.component_scores, "component_scores")
            weights = None if config.weights is None else components.new_tensor(config.weights)
            return groups.gdpo(
                components, members, weights=weights, epsilon=config.epsilon, group_of_one=config.group_of_one
            )
        case configs.StepReinforceConfig():
            return agentic.step_reinforce(
                _given(inputs.steps, "steps"),
                torch.zeros_like(group_index) if config.over == "batch" else group_index,
                gamma=config.gamma,
                divide_by_std=config.divide_by_std,
                epsilon=config.epsilon,
            )
        case configs.GigpoConfig():
            return agentic.gigpo(
                _given(inputs.steps, "steps"),
                group_index,
                gamma=config.gamma,
                episode_weight=config.episode_weight,
                step_weight=config.step_weight,
                divide_by_std=config.divide_by_std,
                epsilon=config.epsilon,
            )
        case _:
            raise AssertionError(f"{config.kind} is not an estimator of whole sequences")


def _bounded(scores: Tensor, config: AdvantageConfig) -> Tensor:
    return scores if config.score_clip is None else scores.clamp(*config.score_clip)


def _standardised(
    config: configs.ReinforceConfig | configs.ReinforcePlusPlusConfig,
    inputs: AdvantageInputs,
    charge: Tensor | None,
    order: str,
) -> Tensor:
    scores = inputs.scores.float()
    if config.baseline == "none" and not config.divide_by_std:
        return scores
    if config.follows_the_run:
        exact = scores.double()
        if config.baseline == "batch_mean":
            exact = exact - inputs.moments.mean
        if config.divide_by_std:
            exact = exact / (inputs.moments.std + BATCH_STD_EPSILON)
        return exact.float()
    compared = _compared(inputs, charge, order)
    if config.baseline == "batch_mean":
        # Within their bounds: of equal scores the mean is that score, which rounding may miss.
        scores = scores - compared.mean().clamp(compared.min(), compared.max())
    if config.divide_by_std:
        spread = compared.std() if len(compared) > 1 else compared.new_zeros(())
        scores = scores / (spread + BATCH_STD_EPSILON)
    return scores


def _compared(inputs: AdvantageInputs, charge: Tensor | None, order: str) -> Tensor:
    """Return the rewards that baseline and deviation are of, one of each episode."""
    compared = inputs.scores.float()
    if charge is not None and order == "before_baseline":
        compared = compared - inputs.sequences.sum(charge)
    if inputs.episode_index is not None:
        episodes = Groups.of(inputs.episode_index)
        compared = episodes.mean(compared)[episodes.first]
    return compared


def _token_rewards(inputs: AdvantageInputs, scores: Tensor, charge: Tensor | None) -> Tensor:
    rewards = inputs.token_rewards
    if rewards is None and inputs.turn_rewards is not None:
        rest = scores.float() - inputs.sequences.sum(inputs.turn_rewards)
        rewards = returns.rewards_at_last_token(rest, inputs.sequences) + inputs.turn_rewards
    elif rewards is None:
        rewards = returns.rewards_at_last_token(scores, inputs.sequences)
    return rewards if charge is None else rewards - charge


def _charge_at_turn_ends(inputs: AdvantageInputs, charge: Tensor | None) -> Tensor | None:
    """Move each turn's KL to its last token, the only one whose reward a turn reads."""
    if charge is None:
        return None
    turns = inputs.sequences.segments
    return torch.where(turns.is_last_sampled, turns.spread(turns.sum(charge)), 0.0)


def _metrics(advantages: Tensor, inputs: AdvantageInputs) -> Metrics:
    mask, scores = inputs.sequences.response_mask, inputs.scores
    metrics: Metrics = {
        "advantage": mean_over(advantages, mask),
        "advantage_squared": mean_over(advantages.square(), mask),
        "score": mean_over(scores, torch.ones_like(scores, dtype=torch.bool)),
    }
    if inputs.group_index is not None:
        group_index = inputs.group_index
        if inputs.episode_index is not None:
            episodes = Groups.of(inputs.episode_index)
            scores, group_index = episodes.mean(scores)[episodes.first], group_index[episodes.first]
        members = Groups.of(group_index)
        # Each member contributes 1/size, so that a group counts once whatever its size.
        share_of_group = 1 / members.sizes
        flat = (members.std(scores) == 0).float()
        metrics["flat_group_fraction"] = Tally((flat * share_of_group).sum(), share_of_group.sum())
        metrics["group_std"] = Tally((members.std(scores) * share_of_group).sum(), share_of_group.sum())
    return metrics


def _given(value: Value | None, name: str) -> Value:
    if value is None:
        raise ValueError(f"the advantage estimator needs {name}, which was not given")
    return value
