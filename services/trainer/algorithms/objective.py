"""One micro-batch's loss and metrics: correction, policy loss, entropy, KL and supervised term, put together.

Losses and metrics of micro-batches and ranks add up (see ``aggregation`` and ``metrics``): the trainer counts
``denominators_of`` over the whole mini-batch first, sums them across ranks, then calls ``policy_objective`` per
micro-batch and lets gradients accumulate.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import Denominators, aggregate, count_sampled
from flotilla.services.trainer.algorithms.importance import (
    Correction,
    correct,
    mismatch_metrics,
    normalised,
    normaliser_parts,
    shared_weights,
)
from flotilla.services.trainer.algorithms.kl import kl_loss
from flotilla.services.trainer.algorithms.losses import TokenLoss, policy_loss, select_by_covariance
from flotilla.services.trainer.algorithms.metrics import Metrics, mean_over, once, share
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.algorithms.value import value_loss
from flotilla.shared.config.sections.algorithm import AlgorithmConfig, KlLossConfig, SupervisedConfig, ValueLossConfig
from flotilla.shared.config.sections.policy_loss import ClipCovConfig, KlCovConfig


@dataclass(frozen=True, eq=False)
class TokenFigures:
    """What a loss made of each token, without gradient.

    Args:
        log_probs: [T] nats, under the weights being trained.
        weights: [T], what the token's loss was multiplied with; 0 where it was rejected or not sampled.
        clipped: [T] bool, whether a clip, gate or trust region changed its gradient.
    """

    log_probs: Tensor
    weights: Tensor
    clipped: Tensor


@dataclass(frozen=True, eq=False)
class Objective:
    """A micro-batch's share.

    Args:
        loss: scalar with gradient; shares of all micro-batches and ranks add up to the mini-batch's loss.
        metrics: sums and counts, to be combined over micro-batches and ranks before dividing.
        tokens: figures of the policy loss alone; None of a critic's objective.
    """

    loss: Tensor
    metrics: Metrics
    tokens: TokenFigures | None = None


def denominators_of(
    config: AlgorithmConfig,
    *,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequences: PackedSequences,
) -> Denominators:
    """Count what one micro-batch adds to its mini-batch's denominators, after rejection; no forward pass is needed.

    Args:
        config: the algorithm section.
        old_log_probs: [T] nats, the ratio's denominator.
        rollout_log_probs: [T] nats of the sampler.
        sequences: S of them in T tokens.

    Returns:
        This micro-batch's part: ``Denominators.total`` adds parts, ``as_tensor`` is for summing across ranks.
    """
    correction = config.resolved_correction
    if correction is None or correction.numerator == "current":
        return count_sampled(sequences)
    corrected = correct(correction, old_log_probs, rollout_log_probs, sequences)
    survivors = sequences.with_mask(corrected.response_mask) if correction.denominators == "surviving" else sequences
    counted = count_sampled(survivors)
    weight_sum, weight_count = normaliser_parts(corrected, sequences, correction.weight)
    return Denominators(counted.num_tokens, counted.num_sequences, weight_sum, weight_count)


def selected_tokens(
    config: AlgorithmConfig,
    *,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """Choose, over a whole mini-batch, the tokens that clip_cov or kl_cov treats differently.

    Args:
        config: the algorithm section.
        old_log_probs: [T] nats, of all tokens of the mini-batch.
        advantages: [T].
        response_mask: [T] bool.
        generator: draws for clip_cov.

    Returns:
        [T] bool, to be cut into micro-batches like the tokens; None for losses that select nothing beforehand.
    """
    loss = config.policy_loss
    if not isinstance(loss, ClipCovConfig | KlCovConfig) or loss.covariance_of == "current":
        return None
    return select_by_covariance(loss, old_log_probs, advantages, response_mask, generator=generator)


def policy_objective(
    config: AlgorithmConfig,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    sequences: PackedSequences,
    denominators: Denominators,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    scores: Tensor | None = None,
    sequence_weights: Tensor | None = None,
    selected: Tensor | None = None,
    kl_coefficient: float | None = None,
    generator: torch.Generator | None = None,
) -> Objective:
    """Compute a micro-batch's share of ``L_policy - c_H H + c_KL KL + c_S L_supervised``.

    Args:
        config: the algorithm section.
        log_probs: [T] nats with gradient, packed.
        old_log_probs: [T] nats, what ``config.old_log_probs`` says.
        rollout_log_probs: [T] nats of the sampler.
        advantages: [T].
        sequences: those of this micro-batch, S of them in T tokens.
        denominators: of the whole mini-batch.
        ref_log_probs: [T] nats of the reference; needed if the KL is in the loss.
        entropy: [T] nats; needed, with gradient, if ``entropy_coefficient`` is above 0, else only reported.
        scores: [S] rewards; needed by topr and by the supervised term.
        sequence_weights: [S] loss weights (see ``sample_weights``); absent, 1.
        selected: [T] bool, from ``selected_tokens``; needed by clip_cov and kl_cov with ``covariance_of: old``.
        kl_coefficient: the controller's present value; absent, the config's.
        generator: draws for clip_cov.

    Returns:
        Loss and metrics. Positions where the mask is False get gradient 0, whatever they hold.

    Raises:
        ValueError: an input that the config needs is missing.
    """
    mask = sequences.response_mask
    # Padding may hold anything: a NaN there would come back through the gradient of an exponential.
    log_probs, old_log_probs, rollout_log_probs, advantages = (
        torch.where(mask, values, 0.0) for values in (log_probs, old_log_probs, rollout_log_probs, advantages)
    )
    correction = _correction(config, log_probs, old_log_probs, rollout_log_probs, sequences, denominators)
    survivors = sequences
    if correction is not None and not correction.keeps_denominators:
        survivors = sequences.with_mask(correction.response_mask)
    numerator = log_probs if config.old_log_probs == "rollout" else old_log_probs
    metrics = mismatch_metrics(numerator, rollout_log_probs, sequences)
    if correction is not None:
        metrics |= correction.metrics

    token_loss = policy_loss(
        config.policy_loss,
        log_probs,
        old_log_probs,
        advantages,
        survivors,
        scores=scores,
        selected=selected,
        generator=generator,
    )
    weights = _loss_weights(correction, survivors, sequence_weights, token_loss.per_sequence)
    values = token_loss.values if weights is None else token_loss.values * weights
    loss = aggregate(values, survivors, denominators, config.aggregation)
    metrics |= _policy_metrics(token_loss, log_probs, old_log_probs, survivors.response_mask)
    metrics["policy_loss"] = once(loss)
    loss = config.policy_coefficient * loss
    terms = _Terms(config, survivors, denominators, metrics)
    if entropy is not None:
        metrics["entropy"] = mean_over(entropy, mask)
    if config.entropy_coefficient:
        loss = loss - terms.entropy(entropy)
    if isinstance(config.kl, KlLossConfig):
        loss = loss + terms.kl(config.kl, log_probs, old_log_probs, ref_log_probs, kl_coefficient)
    if config.supervised is not None:
        loss = loss + terms.supervised(config.supervised, log_probs, scores)
    metrics["loss"] = once(loss)
    return Objective(loss, metrics, _token_figures(token_loss, log_probs, weights, survivors.response_mask))


@dataclass(frozen=True, eq=False)
class _Terms:
    """The terms beside the policy loss: each gives its weighted share, and writes its metrics."""

    config: AlgorithmConfig
    sequences: PackedSequences
    denominators: Denominators
    metrics: Metrics

    def entropy(self, entropy: Tensor | None) -> Tensor:
        return self.config.entropy_coefficient * self._share(_given(entropy, "entropy"))

    def kl(
        self,
        section: KlLossConfig,
        log_probs: Tensor,
        old_log_probs: Tensor,
        ref_log_probs: Tensor | None,
        coefficient: float | None,
    ) -> Tensor:
        mask = self.sequences.response_mask
        kl = kl_loss(log_probs, torch.where(mask, _given(ref_log_probs, "ref_log_probs"), 0.0), section, old_log_probs)
        share = self._share(kl)
        self.metrics.update({"kl_loss": once(share), "kl": mean_over(kl, mask)})
        return (section.coefficient if coefficient is None else coefficient) * share

    def supervised(self, section: SupervisedConfig, log_probs: Tensor, scores: Tensor | None) -> Tensor:
        is_positive = self.sequences.spread(_given(scores, "scores")) > 0
        share = self._share(torch.where(is_positive, -log_probs, 0.0))
        self.metrics["supervised_loss"] = once(share)
        return section.coefficient * share

    def _share(self, values: Tensor) -> Tensor:
        return aggregate(values, self.sequences, self.denominators, self.config.aggregation)


def value_objective(
    config: ValueLossConfig,
    *,
    value_preds: Tensor,
    old_values: Tensor,
    returns: Tensor,
    sequences: PackedSequences,
    denominators: Denominators,
) -> Objective:
    """Compute a micro-batch's share of the critic's loss; arguments as in ``policy_objective``."""
    mask = sequences.response_mask
    value_preds, old_values, returns = (torch.where(mask, v, 0.0) for v in (value_preds, old_values, returns))
    token_loss = value_loss(value_preds, old_values, returns, clip=config.clip)
    loss = aggregate(token_loss.values, sequences, denominators, config.aggregation)
    metrics: Metrics = {"value_loss": once(loss), "value": mean_over(value_preds, mask)}
    if token_loss.clipped is not None:
        metrics["value_clip_fraction"] = share(token_loss.clipped, mask)
    return Objective(loss, metrics)


def _correction(
    config: AlgorithmConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequences: PackedSequences,
    denominators: Denominators,
) -> Correction | None:
    correction = config.resolved_correction
    if correction is None:
        return None
    numerator = log_probs if correction.numerator == "current" else old_log_probs
    corrected = correct(correction, numerator, rollout_log_probs, sequences)
    if correction.weight is None or not correction.weight.batch_normalise:
        return corrected
    return replace(corrected, weights=normalised(corrected.weights, denominators))


def _loss_weights(
    correction: Correction | None, sequences: PackedSequences, sequence_weights: Tensor | None, per_sequence: bool
) -> Tensor | None:
    """Join importance and sample weights [T]."""
    weights = None
    if correction is not None:
        weights = shared_weights(correction.weights, sequences) if per_sequence else correction.weights
        if correction.keeps_denominators:
            weights = torch.where(correction.response_mask, weights, 0.0)
    if sequence_weights is None:
        return weights
    spread = sequences.spread(sequence_weights)
    return spread if weights is None else spread * weights


def _token_figures(token_loss: TokenLoss, log_probs: Tensor, weights: Tensor | None, survived: Tensor) -> TokenFigures:
    clipped = torch.zeros_like(survived)
    for part in (token_loss.clipped, token_loss.clipped_lower):
        clipped = clipped if part is None else clipped | part
    used = torch.ones_like(log_probs) if weights is None else weights
    return TokenFigures(log_probs.detach(), torch.where(survived, used.detach(), 0.0), clipped & survived)


def _policy_metrics(token_loss: TokenLoss, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Metrics:
    x = log_probs.detach().float() - old_log_probs.float()
    metrics: Metrics = {"approx_kl": mean_over(-x, mask), "ratio": mean_over(x.clamp(-20, 20).exp(), mask)}
    if token_loss.clipped is not None:
        metrics["clip_fraction"] = share(token_loss.clipped, mask)
    if token_loss.clipped_lower is not None:
        metrics["clip_fraction_lower"] = share(token_loss.clipped_lower, mask)
    return metrics


def _given(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"the config needs {name}, which was not given")
    return value
