"""The top of the repository has what a newcomer reads, and nothing that a command left; a wheel has all other files."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.suite.names import is_named_after, measure

ROOT = Path(__file__).parents[2]
EXPECTED = {
    ".dockerignore",
    ".gitignore",
    ".pre-commit-config.yaml",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "docker-compose.gpu.yml",
    "docker-compose.yml",
    "pyproject.toml",
    "requirements.lock",
}


PACKAGES = ("flotilla", "services", "shared")


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_a_wheel_has_every_file_of_the_packages_and_its_list_names_nothing_else() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    paths = [Path(path) for path in listed.stdout.split("\0") if path and not path.endswith(".py")]
    files = [path for path in paths if not (ROOT / path).is_symlink()]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns: list[str] = settings["package-data"]["*"]

    assert files
    assert [str(path) for path in files if not any(path.match(pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(path.match(pattern) for path in files)] == []


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a git checkout")
def test_only_known_files_are_tracked_at_the_top() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)

    assert {path for path in listed.stdout.split("\0") if path and "/" not in path} == EXPECTED


def test_nine_in_ten_modules_have_their_unit_tests_under_their_name() -> None:
    found, missed = measure()

    assert len(found) > 250
    assert len(missed) <= (len(found) + len(missed)) / 10, "see `python -m tests.suite.names`"
    assert is_named_after(Path("test_paged_pages.py"), "services.rollout.engines.decoders.paged")
    assert not is_named_after(Path("test_pages.py"), "services.rollout.engines.decoders.paged")


def test_migrations_follow_each_other_one_by_one() -> None:
    versions = ROOT / "services/gateway/store/migrations/versions"
    named = [path.name[:4] for path in sorted(versions.glob("[0-9]*.py"))]
    assert named == [f"{number:04d}" for number in range(1, len(named) + 1)]
    for path, before in zip(sorted(versions.glob("[0-9]*.py")), [None, *named[:-1]], strict=True):
        text = path.read_text()
        assert f'revision = "{path.name[:4]}"' in text
        assert f"down_revision = {before and chr(34) + before + chr(34)}" in text
