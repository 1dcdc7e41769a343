"""The critic's clipped loss, and the moments of its returns."""

import pytest
import torch

from flotilla.services.trainer.algorithms.aggregation import Denominators
from flotilla.services.trainer.algorithms.metrics import summarise
from flotilla.services.trainer.algorithms.objective import value_objective
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.services.trainer.algorithms.value import ReturnMoments
from flotilla.shared.config.sections.algorithm import (
    ValueLossConfig,
)


def row(length: int) -> PackedSequences:
    return PackedSequences(torch.zeros(length, dtype=torch.long), torch.ones(length, dtype=torch.bool), 1)


def test_a_clipped_value_loss_takes_the_worse_error() -> None:
    sequences = row(2)

    found = value_objective(
        ValueLossConfig(clip=0.5),
        value_preds=torch.tensor([2.0, 0.1]),
        old_values=torch.zeros(2),
        returns=torch.tensor([2.0, 0.0]),
        sequences=sequences,
        denominators=Denominators.of(2, 1),
    )

    assert float(found.loss) == pytest.approx(0.5 * (1.5**2 + 0.1**2) / 2)
    assert summarise(found.metrics)["value_clip_fraction"] == 0.5


def test_moments_of_returns_are_those_of_all_batches() -> None:
    random = torch.Generator().manual_seed(2)
    first, second = (5 + 3 * torch.randn(size, generator=random) for size in (7, 12))
    masks = [torch.ones(7, dtype=torch.bool), torch.arange(12) < 10]

    moments = ReturnMoments.none().updated(first, masks[0]).updated(second, masks[1])

    everything = torch.cat([first, second[:10]])
    assert float(moments.mean) == pytest.approx(float(everything.mean()), rel=1e-5)
    assert float(moments.variance) == pytest.approx(float(everything.var(correction=0)), rel=1e-5)
    torch.testing.assert_close(moments.restore(moments.whiten(first)), first)


def test_without_returns_whitening_changes_nothing() -> None:
    values = torch.tensor([1.0, -2.0])

    assert torch.equal(ReturnMoments.none().restore(values), values)
