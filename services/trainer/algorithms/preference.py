"""Losses on pairs of answers and on demonstrations: DPO, IPO, conservative DPO, reward-model pairs, supervised."""

from dataclasses import dataclass

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
