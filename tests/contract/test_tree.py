"""The top of the repository has what a newcomer should read, and nothing that a command left there."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPECTED = {
    ".dockerignore",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "docker-compose.yml",
    "pyproject.toml",
    "requirements.lock",
}


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_only_known_files_are_tracked_at_the_top() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)

    assert {path for path in listed.stdout.split("\0") if path and "/" not in path} == EXPECTED
