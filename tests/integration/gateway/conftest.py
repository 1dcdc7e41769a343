"""A gateway that is served on a socket, and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flotilla.services.gateway.settings import GatewaySettings
from flotilla.services.gateway.state import GatewayState
from flotilla.shared.net.client.client import GatewayClient
from tests.integration.gateway.fleet import TOKEN, a_gateway


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Run these tests on the loop that the gateway runs on."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> GatewaySettings:
    """Settings with short patience."""
    return GatewaySettings(
        token=TOKEN,
        redis_url=redis_url,
        data=tmp_path / "data",
        lease_seconds=2.0,
        rest_seconds=1.0,
        grace_seconds=8.0,
        publication_seconds=1.5,
        teardown_seconds=5.0,
        heartbeat_seconds=0.2,
    )


@pytest.fixture
async def served(settings: GatewaySettings) -> AsyncIterator[tuple[str, GatewayState]]:
    """A gateway's address and its state."""
    async with a_gateway(settings) as running:
        yield running


@pytest.fixture
async def url(served: tuple[str, GatewayState]) -> str:
    """The gateway's address."""
    return served[0]


@pytest.fixture
async def client(url: str) -> AsyncIterator[GatewayClient]:
    """A client that has the token."""
    async with GatewayClient(url, TOKEN) as opened:
        yield opened
