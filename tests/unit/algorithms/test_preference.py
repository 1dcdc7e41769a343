"""Preference losses against numbers worked out by hand."""

import math

import pytest
import torch

from flotilla.services.trainer.algorithms.preference import dpo_loss, pairwise_loss

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
