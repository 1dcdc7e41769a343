"""Chunked log-probabilities and entropy against the plain computation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flotilla.services.trainer.algorithms import log_probs
from flotilla.services.trainer.algorithms.log_probs import (
    HeadKernels,
    TokenStatistics,
    log_probs_and_entropy,
    statistics_from_logits,
)
from flotilla.services.trainer.models.native.kernels import kernels_for


def inputs(num_tokens: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_tokens, 6, generator=random, requires_grad=True)
    weight = torch.randn(23, 6, generator=random, requires_grad=True)
    return hidden, weight, torch.randint(0, 23, (num_tokens,), generator=random)


def kernels_or_skip() -> HeadKernels:
    found = kernels_for()
    if found is None:
        pytest.skip("no C compiler")
    return found


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_change_neither_values_nor_gradients(
    chunk: int, temperature: float, with_kernels: bool, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "KEPT_BYTES", kept_bytes)
    kernels = kernels_or_skip() if with_kernels else None
    hidden, weight, labels = inputs()
    plain = statistics_from_logits(hidden @ weight.T, labels, temperature)
    weights = torch.arange(1.0, 12.0)
    expected = torch.autograd.grad(
        (plain.log_probs * weights + plain.entropy * weights.flip(0)).sum(), [hidden, weight]
    )

    chunked = log_probs_and_entropy(
        hidden, weight, labels, temperature, chunk, with_sum_pi_squared=True, kernels=kernels
    )
    actual = torch.autograd.grad(
        (chunked.log_probs * weights + chunked.entropy * weights.flip(0)).sum(), [hidden, weight]
    )

    torch.testing.assert_close(chunked.log_probs, plain.log_probs)
    torch.testing.assert_close(chunked.entropy, plain.entropy)
    torch.testing.assert_close(chunked.sum_pi_squared, plain.sum_pi_squared)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_log_probs_alone_have_their_gradient(with_kernels: bool) -> None:
    kernels = kernels_or_skip() if with_kernels else None
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(statistics_from_logits(hidden @ weight.T, labels).log_probs.sum(), [hidden, weight])

    chunked = log_probs_and_entropy(hidden, weight, labels, chunk=3, with_entropy=False, kernels=kernels)

    assert chunked.entropy is None
    torch.testing.assert_close(
        torch.autograd.grad(chunked.log_probs.sum(), [hidden, weight]), expected, rtol=1e-4, atol=1e-5
    )


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        self.elements = max([self.elements, *(tensor.numel() for tensor in made if isinstance(tensor, torch.Tensor))])
        return result


def test_no_tensor_holds_all_logits() -> None:
    hidden = torch.randn(512, 4, requires_grad=True)
    weight, labels = torch.randn(300, 4, requires_grad=True), torch.zeros(512, dtype=torch.long)

    with Largest() as largest:
        found = log_probs_and_entropy(hidden, weight, labels, chunk=16)
        assert found.entropy is not None
        (found.log_probs + found.entropy).sum().backward()

    assert largest.elements == 16 * 300


def test_logits_that_are_no_number_stay_visible() -> None:
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[3, 0] = torch.nan

    found = log_probs_and_entropy(hidden, weight, labels, kernels=kernels_or_skip())

    assert found.log_probs.isnan().tolist() == [row == 3 for row in range(len(labels))]
    assert found.entropy is not None and found.entropy.isnan()[3]


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        log_probs_and_entropy(*inputs(), temperature=0.0)


def test_each_token_has_the_gradient_of_its_own_temperature() -> None:
    torch.manual_seed(3)
    hidden, weight, labels = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 0.5])[:, None]

    def gradients(compute: Callable[[Tensor], TokenStatistics]) -> tuple[Tensor, Tensor]:
        leaf = hidden.clone().requires_grad_()
        found = compute(leaf)
        assert found.entropy is not None
        (found.log_probs.sum() + 0.3 * found.entropy.sum()).backward()
        assert leaf.grad is not None
        return found.log_probs.detach(), leaf.grad

    expected = gradients(lambda leaf: statistics_from_logits(leaf @ weight.T, labels, temperatures))
    found = gradients(lambda leaf: log_probs_and_entropy(leaf, weight, labels, temperatures, chunk=4))

    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("temperature", [0.3, 0.5])
def test_the_entropy_at_a_low_temperature_is_that_of_the_sharper_distribution(
    temperature: float, *, with_kernels: bool
) -> None:
    # Logits whose softmax at this temperature is 4/7, 2/7, 1/7: its entropy is ln 7 - 10/7 ln 2.
    logits = temperature * torch.tensor([[4.0, 2.0, 1.0]]).log() + 20
    kernels = kernels_or_skip() if with_kernels else None

    whole = statistics_from_logits(logits, torch.tensor([0]), temperature)
    chunked = log_probs_and_entropy(logits, torch.eye(3), torch.tensor([0]), temperature=temperature, kernels=kernels)

    for found in (whole, chunked):
        assert found.entropy is not None
        assert float(found.entropy) == pytest.approx(0.955700, abs=2e-5)
        assert float(found.log_probs) == pytest.approx(-0.559616, abs=2e-5)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("temperature", [0.3, 0.5, 1.0])
def test_the_entropy_is_as_near_to_float64_as_that_of_a_plain_softmax(
    temperature: float, *, with_kernels: bool
) -> None:
    logits = torch.randn(32, 4096, generator=torch.Generator().manual_seed(2)) * 2
    exact = torch.distributions.Categorical(logits=logits.double() / temperature).entropy()
    plain = torch.distributions.Categorical(logits=logits / temperature).entropy()
    kernels = kernels_or_skip() if with_kernels else None

    found = log_probs_and_entropy(
        logits, torch.eye(4096), torch.zeros(32, dtype=torch.long), temperature=temperature, kernels=kernels
    ).entropy

    assert found is not None
    distance, bound = ((each.double() - exact).abs().max() for each in (found, plain))
    assert distance < max(2 * float(bound), 2e-6)
