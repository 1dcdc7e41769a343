"""The divergence from a teacher is that of a naive float64 computation, in value and gradient, by chunks or not."""

import pytest
import torch
from torch.nn import functional

from flotilla.services.trainer.algorithms.log_probs import chunked_log_probs_and_divergence, log_probs_and_divergence

TOKENS, HIDDEN, VOCABULARY = 11, 6, 29


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    teacher = 3 * torch.randn(TOKENS, VOCABULARY + 3, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, teacher


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute 0.3 log p + 0.7 KL at each token, weighed by its number."""
    own = torch.log_softmax(hidden @ weight.T, -1)
    theirs = torch.log_softmax(teacher[:, :VOCABULARY], -1)
    divergence = functional.kl_div(own, theirs, log_target=True, reduction="none").sum(-1)
    return ((0.3 * own[torch.arange(TOKENS), labels] + 0.7 * divergence) * torch.arange(TOKENS)).sum()


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_value_and_gradients_are_those_of_the_naive_loss(chunk: int) -> None:
    hidden, weight, labels, teacher = tensors()
    expected = naive(hidden, weight, labels, teacher)
    gradients = torch.autograd.grad(expected, (hidden, weight))

    log_probs, divergence = chunked_log_probs_and_divergence(hidden, weight, labels, teacher, chunk)
    found = ((0.3 * log_probs + 0.7 * divergence) * torch.arange(TOKENS)).sum()

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), gradients)


def test_a_teacher_that_is_the_student_is_nowhere_apart() -> None:
    hidden, weight, labels, _ = tensors()
    logits = hidden @ weight.T

    _, divergence = log_probs_and_divergence(logits, labels, logits)

    assert divergence.abs().max() < 1e-12


def test_no_token_at_all_has_a_gradient_of_nothing() -> None:
    """A rank makes such a pass where others still have tokens."""
    hidden, weight, labels, teacher = tensors(torch.float32)

    log_probs, divergence = chunked_log_probs_and_divergence(hidden[:0], weight, labels[:0], teacher[:0])
    (log_probs.sum() + divergence.sum()).backward()

    assert log_probs.shape == divergence.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()


def test_a_teacher_with_a_smaller_vocabulary_is_refused() -> None:
    hidden, weight, labels, teacher = tensors()

    with pytest.raises(ValueError, match="teacher_logits"):
        chunked_log_probs_and_divergence(hidden, weight, labels, teacher[:, : VOCABULARY - 1])
