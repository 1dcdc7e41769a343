"""Correction for the gap between the policy that sampled and the one the loss takes as old.

Everything here is without gradient. x = numerator - rollout_log_probs per token; masked tokens never count.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flotilla.services.trainer.algorithms.aggregation import Denominators
from flotilla.services.trainer.algorithms.metrics import Metrics, mean_over, share
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import CorrectionConfig, RejectionConfig, VetoConfig, WeightConfig

SMALLEST_PROBABILITY = 1e-6
MAX_EXPONENT = 80.0
"""Bound on a metric's exponent: float32 overflows at 88."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What a correction does to a micro-batch.

    Args:
        weights: [T] float32, multiplies the token loss; 0 where the original mask is False.
        response_mask: [T] bool, what rejection left of the mask.
        metrics: reject fractions and weight statistics.
        keeps_denominators: whether rejected tokens stay in every mean, with loss 0.
    """

    weights: Tensor
    response_mask: Tensor
    metrics: Metrics
    keeps_denominators: bool = False


def log_ratios(x: Tensor, sequences: PackedSequences, level: str) -> Tensor:
    """Share x [T] at a level: as it is, its mean over a segment or sequence (geometric), or its sum over a sequence."""
    match level:
        case "token":
            return x
        case "segment":
            return sequences.segments.spread(sequences.segments.mean(x))
        case "geometric":
            return sequences.spread(sequences.mean(x))
        case "sequence":
            return sequences.spread(sequences.sum(x))
        case _:
            raise ValueError(f"level must be token, segment, geometric or sequence, got {level!r}")


def importance_weights(
    x: Tensor, sequences: PackedSequences, config: WeightConfig, *, log_ratio_clamp: float | None = 20.0
) -> Tensor:
    """Compute exp(x) at the config's level, bounded.

    Args:
        x: [T] nats, numerator's less sampler's log-prob.
        sequences: which tokens count.
        config: level and bounds; ``batch_normalise`` is applied by the caller, who knows the whole mini-batch.
        log_ratio_clamp: bound on the shared |x| before the exponential.

    Returns:
        [T] float32 without gradient; 0 where the mask is False.

    Source: Ionides, Truncated Importance Sampling, JCGS 17(2), 2008; IcePop: Ling team, 2025.
    """
    ratio = log_ratios(x.detach().float(), sequences, config.level)
    ratio = (ratio if log_ratio_clamp is None else ratio.clamp(-log_ratio_clamp, log_ratio_clamp)).exp()
    if config.outside == "zero":
        ratio = torch.where(_within(ratio, config.lower, config.upper), ratio, 0.0)
    elif config.lower is not None or config.upper is not None:
        ratio = ratio.clamp(min=config.lower, max=config.upper)
    return torch.where(sequences.response_mask, ratio, 0.0)


def kept_by(
    rejection: RejectionConfig,
    numerator_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequences: PackedSequences,
    *,
    log_ratio_clamp: float | None = 20.0,
) -> Tensor:
    """Return which tokens [T] pass one rejection test; tokens outside the mask do not influence it."""
    x = numerator_log_probs.detach().float() - rollout_log_probs.float()
    x = x if log_ratio_clamp is None else x.clamp(-log_ratio_clamp, log_ratio_clamp)
    statistic = _statistic(rejection.statistic, x, numerator_log_probs.detach().float(), rollout_log_probs.float())
    if rejection.scope != "token":
        spans = sequences if rejection.scope == "sequence" else sequences.segments
        statistic = spans.spread(_reduced(statistic, spans, rejection.reduce))
    if rejection.statistic == "ratio":
        statistic = statistic if log_ratio_clamp is None else statistic.clamp(-log_ratio_clamp, log_ratio_clamp)
        statistic = statistic.exp()
    return _within(statistic, rejection.lower, rejection.upper)


def kept_by_veto(veto: VetoConfig, x: Tensor, sequences: PackedSequences) -> Tensor:
    """Return which tokens [T] belong to sequences none of whose sampled tokens lies outside the veto's band."""
    bad = sequences.response_mask & ~_within(x.detach().float().exp(), veto.lower, veto.upper)
    return sequences.spread(sequences.sum(bad.float())) == 0


def correct(
    config: CorrectionConfig, numerator_log_probs: Tensor, rollout_log_probs: Tensor, sequences: PackedSequences
) -> Correction:
    """Weigh, reject and veto: tests are combined by AND, each over the config's ``statistics_over``.

    Args:
        config: the correction section.
        numerator_log_probs: [T] nats, of the old or the current policy; detached here.
        rollout_log_probs: [T] nats, recorded when the token was sampled.
        sequences: the original mask and layout.

    Returns:
        Weights before batch normalisation, the surviving mask, metrics under ``correction/``.
    """
    mask = sequences.response_mask
    x = torch.where(mask, numerator_log_probs.detach().float() - rollout_log_probs.float(), 0.0)
    surviving, counted = mask, sequences
    for of_tokens in (True, False):
        for rejection in config.rejections:
            if (rejection.scope == "token") is of_tokens:
                surviving = surviving & kept_by(
                    rejection, numerator_log_probs, rollout_log_probs, counted, log_ratio_clamp=config.log_ratio_clamp
                )
        if of_tokens and config.statistics_over == "surviving":
            counted = sequences.with_mask(surviving)
    if config.veto is not None:
        surviving = surviving & kept_by_veto(config.veto, x, sequences)
    metrics: Metrics = {
        "correction/rejected_fraction": share(~surviving, mask),
        "correction/rejected_sequence_fraction": share(
            sequences.with_mask(surviving).lengths < sequences.lengths, sequences.is_nonempty
        ),
    }
    weights = mask.float()
    if config.weight is not None:
        weights = importance_weights(x, counted, config.weight, log_ratio_clamp=config.log_ratio_clamp)
        metrics |= _weight_metrics(weights, x, counted, config)
    return Correction(weights, surviving, metrics, config.denominators == "original")


