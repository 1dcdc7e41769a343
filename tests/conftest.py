"""What every test shares: the event loop that async tests run on."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
