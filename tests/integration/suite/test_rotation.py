"""The commit's number in clones, whole and shallow; and a run that takes one slot of the long tests."""

import subprocess
from pathlib import Path

import pytest

from tests.integration.suite.running import run
from tests.suite.rotation import commit_number

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
LONG = "import pytest\n\n@pytest.mark.long\ndef test_it():\n    pass\n\ndef test_by_day():\n    pass\n"
PLUGINS = """
pytest_plugins = ["tests.suite.rotation"]

import tests.suite.rotation as rotation
rotation.SECONDS = {"test_a.py": 2, "test_b.py": 2, "test_c.py": 2, "test_d.py": 2}

def pytest_configure(config):
    config.addinivalue_line("markers", "long: minutes")
"""


def git(folder: Path, *command: str) -> str:
    return subprocess.run([*GIT, *command], cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout


def test_commits_are_counted_and_a_shallow_clone_goes_by_the_hash(tmp_path: Path) -> None:
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    whole.mkdir()
    git(whole, "init", "-q")
    for _ in range(3):
        git(whole, "commit", "-q", "--allow-empty", "-m", "c")
    git(tmp_path, "clone", "-q", "--depth", "1", whole.as_uri(), str(shallow))

    assert commit_number(whole) == 3
    assert commit_number(shallow) == int(git(whole, "rev-parse", "HEAD"), 16)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_has_one_slot_of_the_long_tests_beside_all_others(tmp_path: Path, workers: str) -> None:
    files = {f"test_{name}": LONG for name in ("a", "b", "c", "d", "never")}

    ended = run(tmp_path, "-n", workers, "--long-slot", "7", "-v", "-v", conftest=PLUGINS, **files)

    assert ended.status == 0, ended.output
    assert "long tests: slot 2 of 0 to 4, 2 seconds: test_c.py" in ended.output
    assert "test_c.py::test_it" in ended.output
    assert not any(f"test_{name}.py::test_it" in ended.output for name in ("a", "b", "d", "never"))
    assert all(f"test_{name}.py::test_by_day" in ended.output for name in ("a", "b", "c", "d", "never"))
