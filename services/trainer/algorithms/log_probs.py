"""Log-probabilities and entropy of taken tokens, and how far a teacher is there, from hidden states, by chunks.

The forward pass keeps the hidden states and one number per token, and the logits where all of them are small; else the
backward pass computes each chunk's logits again, and no [T, V] tensor ever exists. Peak extra memory is then a few
[chunk, V] float32 buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flotilla.services.trainer.algorithms.divergence import divergence_of

Diverge = Callable[[Tensor, Tensor], Tensor]
"""Computes a divergence [N] of the student's logits from the teacher's, [N, V] each, such as ``divergence_of``."""
CHUNK_TOKENS = 1024
KEPT_BYTES = 128 << 20
"""Logits of a forward pass up to this size are kept for the backward pass."""


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


class HeadKernels(Protocol):
    """What replaces a dozen operators on [T, V] by two; all tensors contiguous."""

    def token_statistics(
        self, logits: Tensor, labels: Tensor, temperature: float, outputs: tuple[Tensor, Tensor, Tensor, Tensor | None]
    ) -> None:
        """Write log-probability of the label, logarithm of the normaliser, entropy and sum of p^2, [T] each.

        Args:
            logits: [T, V], not yet divided by the temperature.
        """

    def statistics_backward(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        normalisers: Tensor,
        entropies: Tensor,
        gradients: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Turn logits [T, V] into the gradient by them, in place; given those by log-probability and by entropy."""


def log_probs_and_entropy(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    chunk: int = CHUNK_TOKENS,
    *,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
    kernels: HeadKernels | None = None,
) -> TokenStatistics:
    """Compute log softmax(hidden W^T / temperature) at the labels, and the entropy, differentiably and in chunks.

    Args:
        hidden: [T, H] last hidden states, already aligned: row t predicts labels[t].
        lm_head_weight: [V, H] output embedding.
        labels: [T] int64 taken tokens.
        temperature: of sampling, or [T, 1]; logits are divided by it, so that the trainer's policy is the sampler's.
        chunk: tokens whose logits are held at a time.
        with_entropy: whether the entropy is wanted, too.
        with_sum_pi_squared: whether sum p^2 is wanted (optimal token baseline).
        kernels: compute with these, which take one temperature; None: with torch's operators.

    Raises:
        ValueError: temperature is not positive, or shapes do not agree.
    """
    lowest = temperature if isinstance(temperature, float | int) else float(temperature.min()) if len(labels) else 1.0
    if lowest <= 0:
        raise ValueError(f"temperature must be positive, got {lowest}")
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or lm_head_weight.shape[1:] != hidden.shape[1:]:
        shapes = tuple(hidden.shape), tuple(lm_head_weight.shape), tuple(labels.shape)
        raise ValueError(f"want hidden [T, H], lm_head_weight [V, H], labels [T]; got {shapes}")
    log_probs, entropy, squares = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head_weight, labels, temperature, max(1, chunk), with_entropy, with_sum_pi_squared, kernels
    )
    return TokenStatistics(log_probs, entropy if with_entropy else None, squares if with_sum_pi_squared else None)


