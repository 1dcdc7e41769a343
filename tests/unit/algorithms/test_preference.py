"""Preference losses against numbers worked out by hand."""

import math

import pytest
import torch

from flotilla.services.trainer.algorithms.preference import (
    dpo_loss,
    kl_of_mismatched,
    kto_loss,
    matched_reference_points,
    pairwise_loss,
)

CHOSEN, REF_CHOSEN = torch.tensor([-10.0]), torch.tensor([-12.0])
REJECTED, REF_REJECTED = torch.tensor([-8.0]), torch.tensor([-7.0])
"""Log-ratios 2 and -1, so z = 3."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.554355),  # log(1 + exp(-0.3))
        ({"label_smoothing": 0.1}, 0.584355),  # 0.9 log(1 + exp(-0.3)) + 0.1 log(1 + exp(0.3))
        ({"ipo": True}, 4.0),  # (3 - 1 / 0.2)^2
    ],
    ids=["dpo", "cdpo", "ipo"],
)
def test_a_pair_by_hand(options: dict[str, float], expected: float) -> None:
    found = dpo_loss(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED, beta=0.1, **options)  # type: ignore[arg-type]

    assert float(found.loss) == pytest.approx(expected, abs=1e-6)
    assert (float(found.chosen_rewards), float(found.rejected_rewards)) == pytest.approx((0.2, -0.1))


def test_a_reward_models_pair_by_hand() -> None:
    found = pairwise_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0]))

    assert float(found) == pytest.approx((math.log1p(math.exp(-1)) + math.log1p(math.exp(1))) / 2, abs=1e-6)


def test_kto_by_hand() -> None:
    ratios = torch.tensor([2.0, -1.0, 0.5], requires_grad=True)
    labels = torch.tensor([True, False, True])
    points = kl_of_mismatched(torch.tensor([1.0, 0.5, -0.6])).expand(3)

    found = kto_loss(ratios, labels, points, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    [gradient] = torch.autograd.grad(found, ratios)

    # sigmoid(-0.5 * (2 - 0.3)), sigmoid(0.5 * (-1 - 0.3)), sigmoid(-0.5 * (0.5 - 0.3))
    parts = [0.299433, 0.342990, 0.475021]
    weights = [2.0, 3.0, 2.0]
    assert float(points[0]) == pytest.approx(0.3)
    assert found.item() == pytest.approx(sum(w * p for w, p in zip(weights, parts, strict=True)) / 3, abs=1e-6)
    signs = [-1.0, 1.0, -1.0]
    expected = [s * w * 0.5 * p * (1 - p) / 3 for s, w, p in zip(signs, weights, parts, strict=True)]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-6)


def test_reference_points_are_never_below_zero_and_of_the_other_label() -> None:
    ratios, labels = torch.tensor([2.0, -1.0, 1.0, -3.0]), torch.tensor([True, False, True, False])

    assert float(kl_of_mismatched(torch.tensor([-1.0, 0.5]))) == 0.0
    assert matched_reference_points(ratios, labels).tolist() == [0.0, 1.5, 0.0, 1.5]
    assert matched_reference_points(ratios[:1], labels[:1]).tolist() == [0.0]
