"""What every test shares: the event loop that async tests run on, and that no example has to be a fast one."""

import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.suite.collection",
    "tests.suite.engine_calls",
    "tests.suite.hangs",
    "tests.suite.retries",
    "tests.suite.rotation",
    "tests.suite.run_folder",
    "tests.suite.schedule",
    "tests.suite.slow_callbacks",
    "tests.suite.timings",
]

# Threads that spin while they wait take a busy machine's cores from all others: a test took fifteen times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes is the machine's affair, not the code's.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
