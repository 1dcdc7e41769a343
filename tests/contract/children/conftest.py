"""Children are owned on the loop of asyncio, and on the gateway's."""

import pytest


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Run each test on both."""
    return "asyncio", {"use_uvloop": request.param}
