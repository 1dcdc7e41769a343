"""KL estimates by their definitions, and the coefficient's controller."""

import math

import pytest
import torch

from flotilla.services.trainer.algorithms.kl import exact_kl, kl_estimate, kl_loss, updated_coefficient
from flotilla.shared.config.sections.algorithm import (
    KlLossConfig,
    KlRewardConfig,
)


@pytest.mark.parametrize(
    ("d", "expected"), [(0.3, (0.3, 0.045, 0.040818)), (-0.3, (-0.3, 0.045, 0.049859)), (25.0, (10.0, 10.0, 10.0))]
)
def test_kl_estimates(d: float, expected: tuple[float, float, float]) -> None:
    for estimator, value in zip(("k1", "k2", "k3"), expected, strict=True):
        found = kl_estimate(torch.tensor([d]), torch.zeros(1), estimator=estimator)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(value, rel=1e-4)


def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)

    kl = kl_loss(log_probs, torch.tensor([-1.4]), KlLossConfig(estimator="k3", gradient="k2"))
    (gradient,) = torch.autograd.grad(kl.sum(), [log_probs])

    assert float(kl.detach()) == pytest.approx(math.exp(-0.4) - 1 + 0.4, rel=1e-4)
    assert float(gradient) == pytest.approx(0.4, rel=1e-4)


def test_estimates_average_to_the_exact_kl() -> None:
    random = torch.Generator().manual_seed(0)
    p, q = (torch.log_softmax(torch.randn(5, generator=random), 0) for _ in range(2))
    weights = p.exp()

    exact = float(exact_kl(p, q))

    for estimator in ("k1", "k3"):
        found = float((weights * kl_estimate(p, q, estimator=estimator, value_clamp=None)).sum())  # type: ignore[arg-type]
        assert found == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("observed", "expected"), [(0.15, 0.00102048), (0.09, 0.00098976)])
def test_the_coefficient_follows_the_target(observed: float, expected: float) -> None:
    config = KlRewardConfig(target=0.1)

    assert updated_coefficient(0.001, config, observed_kl=observed, num_sequences=1024) == pytest.approx(expected)
    assert updated_coefficient(0.001, KlRewardConfig(), observed_kl=observed, num_sequences=1024) == 0.001
