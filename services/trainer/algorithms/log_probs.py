"""Log-probabilities and entropy of taken tokens, from hidden states, a chunk of tokens at a time.

No [T, V] tensor ever exists: the forward pass keeps only the hidden states and one number per token, the backward
pass computes each chunk's logits again. Peak extra memory is a few [chunk, V] float32 buffers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """What the trainer needs of each taken token; all [T] float32.

    Args:
        log_probs: nats, with gradient.
        entropy: nats, of the whole next-token distribution, with gradient; None if not asked for.
        sum_pi_squared: sum over the vocabulary of p^2, without gradient; None if not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None


def log_probs_and_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK_TOKENS,
    *,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
) -> TokenStatistics:
    """Compute log softmax(hidden W^T / temperature) at the labels, and the entropy, differentiably and in chunks.

    Args:
        hidden: [T, H] last hidden states, already aligned: row t predicts labels[t].
        lm_head_weight: [V, H] output embedding.
        labels: [T] int64 taken tokens.
        temperature: of sampling; logits are divided by it, so that the trainer's policy is the sampler's.
        chunk: tokens whose logits are held at a time.
        with_entropy: whether the entropy is wanted, too.
        with_sum_pi_squared: whether sum p^2 is wanted (optimal token baseline).

    Raises:
        ValueError: temperature is not positive, or shapes do not agree.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or lm_head_weight.shape[1:] != hidden.shape[1:]:
        shapes = tuple(hidden.shape), tuple(lm_head_weight.shape), tuple(labels.shape)
        raise ValueError(f"want hidden [T, H], lm_head_weight [V, H], labels [T]; got {shapes}")
    log_probs, entropy, squares = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head_weight, labels, temperature, max(1, chunk), with_entropy, with_sum_pi_squared
    )
    return TokenStatistics(log_probs, entropy if with_entropy else None, squares if with_sum_pi_squared else None)


def statistics_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> TokenStatistics:
    """Compute the same from logits that already exist.

    Args:
        logits: [..., V].
        labels: [...] int64.
        temperature: divides the logits.

    Returns:
        [...] each, sum_pi_squared included.
    """
    log_all = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_probs = log_all.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    probabilities = log_all.exp()
    entropy = -torch.where(probabilities > 0, probabilities * log_all, 0.0).sum(-1)
    return TokenStatistics(log_probs, entropy, probabilities.detach().square().sum(-1))


class _ChunkedHead(torch.autograd.Function):
    """The output layer and its statistics; the backward pass repeats each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        with_squares: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs, log_normaliser, entropy, squares = (
            torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device) for _ in range(4)
        )
        for start in range(0, labels.numel(), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight, temperature)
            log_normaliser[rows] = logits.logsumexp(-1)
            log_probs[rows] = logits.gather(-1, labels[rows, None]).squeeze(-1) - log_normaliser[rows]
            if with_entropy or with_squares:
                probabilities = (logits - log_normaliser[rows, None]).exp_()
                if with_entropy:
                    entropy[rows] = log_normaliser[rows] - torch.einsum("tv,tv->t", probabilities, logits)
                if with_squares:
                    squares[rows] = torch.einsum("tv,tv->t", probabilities, probabilities)
        ctx.save_for_backward(hidden, weight, labels, log_normaliser, entropy)
        ctx.temperature, ctx.chunk, ctx.with_entropy = temperature, chunk, with_entropy
        ctx.mark_non_differentiable(squares)
        ctx.set_materialize_grads(False)
        return log_probs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_normaliser, entropy = ctx.saved_tensors
        of_log_probs, of_entropy = gradients[0], gradients[1] if ctx.with_entropy else None
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        of_hidden = torch.zeros_like(hidden) if wants_hidden else None
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        for start in range(0, labels.numel(), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            log_all = _logits(hidden[rows], weight, ctx.temperature).sub_(log_normaliser[rows, None])
            probabilities = log_all.exp()
            of_logits = torch.zeros_like(probabilities)
            if of_entropy is not None:
                # dH/dlogit = -p (log p + H); where p underflows to 0 the product is 0, as log p stays finite.
                of_logits = log_all.add_(entropy[rows, None]).mul_(probabilities).mul_(-of_entropy[rows, None])
            if of_log_probs is not None:
                of_logits.sub_(probabilities.mul_(of_log_probs[rows, None]))
                of_logits.scatter_add_(-1, labels[rows, None], of_log_probs[rows, None])
            of_logits = of_logits.div_(ctx.temperature).to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] = of_logits @ weight.to(hidden.dtype)
            if of_weight is not None:
                of_weight += of_logits.T @ hidden[rows]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.to(hidden.dtype).T).float().div_(temperature)
