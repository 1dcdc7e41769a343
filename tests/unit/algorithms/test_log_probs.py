"""Chunked log-probabilities and entropy against the plain computation."""

import pytest
import torch

from services.trainer.algorithms.log_probs import log_probs_and_entropy, statistics_from_logits


def inputs(num_tokens: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, 6, generator=random, requires_grad=True)
    weight = torch.randn(23, 6, generator=random, requires_grad=True)
    return hidden, weight, torch.randint(0, 23, (num_tokens,), generator=random)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_change_neither_values_nor_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, labels = inputs()
    plain = statistics_from_logits(hidden @ weight.T, labels, temperature)
    weights = torch.arange(1.0, 12.0)
    expected = torch.autograd.grad(
        (plain.log_probs * weights + plain.entropy * weights.flip(0)).sum(), [hidden, weight]
    )

    chunked = log_probs_and_entropy(hidden, weight, labels, temperature, chunk, with_sum_pi_squared=True)
    actual = torch.autograd.grad(
        (chunked.log_probs * weights + chunked.entropy * weights.flip(0)).sum(), [hidden, weight]
    )

    torch.testing.assert_close(chunked.log_probs, plain.log_probs)
    torch.testing.assert_close(chunked.entropy, plain.entropy)
    torch.testing.assert_close(chunked.sum_pi_squared, plain.sum_pi_squared)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_log_probs_alone_have_their_gradient() -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(statistics_from_logits(hidden @ weight.T, labels).log_probs.sum(), [hidden, weight])

    chunked = log_probs_and_entropy(hidden, weight, labels, chunk=3, with_entropy=False)

    assert chunked.entropy is None
    torch.testing.assert_close(
        torch.autograd.grad(chunked.log_probs.sum(), [hidden, weight]), expected, rtol=1e-4, atol=1e-5
    )


def test_memory_does_not_hold_all_logits() -> None:
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight, labels = (
        torch.randn(512, 4, requires_grad=True),
        torch.randn(300, 4),
        torch.zeros(512, dtype=torch.long),
    )
    with Watch():
        log_probs_and_entropy(hidden, weight, labels, chunk=16).log_probs.sum().backward()

    assert 16 * 300 <= largest < 512 * 300


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        log_probs_and_entropy(*inputs(), temperature=0.0)
