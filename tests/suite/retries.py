"""Failed tests run once more at the end of a run, each alone in a process of its own.

A test that fails beside others, on a machine that is busy, may have lost a race: its failure is withheld until the
second run. Passed then, it counts as flaky: printed with its traceback and as ``FLAKY name``, and the run passes.
Failed then, it has failed, with both tracebacks. Crashed workers and timeouts are failures like others.

For the whole suite, by ``--retry-failed-alone``: who runs one test wants to see it fail.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import pytest

from tests.suite.processes import kill_marked

MAX_RETRIED = 20
"""More failures than these are no accident."""
RETRY_SECONDS = 1200.0
"""For all second runs together."""
TAIL_CHARS = 8000
MARK = "FLOTILLA_RETRY_MARK"
WITHHELD = "withheld"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("retries", "second runs of failed tests")
    group.addoption("--retry-failed-alone", action="store_true", help="run failed tests once more, alone, at the end")
    group.addoption("--reports-to", metavar="FILE", help="write each report to a file, as a line of JSON")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if path := config.getoption("reports_to"):
        config.pluginmanager.register(ReportWriter(config, Path(path)), "report writer")
    elif config.getoption("retry_failed_alone"):
        config.pluginmanager.register(Retries(config), "retries")


class ReportWriter:
    """Writes reports for the process that has started this one."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        content = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._file.write(json.dumps(content, default=str) + "\n")
        self._file.flush()

    def pytest_unconfigure(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class SecondRun:
    """What came of a test's second run."""

    reports: list[pytest.TestReport] = field(default_factory=list)
    exit_status: int | None = None
    """None: it did not end within its deadline, or did not begin."""
    output: str = ""
    seconds: float = 0.0

    @property
    def has_passed(self) -> bool:
        return self.exit_status == 0 and any(each.when == "call" and each.passed for each in self.reports)


class Retries:
    """Withholds failures, runs their tests again when all others have run, and reports what came of it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._withheld: dict[str, list[pytest.TestReport]] = {}
        self._flaky: list[str] = []
        self._is_done = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._is_done:
            self._withheld.setdefault(report.nodeid, []).append(report)
            report.outcome = WITHHELD  # type: ignore[assignment]  # neither counted nor printed yet

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.outcome == WITHHELD:
            return "", "R", "RETRIED LATER"
        return ("flaky", "f", "FLAKY") if getattr(report, "is_flaky", False) else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            result = yield
        except BaseException:
            self._is_done = True
            for nodeid in self._withheld:
                self._report_first(nodeid, "There was no second run: the run was interrupted.", 0.0)
            raise
        self._is_done = True
        self._retry_all()
        return result

    def _retry_all(self) -> None:
        num, deadline = len(self._withheld), time.monotonic() + RETRY_SECONDS
        if num:
            self._terminal.write_line("")
            self._terminal.write_line(
                f"{num} failed: " + ("each again, alone" if num <= MAX_RETRIED else "too many to be run again")
            )
        for nodeid in self._withheld:
            if num > MAX_RETRIED:
                self._report_first(nodeid, f"There was no second run: {num} tests have failed.", 0.0)
                continue
            self._report(nodeid, run_alone(self._config, nodeid, deadline - time.monotonic()))

    def _report(self, nodeid: str, second: SecondRun) -> None:
        """Report a test by its second run: flaky, or failed with both tracebacks."""
        failed = [each for each in second.reports if each.failed]
        if second.has_passed and not failed:
            self._flaky.append(nodeid)
        elif failed:
            firsts = [("First run", each.longreprtext) for each in self._withheld[nodeid]]
            failed[0].sections = [*firsts, *failed[0].sections]
        else:
            how = "was out of time" if second.exit_status is None else f"ended with status {second.exit_status}"
            self._report_first(nodeid, f"The second run {how}.\n{second.output[-TAIL_CHARS:]}", second.seconds)
            return
        passed = self._terminal.stats.get("passed", [])
        passed[:] = [each for each in passed if each.nodeid != nodeid]  # counted before its tear-down failed
        for report in second.reports:
            report.is_flaky = second.has_passed and report.when == "call"  # type: ignore[attr-defined]
            self._config.hook.pytest_runtest_logreport(report=report)

    def _report_first(self, nodeid: str, why: str, seconds: float) -> None:
        for report in self._withheld[nodeid]:
            report.outcome = "failed"
            report.sections.append(("Second run", why))
            report.duration, seconds = seconds, 0.0  # its own was counted when it was withheld
            report.processor_seconds = 0.0  # type: ignore[attr-defined]
            self._config.hook.pytest_runtest_logreport(report=report)

    @property
    def _terminal(self) -> pytest.TerminalReporter:
        found: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        assert isinstance(found, pytest.TerminalReporter)
        return found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._flaky:
            return
        terminalreporter.write_sep("=", "flaky: failed once, passed alone", yellow=True)
        for nodeid in self._flaky:
            for report in self._withheld[nodeid]:
                terminalreporter.write_sep("_", f"first run of {nodeid}")
                report.toterminal(terminalreporter._tw)
        for nodeid in self._flaky:
            terminalreporter.write_line(f"FLAKY {nodeid}", yellow=True)


def run_alone(config: pytest.Config, nodeid: str, seconds: float) -> SecondRun:
    """Run one test in a process of its own that ends within its deadline, with all that it has started."""
    if seconds <= 0:
        return SecondRun()
    mark, started = uuid4().hex, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="retry-") as folder:
        reports, output = Path(folder, "reports"), Path(folder, "output")
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath), "--reports-to", str(reports)]
        if config.inipath is not None:
            options += ["-c", str(config.inipath)]
        with output.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, nodeid],
                cwd=config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, MARK: mark},
            )
        try:
            status: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            child.kill()
            child.wait()
            kill_marked(**{MARK: mark})
        return SecondRun(
            reports=read_reports(config, reports, nodeid),
            exit_status=status,
            output=output.read_text(errors="replace"),
            seconds=time.monotonic() - started,
        )


def read_reports(config: pytest.Config, path: Path, nodeid: str) -> list[pytest.TestReport]:
    """Read one test's reports; none if the process did not come so far."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    read = config.hook.pytest_report_from_serializable
    reports = [read(config=config, data=json.loads(line)) for line in lines]
    return [each for each in reports if each.nodeid == nodeid]
