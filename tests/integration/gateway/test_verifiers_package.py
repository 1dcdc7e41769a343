"""The real `verifiers` package, in an interpreter of its own, plays episodes with its own client and rubric."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.test_verifiers import interpreter_with_verifiers
from tests.integration.gateway.arithmetic import check_that_it_plays

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


async def test_an_environment_of_verifiers_plays_and_its_rubric_grades(tmp_path: Path) -> None:
    python = await asyncio.to_thread(interpreter_with_verifiers, tmp_path / "interpreter")

    source = "examples/verifiers/arithmetic_env.py"
    await check_that_it_plays(python, source, tmp_path, "example_id", lambda path: {"path": path})
