"""One compute thread: pools that contend for few cores are slow, and the rounding of sums depends on their number."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
