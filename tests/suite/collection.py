"""Collecting is most of what a worker does before its first test: it imports everything, and each worker does it."""

from collections.abc import Generator
from pathlib import Path

import pytest

from flotilla.shared.children.processes import collecting_later

MADE_BY_NIGHT = frozenset({"test_openapi_at_length.py", "test_services_openapi_at_length.py"})
"""Files whose cases take seconds to make, in each worker, whether they are run or not."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with collecting_later():
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_by_day = "not long" in (config.getoption("markexpr") or "") or config.getoption("long_slot") is not None
    return True if is_by_day and collection_path.name in MADE_BY_NIGHT else None