def mismatch_metrics(numerator_log_probs: Tensor, rollout_log_probs: Tensor, sequences: PackedSequences) -> Metrics:
    """Tally how far numerator and sampler are apart, whether or not anything is corrected.

    Per token: KL(sampler || numerator) by k1 and k3, chi-square, difference of probabilities; per sequence: log
    perplexities under both, and chi-square of the whole answer.
    """
    mask, nonempty = sequences.response_mask, sequences.is_nonempty
    numerator, rollout = numerator_log_probs.detach().float(), rollout_log_probs.float()
    x = torch.where(mask, numerator - rollout, 0.0)
    bounded, squared = x.clamp(-MAX_EXPONENT, MAX_EXPONENT), 2 * x.clamp(-20.0, 20.0)
    log_ppl, rollout_log_ppl = -sequences.mean(numerator), -sequences.mean(rollout)
    return {
        "correction/kl": mean_over(-x, mask),
        "correction/k3_kl": mean_over(bounded.exp() - 1 - bounded, mask),
        "correction/chi2_token": mean_over(squared.exp() - 1, mask),
        "correction/probability_difference": mean_over((numerator.exp() - rollout.exp()).abs(), mask),
        "correction/chi2_seq": mean_over((2 * sequences.sum(x).clamp(-20.0, 20.0)).exp() - 1, nonempty),
        "correction/training_log_ppl": mean_over(log_ppl, nonempty),
        "correction/rollout_log_ppl": mean_over(rollout_log_ppl, nonempty),
        "correction/log_ppl_abs_diff": mean_over((log_ppl - rollout_log_ppl).abs(), nonempty),
    }


def normaliser_parts(
    correction: Correction, sequences: PackedSequences, weight: WeightConfig | None
) -> tuple[Tensor, Tensor]:
    """Sum and count the weights whose mean batch normalisation divides by, for one micro-batch."""
    if weight is None or not weight.batch_normalise:
        zero = torch.zeros((), device=sequences.index.device)
        return zero, zero
    shares = 1.0 if sequences.shares is None else sequences.shares
    if weight.level in ("token", "segment"):
        tokens = 1.0 if sequences.shares is None else sequences.spread(sequences.shares)
        return (correction.weights * tokens).sum(), (sequences.lengths * shares).sum()
    return (sequences.mean(correction.weights) * shares).sum(), (sequences.is_nonempty * shares).sum().float()


def normalised(weights: Tensor, denominators: Denominators) -> Tensor:
    """Divide weights by their mini-batch mean; unchanged where that is not positive."""
    mean = denominators.weight_sum / denominators.weight_count.clamp(min=1)
    return torch.where(mean > 1e-8, weights / mean, weights)


def shared_weights(weights: Tensor, sequences: PackedSequences) -> Tensor:
    """Give every token [T] the geometric mean of its sequence's weights, for losses of whole sequences (GMPO)."""
    return sequences.spread(sequences.mean((weights + 1e-10).log()).exp())


def _within(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    inside = torch.ones_like(values, dtype=torch.bool)
    if lower is not None:
        inside = inside & (values >= lower)
    if upper is not None:
        inside = inside & (values <= upper)
    return inside


def _statistic(name: str, x: Tensor, numerator: Tensor, rollout: Tensor) -> Tensor:
    match name:
        case "ratio":
            return x
        case "k1":
            return -x
        case "k2":
            return 0.5 * x.square()
        case "k3":
            return x.exp() - 1 - x
        case "reverse_k3":
            return (-x).exp() - 1 + x
        case "probability_difference":
            return numerator.exp() - rollout.exp()
        case "tv":
            return (numerator.exp() - rollout.exp()).abs()
        case "binary_kl":
            return binary_kl(rollout, numerator)
        case _:
            raise ValueError(f"unknown rejection statistic {name!r}")


def binary_kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Compute KL(p || q) [T] of two coins, taken or not taken, from the taken token's log-probabilities [T]."""
    p = log_probs.exp().clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    q = other_log_probs.exp().clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
    return p * (p.log() - q.log()) + (1 - p) * ((1 - p).log() - (1 - q).log())


def _reduced(statistic: Tensor, spans: PackedSequences, reduce: str) -> Tensor:
    match reduce:
        case "mean":
            return spans.mean(statistic)
        case "sum":
            return spans.sum(statistic)
        case _:
            lowest = torch.full((spans.count,), -torch.inf, device=statistic.device)
            masked = torch.where(spans.response_mask, statistic, -torch.inf)
            return lowest.scatter_reduce(0, spans.index, masked, "amax")


def _weight_metrics(weights: Tensor, x: Tensor, sequences: PackedSequences, config: CorrectionConfig) -> Metrics:
    assert config.weight is not None
    raw = importance_weights(
        x,
        sequences,
        WeightConfig(level=config.weight.level, upper=None),
        log_ratio_clamp=config.log_ratio_clamp,
    )
    mask, bounds = sequences.response_mask, config.weight
    above, below = ~_within(raw, None, bounds.upper), ~_within(raw, bounds.lower, None)
    if bounds.level in ("geometric", "sequence"):
        # One weight per sequence: a fraction of sequences, not of tokens.
        mask, above, below = sequences.is_nonempty, sequences.sum(above.float()) > 0, sequences.sum(below.float()) > 0
    return {
        "correction/weight": mean_over(weights, sequences.response_mask),
        "correction/weight_squared": mean_over(weights.square(), sequences.response_mask),
        "correction/above_fraction": share(above, mask),
        "correction/below_fraction": share(below, mask),
    }
