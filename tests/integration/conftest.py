"""What integration tests share: one Redis server of our own for the whole run."""

from collections.abc import Iterator

import pytest

from flotilla.cli.redis_server import LocalRedis


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a server for the whole run; tests keep apart by experiment ids of their own."""
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url
