"""The divergence from a teacher is that of a naive float64 computation, in value and gradient, by chunks or not."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from flotilla.services.trainer.algorithms.divergence import divergence_of
from flotilla.services.trainer.algorithms.log_probs import chunked_log_probs_and_divergence, log_probs_and_divergence
from flotilla.shared.config.sections.job import DivergenceConfig

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


def of_one_token(own: list[float], theirs: list[float], measure: dict[str, Any]) -> torch.Tensor:
    """Compute it in the space of probabilities, token by token, as the kinds are defined."""
    kind, skew, temperature = measure["kind"], measure.get("skew", 0.1), measure.get("temperature", 1.0)
    kept = sorted(range(len(theirs)), key=lambda token: -theirs[token])[: measure.get("top_k") or len(theirs)]
    p = torch.softmax(torch.tensor(own, dtype=torch.float64)[kept] / temperature, -1)
    q = torch.tensor(theirs, dtype=torch.float64)[kept] / temperature / measure.get("teacher_temperature", 1.0)
    q = torch.softmax(q, -1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return sum((x * (x / y).log() for x, y in zip(a, b, strict=True)), torch.zeros((), dtype=torch.float64))

    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    if kind == "skewed_forward_kl":
        return kl(q, skew * q + (1 - skew) * p)
    if kind == "skewed_reverse_kl":
        return kl(p, skew * p + (1 - skew) * q)
    if kind == "js_divergence":
        return (kl(q, (p + q) / 2) + kl(p, (p + q) / 2)) / 2
    head = tail = below = 0.0
    for token in sorted(range(len(q)), key=lambda each: q[each].item()):
        below += q[token].item()
        gap = abs(q[token].item() - p[token].item())
        head, tail = (head, tail + gap) if below <= measure.get("tail", 0.5) else (head + gap, tail)
    return (head * kl(q, p) + tail * kl(p, q)) / (head + tail)


@pytest.mark.parametrize(
    "measure",
    [
        {"kind": kind, **more}
        for kind, own in [
            ("forward_kl", {}),
            ("reverse_kl", {}),
            ("skewed_forward_kl", {"skew": 0.3}),
            ("skewed_reverse_kl", {"skew": 0.3}),
            ("js_divergence", {}),
            ("adaptive_kl", {"tail": 0.4}),
        ]
        for more in (own, {**own, "top_k": 5, "temperature": 2.0, "teacher_temperature": 1.5})
    ],
    ids=str,
)
def test_each_kind_is_what_its_definition_gives_over_all_tokens_or_the_likeliest(measure: dict[str, Any]) -> None:
    hidden, weight, _, teacher = tensors()
    logits, teacher = hidden @ weight.T, teacher[:, :VOCABULARY]

    found = divergence_of(logits, teacher, DivergenceConfig.model_validate(measure))

    expected = [of_one_token(*rows, measure) for rows in zip(logits.tolist(), teacher.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))
    assert (found > 0).all()
    if measure["kind"] != "adaptive_kl":  # whose parts are weighed by what has no gradient
        measured = DivergenceConfig.model_validate(measure)
        assert torch.autograd.gradcheck(
            lambda given: divergence_of(given, teacher, measured), logits.detach().requires_grad_()
        )


@pytest.mark.parametrize("kind", ["reverse_kl", "skewed_reverse_kl", "js_divergence", "adaptive_kl"])
def test_equal_distributions_are_nowhere_apart_and_pull_nowhere(kind: str) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    found = divergence_of(logits, logits, DivergenceConfig(kind=kind, top_k=3))  # type: ignore[arg-type]
    found.sum().backward()

    assert found.abs().max() < 1e-12
    assert logits.grad is not None and logits.grad.abs().max() < 1e-12


def test_the_weight_of_the_parts_of_adaptive_kl_has_no_gradient() -> None:
    """As in ROLL: how far both are apart chooses between the two divergences, and is not itself lowered."""
    hidden, weight, _, teacher = tensors()
    logits, teacher = (hidden @ weight.T).detach().requires_grad_(), teacher[:, :VOCABULARY]
    forward, reverse, found = (
        divergence_of(logits, teacher, DivergenceConfig(kind=kind))  # type: ignore[arg-type]
        for kind in ("forward_kl", "reverse_kl", "adaptive_kl")
    )
    share = ((found - reverse) / (forward - reverse)).detach()

    [expected] = torch.autograd.grad((share * forward + (1 - share) * reverse).sum(), logits, retain_graph=True)
    [gradient] = torch.autograd.grad(found.sum(), logits)

    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("given", [{"skew": 0.2}, {"kind": "reverse_kl", "tail": 0.2}])
def test_what_has_no_effect_on_a_divergence_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no effect with"):
        DivergenceConfig.model_validate(given)
