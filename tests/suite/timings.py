"""Prints where the time of a run went: a table of the slowest files, with their share of the processors."""

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

NUM_FILES = 30


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("durations", None) is not None:
        config.pluginmanager.register(ProcessorTime(), "processor time")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Timings(), "timings")


class ProcessorTime:
    """Notes in each report the processor seconds of this process and of the children that it has waited for."""

    def __init__(self) -> None:
        self._before: float | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = sum(os.times()[:4])
        report.processor_seconds = 0.0 if self._before is None else now - self._before
        self._before = now
        return report


class Timings:
    """Adds up set-up, call and tear-down of each file's tests, second runs included."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._processor_seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._processor_seconds[file] += getattr(report, "processor_seconds", 0.0)
        self._tests[file].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self._seconds, key=lambda file: -self._seconds[file])
        others = slowest[NUM_FILES:]
        terminalreporter.write_sep("=", "time by file")
        terminalreporter.write_line("seconds  of processors   tests")
        for file in slowest[:NUM_FILES]:
            terminalreporter.write_line(self._line([file], file))
        if others:
            terminalreporter.write_line(self._line(others, f"in {len(others)} other files"))
        terminalreporter.write_line(self._line(slowest, "in all"))

    def _line(self, files: list[str], name: str) -> str:
        seconds, processor = (sum(figures[f] for f in files) for figures in (self._seconds, self._processor_seconds))
        return f"{seconds:7.1f} {processor:14.1f} {sum(len(self._tests[f]) for f in files):7}  {name}"
