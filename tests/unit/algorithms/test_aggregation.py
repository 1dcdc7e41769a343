"""From losses per token to one number."""

from typing import Any

import pytest
import torch

from flotilla.services.trainer.algorithms.aggregation import Denominators, aggregate
from flotilla.services.trainer.algorithms.sequences import PackedSequences
from flotilla.shared.config.sections.algorithm import (
    AggregationConfig,
)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 6),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", 8.0),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum-norm", 2.0),
        ("token-sum-norm", 4.0),
    ],
)
def test_aggregation(mode: Any, expected: float) -> None:
    sequences = PackedSequences.of(torch.tensor([0, 0, 1, 1, 1, 1]), torch.ones(6))
    config = AggregationConfig(mode=mode, fixed_length=4 if mode.endswith("-norm") else None)

    loss = aggregate(torch.tensor([1.0, 3, 2, 2, 2, 6]), sequences, Denominators.of(6, 2), config)

    assert float(loss) == pytest.approx(expected)
