"""Torch computes with the cores that are there for a process, looked at again before each pass of a model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flotilla.services.trainer.worker import compute as compute_module
from flotilla.services.trainer.worker.compute import ComputeCores
from flotilla.shared.host.cores import CoreSeat


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_number_of_threads_is_used_as_it_is() -> None:
    cores = ComputeCores(3)

    with cores.computing():
        assert torch.get_num_threads() == 3
    cores.close()


def test_cores_are_shared_with_whoever_computes_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seats = [CoreSeat(tmp_path, cores=lambda: frozenset(range(4)), now=lambda: 0.0) for _ in range(2)]
    monkeypatch.setattr(compute_module, "CoreSeat", lambda threads: seats[0])
    cores, model, found = ComputeCores("auto"), nn.Linear(2, 2), []
    cores.follow(model)
    with cores.computing():
        for begins in (False, True):
            if begins:
                seats[1].begin()
            model(torch.zeros(1, 2))
            found.append(torch.get_num_threads())

    assert found == [4, 2]
    seats[1].end()
    assert seats[1].begin() == 4, "after the step the cores are the other's"
    for seat in seats:
        seat.close()
