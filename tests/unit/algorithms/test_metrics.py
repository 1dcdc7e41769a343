"""Tallies add up before they are divided."""

import torch

from flotilla.services.trainer.algorithms.metrics import Tally, combine, summarise


def test_tallies_add_up_before_they_are_divided() -> None:
    first = {"a": Tally(torch.tensor(1.0), torch.tensor(1.0))}
    second = {"a": Tally(torch.tensor(8.0), torch.tensor(2.0)), "b": Tally(torch.tensor(0.0), torch.tensor(0.0))}

    assert summarise(combine([first, second])) == {"a": 3.0, "b": 0.0}
