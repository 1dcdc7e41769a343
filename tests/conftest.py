"""What every test shares: the event loop that async tests run on, and that no example has to be a fast one."""

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.suite.hangs", "tests.suite.retries", "tests.suite.schedule", "tests.suite.timings"]

# How long an example takes is the machine's affair, not the code's.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
