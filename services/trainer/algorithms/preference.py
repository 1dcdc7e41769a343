"""Losses on pairs of answers and on answers with a label: DPO, IPO, conservative DPO, reward-model pairs, KTO."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class PreferenceLoss:
    """The loss of P pairs.

    Args:
        loss: scalar with gradient.
        chosen_rewards: [P] implicit rewards of the preferred answers, without gradient.
        rejected_rewards: [P] those of the others.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
) -> PreferenceLoss:
    """Compute direct preference optimisation on summed log-probs, all [P].

    With z the difference of the two log-ratios to the reference and s the label smoothing (conservative DPO):
    ``-(1-s) log sigmoid(beta z) - s log sigmoid(-beta z)``; IPO: ``(z - 1/(2 beta))^2``.

    Source: Rafailov et al., DPO, 2023; Mitchell, cDPO, 2023; Azar et al., IPO, 2023.
    """
    chosen, rejected = chosen_log_probs - ref_chosen_log_probs, rejected_log_probs - ref_rejected_log_probs
    margin = chosen - rejected
    if ipo:
        losses = (margin - 1 / (2 * beta)).square()
    else:
        right, wrong = functional.logsigmoid(beta * margin), functional.logsigmoid(-beta * margin)
        losses = -(1 - label_smoothing) * right - label_smoothing * wrong
    return PreferenceLoss(losses.mean(), (beta * chosen).detach(), (beta * rejected).detach())


def pairwise_loss(chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute a reward model's ``mean -log sigmoid(chosen - rejected - margin)`` over [P] pairs.

    The log-exp form ``log(1 + exp(rejected - chosen))`` is the same function.

    Source: Ouyang et al., InstructGPT, 2022; Touvron et al., Llama 2, 2023 (margin).
    """
    difference = chosen_scores - rejected_scores
    return functional.softplus(-(difference if margin is None else difference - margin)).mean()


def kto_loss(
    log_ratios: Tensor,
    is_desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute Kahneman-Tversky optimisation's loss: the mean over B answers, a scalar with gradient.

    With r an answer's log-ratio and z its reference point: ``desirable_weight (1 - sigmoid(beta (r - z)))`` where it is
    desirable, else ``undesirable_weight (1 - sigmoid(beta (z - r)))``.

    Args:
        log_ratios: [B] summed log-probs under the policy, less those under the reference.
        is_desirable: [B] bool.
        reference_point: [B] nats; no gradient goes through it.
        beta: how strongly the policy is held to the reference.
        desirable_weight: of desirable answers.
        undesirable_weight: of the others.

    Source: Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024, equation 7.
    """
    gains = beta * (log_ratios - reference_point.detach())
    # 1 - sigmoid(x) is sigmoid(-x), without its rounding near 1.
    losses = torch.where(
        is_desirable, desirable_weight * torch.sigmoid(-gains), undesirable_weight * torch.sigmoid(gains)
    )
    return losses.mean()


def kl_of_mismatched(log_ratios: Tensor) -> Tensor:
    """Estimate the policy's KL from the reference by log-ratios [B] of answers to other prompts: a scalar, at least 0.

    Source: the same, section 3.2: a biased estimate, which is clamped, and through which no gradient goes.
    """
    return log_ratios.detach().mean().clamp(min=0)


def matched_reference_points(log_ratios: Tensor, is_desirable: Tensor) -> Tensor:
    """Take as each answer's reference point [B] the mean log-ratio of those of the other label, at least 0.

    Without any of the other label it is 0.

    Source: the same, in the form for equally many answers of both labels.
    """
    known = log_ratios.detach()
    desirable, others = is_desirable.to(known.dtype), (~is_desirable).to(known.dtype)
    of_desirable = ((known * desirable).sum() / desirable.sum().clamp(min=1)).clamp(min=0)
    of_others = ((known * others).sum() / others.sum().clamp(min=1)).clamp(min=0)
    return torch.where(is_desirable, of_others, of_desirable)
