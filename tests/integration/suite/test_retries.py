"""Failed tests run once more, alone; a crash or a hang costs a run no other test."""

import re
from pathlib import Path

import psutil
import pytest

from tests.fleet import until
from tests.integration.suite.running import run

RACES = """
import os, signal, subprocess, time
from pathlib import Path
import pytest

def test_that_passes():
    pass

def test_that_races(is_first):
    assert not is_first, "lost the race"

@pytest.fixture
def resource(is_first):
    yield
    assert not is_first, "not closed yet"

def test_whose_tear_down_races(resource):
    pass

@pytest.fixture(scope="module")
def shared_list():
    return []

def test_that_spoils_what_is_shared(shared_list):
    shared_list.append("left over")

def test_that_needs_it_fresh(shared_list):
    assert not shared_list
"""
CRASHES = """
import os, signal, subprocess, time
from pathlib import Path
import pytest

def test_that_crashes_once(is_first):
    if is_first:
        os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.timeout(1)
def test_that_hangs_once_where_no_signal_is_handled(is_first):
    if is_first:
        child = subprocess.Popen(["sleep", "300"])
        Path(__file__).with_name("pid").write_text(str(child.pid))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(300)

def test_after_them():
    pass
"""
BROKEN = """
import os

attempt = "second" if os.environ["FLOTILLA_RETRY_MARK"] else "first"

def test_that_is_broken():
    assert attempt == "neither"

def test_that_crashes_the_second_time():
    if attempt == "second":
        os._exit(7)
    raise ValueError("the first time, too")

def test_that_passes():
    pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_passes_alone_is_named_as_flaky_and_fails_no_run(tmp_path: Path, workers: str) -> None:
    ended = run(tmp_path, "-n", workers, "--retry-failed-alone", "--durations=5", test_races=RACES)

    assert ended.status == 0, ended.output
    assert ended.flaky == [
        "test_races.py::test_that_needs_it_fresh",
        "test_races.py::test_that_races",
        "test_races.py::test_whose_tear_down_races",
    ]
    assert ended.closing_line == "2 passed, 3 flaky"
    assert "lost the race" in ended.output
    assert re.search(r"[0-9.]+ +[0-9.]+ +5  test_races\.py", ended.output)


def test_a_crash_and_a_hang_are_failures_like_others(tmp_path: Path) -> None:
    ended = run(tmp_path, "-n", "1", "--retry-failed-alone", test_crashes=CRASHES, test_races=RACES)

    assert ended.status == 0, ended.output
    assert [name for name in ended.flaky if "crashes.py" in name] == [
        "test_crashes.py::test_that_crashes_once",
        "test_crashes.py::test_that_hangs_once_where_no_signal_is_handled",
    ]
    assert ended.closing_line.startswith("3 passed, ")
    assert "Timeout (0:00:02)!" in ended.output, "the stacks of the hung process"
    child = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(child), 30, "the end of what the hung test had started")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_fails_twice_has_failed_with_both_tracebacks(tmp_path: Path, workers: str) -> None:
    ended = run(tmp_path, "-n", workers, "--retry-failed-alone", test_broken=BROKEN)

    assert ended.status == 1, ended.output
    assert ended.flaky == []
    assert ended.closing_line == "2 failed, 1 passed"
    assert "AssertionError: assert 'first' == 'neither'" in ended.output
    assert "AssertionError: assert 'second' == 'neither'" in ended.output
    assert "the first time, too" in ended.output
    assert "The second run ended with status 7." in ended.output
    assert "FAILED test_broken.py::test_that_is_broken" in ended.output


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    many = BROKEN + "".join(f"\ndef test_{n}():\n    assert False\n" for n in range(20))

    ended = run(tmp_path, "--retry-failed-alone", test_broken=many)

    assert ended.status == 1, ended.output
    assert ended.closing_line == "22 failed, 1 passed"
    assert "too many to be run again" in ended.output
    assert "'second'" not in ended.output


def test_an_interrupted_run_reports_what_has_failed_until_then(tmp_path: Path) -> None:
    interrupted = "def test_that_fails():\n    assert False\n\ndef test_interrupt():\n    raise KeyboardInterrupt\n"

    ended = run(tmp_path, "--retry-failed-alone", test_interrupted=interrupted)

    assert ended.status == 2, ended.output
    assert "FAILED test_interrupted.py::test_that_fails" in ended.output
    assert ended.closing_line == "1 failed"


def test_a_failure_is_final_unless_second_runs_are_asked_for(tmp_path: Path) -> None:
    ended = run(tmp_path, test_races=RACES)

    assert ended.status == 1, ended.output
    assert ended.flaky == []
    assert ended.closing_line == "2 failed, 3 passed, 1 error"
