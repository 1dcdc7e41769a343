"""What integration tests share: one Redis server of our own for the whole run, and one compute thread."""

from collections.abc import Iterator

import pytest
import torch

from flotilla.cli.redis_server import LocalRedis


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a server for the whole run; tests keep apart by experiment ids of their own."""
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Pools that contend for few cores are slow, and the rounding of sums depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
