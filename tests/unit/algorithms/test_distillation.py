"""A teacher's part in advantages, against numbers worked out by hand."""

import pytest
import torch

from flotilla.services.trainer.algorithms.advantages.distillation import distil
from flotilla.services.trainer.algorithms.sequences import PackedSequences

STUDENT, TEACHER = torch.tensor([-1.0, -2.0, -30.0, -1.0]), torch.tensor([-3.0, -1.5, -1.0, -26.0])
SEQUENCES = PackedSequences(torch.tensor([0, 0, 0, 0]), torch.tensor([True, True, True, True]), 1)


@pytest.mark.parametrize(
    ("bound", "expected"),
    [(10.0, [-1.0, 0.25, 5.0, -5.0]), (1.0, [-0.5, 0.25, 0.5, -0.5]), (None, [-1.0, 0.25, 14.5, -12.5])],
    ids=["by itself", "narrow", "none"],
)
def test_the_difference_is_bounded_either_way(bound: float | None, expected: list[float]) -> None:
    found = distil(torch.ones(4), STUDENT, TEACHER, SEQUENCES, coefficient=0.5, pure=True, value_clamp=bound)

    assert found.tolist() == pytest.approx(expected)