def statistics_from_logits(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> TokenStatistics:
    """Compute the same from logits that already exist.

    Args:
        logits: [..., V].
        labels: [...] int64.
        temperature: divides the logits; one, or [..., 1].

    Returns:
        [...] each, sum_pi_squared included.
    """
    log_all = torch.log_softmax(logits.float() / temperature, dim=-1)
    log_probs = log_all.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    probabilities = log_all.exp()
    entropy = -torch.where(probabilities > 0, probabilities * log_all, 0.0).sum(-1)
    return TokenStatistics(log_probs, entropy, probabilities.detach().square().sum(-1))


def log_probs_and_divergence(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, diverge: Diverge = divergence_of
) -> tuple[Tensor, Tensor]:
    """Compute the labels' log-probs, and the divergence from a teacher at them: [N] each.

    Args:
        logits: [N, V] of the student.
        labels: [N] int64.
        teacher_logits: [N, V'] with V' at least V: what a padded vocabulary has more is left out.
        diverge: computes the divergence.

    Returns:
        Two [N] in at least float32 nats, with gradient by the student's logits alone.

    Raises:
        ValueError: shapes do not agree.
    """
    if logits.shape[0] != teacher_logits.shape[0] or logits.shape[1] > teacher_logits.shape[1]:
        shapes = tuple(logits.shape), tuple(teacher_logits.shape)
        raise ValueError(f"want logits [N, V] and teacher_logits [N, V' >= V]; got {shapes}")
    own = _wide(logits)
    divergence = diverge(own, _wide(teacher_logits[:, : logits.shape[1]]))
    return own.gather(-1, labels[:, None])[:, 0] - own.logsumexp(-1), divergence


def chunked_log_probs_and_divergence(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    teacher_logits: Tensor,
    chunk: int = CHUNK_TOKENS,
    diverge: Diverge = divergence_of,
) -> tuple[Tensor, Tensor]:
    """Compute the same from hidden states [N, H] and the output embedding [V, H], differentiable by both.

    The student's [N, V] logits never exist, and each chunk's are computed again in the backward pass.
    """
    parts = []
    for start in range(0, max(len(labels), 1), chunk):
        rows = slice(start, start + chunk)
        found = checkpoint(
            _divergence_of_chunk,
            hidden[rows],
            lm_head_weight,
            labels[rows],
            teacher_logits[rows],
            diverge,
            use_reentrant=False,
        )
        parts.append(found)
    log_probs, divergences = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(divergences)


class _ChunkedHead(torch.autograd.Function):
    """The output layer and its statistics; the backward pass repeats each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        chunk: int,
        with_entropy: bool,
        with_squares: bool,
        kernels: HeadKernels | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs, log_normaliser, entropy, squares = (
            torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device) for _ in range(4)
        )
        # Small ones are kept: computing them again would be a quarter of the output layer's work.
        is_kept = 4 * labels.numel() * weight.shape[0] <= KEPT_BYTES and any(ctx.needs_input_grad)
        ctx.kept, ctx.kernels = [], kernels
        for start in range(0, labels.numel(), chunk):
            rows = slice(start, start + chunk)
            logits = _logits(hidden[rows], weight)
            outputs = log_probs[rows], log_normaliser[rows], entropy[rows], squares[rows]
            if kernels is None:
                _statistics(_divided(logits, temperature, rows), labels[rows], outputs, with_entropy, with_squares)
            else:
                assert not isinstance(temperature, Tensor)
                kernels.token_statistics(logits, labels[rows], temperature, outputs)
            if is_kept:
                ctx.kept.append(logits)
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
        kernels, kept, ctx.kept = ctx.kernels, ctx.kept, []
        for number, start in enumerate(range(0, labels.numel(), ctx.chunk)):
            rows = slice(start, start + ctx.chunk)
            logits = kept[number] if kept else _logits(hidden[rows], weight)
            if kernels is None and not kept:
                _divided(logits, ctx.temperature, rows)
            known = labels[rows], log_normaliser[rows], entropy[rows]
            given = tuple(None if each is None else each[rows].contiguous() for each in (of_log_probs, of_entropy))
            if kernels is None:
                of_logits = _gradient(logits, *known, *given)
                of_logits = _divided(of_logits, ctx.temperature, rows).to(hidden.dtype)
            else:
                kernels.statistics_backward(logits, known[0], ctx.temperature, *known[1:], given)
                of_logits = logits.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] = of_logits @ weight.to(hidden.dtype)
            if of_weight is not None:
                product = of_logits.T @ hidden[rows]
                of_weight = product.float() if number == 0 else of_weight.add_(product)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *(None,) * 6


def _statistics(
    logits: Tensor, labels: Tensor, outputs: tuple[Tensor, ...], with_entropy: bool, with_squares: bool
) -> None:
    """Write log-probability of the label, logarithm of the normaliser, entropy and sum of p^2: [T] each."""
    log_probs, log_normaliser, entropy, squares = outputs
    log_normaliser[:] = logits.logsumexp(-1)
    log_probs[:] = logits.gather(-1, labels[:, None]).squeeze(-1) - log_normaliser
    if with_entropy or with_squares:
        probabilities = (logits - log_normaliser[:, None]).exp_()
        if with_squares:
            squares[:] = torch.einsum("tv,tv->t", probabilities, probabilities)
        if with_entropy:
            # Not of the logits, and over the sum: the normaliser's rounding grows with them, by a low temperature too.
            total = probabilities.sum(-1)
            entropy[:] = torch.special.entr(probabilities, out=probabilities).sum(-1) / total + total.log()


def _gradient(
    logits: Tensor,
    labels: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    of_log_probs: Tensor | None,
    of_entropy: Tensor | None,
) -> Tensor:
    """Compute the gradient by the logits [T, V], which are overwritten."""
    log_all = logits.sub_(log_normaliser[:, None])
    if of_entropy is None and of_log_probs is not None:
        # What is usual, with the fewest passes over [T, V].
        of_logits = log_all.exp_().mul_(-of_log_probs[:, None])
        return of_logits.scatter_add_(-1, labels[:, None], of_log_probs[:, None])
    probabilities = log_all.exp()
    of_logits = torch.zeros_like(probabilities)
    if of_entropy is not None:
        # dH/dlogit = -p (log p + H); where p underflows to 0 the product is 0, as log p stays finite.
        of_logits = log_all.add_(entropy[:, None]).mul_(probabilities).mul_(-of_entropy[:, None])
    if of_log_probs is not None:
        of_logits.sub_(probabilities.mul_(of_log_probs[:, None]))
        of_logits.scatter_add_(-1, labels[:, None], of_log_probs[:, None])
    return of_logits


def _divided(logits: Tensor, temperature: float | Tensor, rows: slice) -> Tensor:
    """Divide by the temperature in place, unless it is 1: on a GPU that is a tenth of the work on logits."""
    if isinstance(temperature, Tensor):
        return logits.div_(temperature[rows])
    return logits if temperature == 1 else logits.div_(temperature)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.to(hidden.dtype).T).float()


def _divergence_of_chunk(
    hidden: Tensor, weight: Tensor, labels: Tensor, teacher_logits: Tensor, diverge: Diverge
) -> tuple[Tensor, Tensor]:
    return log_probs_and_divergence(hidden @ weight.to(hidden.dtype).T, labels, teacher_logits, diverge)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
