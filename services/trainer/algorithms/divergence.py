"""How far a student's distribution is from a teacher's, at each token.

With p the student's distribution and q the teacher's, over all tokens or over the teacher's ``top_k`` likeliest, among
which both then add up to 1. Temperatures divide logits before that; no factor makes up for them.

Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015; Ko et al., DistiLLM, 2024 (skewed); Wu et
al., Rethinking Kullback-Leibler Divergence in Knowledge Distillation, 2024 (adaptive); ROLL,
roll/pipeline/distill/various_divergence.py, whose options these are.
"""

import math

import torch
from torch import Tensor

from flotilla.shared.config.sections.job import DivergenceConfig

FORWARD = DivergenceConfig()
"""KL(teacher, student) over all tokens."""


def divergence_of(logits: Tensor, teacher_logits: Tensor, measure: DivergenceConfig = FORWARD) -> Tensor:
    """Compute the divergence of each row, with gradient by the student's logits alone.

    Args:
        logits: [N, V] of the student, in at least float32.
        teacher_logits: [N, V] of the teacher, in at least float32.
        measure: what is computed.

    Returns:
        [N] nats.
    """
    theirs = teacher_logits.detach() / (measure.temperature * measure.teacher_temperature)
    if measure.top_k is not None and measure.top_k < theirs.shape[-1]:
        theirs, likeliest = theirs.topk(measure.top_k, dim=-1)
        logits = logits.gather(-1, likeliest)
    log_p = torch.log_softmax(logits / measure.temperature, -1)
    log_q = torch.log_softmax(theirs, -1)
    match measure.kind:
        case "forward_kl":
            return _kl(log_q, log_p)
        case "reverse_kl":
            return _kl(log_p, log_q)
        case "skewed_forward_kl":
            return _kl(log_q, _mixed(log_q, log_p, measure.skew))
        case "skewed_reverse_kl":
            return _kl(log_p, _mixed(log_p, log_q, measure.skew))
        case "js_divergence":
            middle = _mixed(log_p, log_q, 0.5)
            return (_kl(log_q, middle) + _kl(log_p, middle)) / 2
        case "adaptive_kl":
            share = _share_of_head(log_p.detach().exp(), log_q.exp(), measure.tail)
            return share * _kl(log_q, log_p) + (1 - share) * _kl(log_p, log_q)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Compute sum of a (log a - log b); tokens that a excludes add nothing."""
    a = log_a.exp()
    return torch.where(a > 0, a * (log_a - log_b), 0.0).sum(-1)


def _mixed(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """Compute log(share a + (1 - share) b)."""
    return torch.logaddexp(log_a + math.log(share), log_b + math.log1p(-share))


def _share_of_head(p: Tensor, q: Tensor, tail: float) -> Tensor:
    """Compute which part of |p - q| is at the teacher's likeliest tokens: all but the least likely, ``tail`` in sum."""
    sorted_q, order = q.sort(-1)
    gaps = (sorted_q - p.gather(-1, order)).abs()
    total = gaps.sum(-1)
    in_head = (gaps * (sorted_q.cumsum(-1) > tail)).sum(-1)
    return torch.where(total > 0, in_head / total, 0.5)
