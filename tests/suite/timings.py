"""Prints where the time of a run went: a table of the slowest files."""

from collections import defaultdict

import pytest

NUM_FILES = 30


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.getoption("durations", None) is not None:
        config.pluginmanager.register(Timings(), "timings")


class Timings:
    """Adds up set-up, call and tear-down of each file's tests, second runs included."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests[file].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self._seconds, key=lambda file: -self._seconds[file])
        terminalreporter.write_sep("=", "time by file")
        for file in slowest[:NUM_FILES]:
            terminalreporter.write_line(f"{self._seconds[file]:7.1f} s {len(self._tests[file]):5} tests  {file}")
        others = slowest[NUM_FILES:]
        if others:
            seconds, tests = sum(self._seconds[f] for f in others), sum(len(self._tests[f]) for f in others)
            terminalreporter.write_line(f"{seconds:7.1f} s {tests:5} tests  in {len(others)} other files")
        terminalreporter.write_line(f"{sum(self._seconds.values()):7.1f} s in all")
