"""A taskset of the real verifiers 0.4, in an interpreter of its own, plays episodes with its harness and rewards."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.agents.tasksets import TASK, load_taskset, rows_of_taskset
from flotilla.shared.errors import InvalidSpec
from tests.integration.gateway.arithmetic import check_that_it_plays


def interpreter_with_tasksets(folder: Path) -> str:
    """Find or make the interpreter that has verifiers 0.4."""
    if found := os.environ.get("FLOTILLA_TASKSETS_PYTHON"):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=600)
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "verifiers==0.4.0"], capture_output=True, timeout=900)
    if done.returncode:
        pytest.skip(f"verifiers 0.4 cannot be installed: {done.stderr[-500:].decode(errors='replace')}")
    return python


@pytest.fixture(scope="module")
def tasksets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield interpreter_with_tasksets(tmp_path_factory.mktemp("tasksets"))


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_a_taskset_plays_and_its_rewards_grade(tmp_path: Path, tasksets: str) -> None:
    source = "examples/verifiers/arithmetic_taskset.py"
    await check_that_it_plays(tasksets, source, tmp_path, TASK, lambda path: {"taskset": {"path": path}})


def test_without_verifiers_a_taskset_is_refused_with_what_to_install() -> None:
    with pytest.raises(InvalidSpec, match=r"verifiers==0\.4\.0"):
        load_taskset("any", {})


def test_a_taskset_without_an_end_needs_a_limit() -> None:
    endless = SimpleNamespace(taskset=SimpleNamespace(bounded=False))

    with pytest.raises(InvalidSpec, match="--limit"):
        next(rows_of_taskset(endless))
