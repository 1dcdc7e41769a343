"""No test can hang the run: a process whose test ignores its timeout prints its stacks and exits.

``pytest-timeout`` raises from a signal handler, which a call that is stuck outside of Python never runs, and it guards
no tear-down after a failure. ``faulthandler`` has a thread that needs no Python: with xdist the exit is a crashed
worker, which is replaced, and whose test has failed. What the worker had started is killed then.
"""

import faulthandler
import os
from collections.abc import Generator
from typing import Any

import pytest

from tests.suite.processes import kill_marked

GRACE_SECONDS = 60.0
"""What a test gets beyond its timeout, to end by itself."""
TEARDOWN_SECONDS = 180.0
"""A fleet has 60 s to end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("hang_grace_seconds", "seconds beyond its timeout until a hung test's process exits")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(HangGuard(config), "hang guard")


class HangGuard:
    """Arms the exit around each test, and again around each teardown."""

    def __init__(self, config: pytest.Config) -> None:
        self._stderr = os.dup(2)  # while a test runs, 2 is a file that captures
        self._grace_seconds = float(config.getini("hang_grace_seconds") or GRACE_SECONDS)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.close(self._stderr)

    def _arm(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, file=self._stderr, exit=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        timeout = timeout_of(item)
        if timeout:
            self._arm(timeout + self._grace_seconds)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        if timeout_of(item):  # an exception has cancelled both
            self._arm(TEARDOWN_SECONDS + self._grace_seconds)
        return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error:
            kill_marked(PYTEST_XDIST_TESTRUNUID=node.workerinput["testrunuid"], PYTEST_XDIST_WORKER=node.gateway.id)


def timeout_of(item: pytest.Item) -> float:
    """Read the seconds that ``pytest-timeout`` gives a test; 0 if it gives any."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    return float(item.config.getoption("timeout", None) or item.config.getini("timeout") or 0)
