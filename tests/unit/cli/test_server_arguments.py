"""A server's own parser reads the options of an engine before anything starts."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from flotilla.server_arguments import check_options
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from tests.unit.gateway.builders import a_spec

pytestmark = pytest.mark.anyio


def an_engine(**fields: Any) -> ExperimentSpec:
    return a_spec(rollout={"engine": {"kind": "sglang", **fields}})


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    return tmp_path / "asked"


def interpreter(directory: Path, asked: Path, *, words: str, code: int) -> dict[str, str]:
    """Write a program in the place of an interpreter that notes what it is asked."""
    program = directory / "python"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {shlex.quote(str(asked))}\necho {shlex.quote(words)} >&2\nexit {code}\n'
    )
    program.chmod(0o700)
    return {"FLOTILLA_SGLANG_PYTHON": str(program), "FLOTILLA_TOKEN": "secret"}


async def test_what_the_server_does_not_know_is_refused_in_its_words(tmp_path: Path, asked: Path) -> None:
    environment = interpreter(tmp_path, asked, words="sglang: error: unrecognized arguments: --tp-sise 2", code=2)

    with pytest.raises(InvalidSpec, match=r"options: the sglang server refuses them: .* --tp-sise 2"):
        await check_options(an_engine(options={"tp_sise": 2}), environment)

    assert asked.read_text().split()[1:] == ["sglang", "--tp-sise", "2"]


async def test_a_server_that_cannot_be_asked_is_no_verdict(tmp_path: Path, asked: Path) -> None:
    environment = interpreter(tmp_path, asked, words="ModuleNotFoundError: no module", code=1)

    await check_options(an_engine(options={"tp_sise": 2}), environment)

    assert asked.exists()


async def test_without_options_or_an_interpreter_nobody_is_asked(tmp_path: Path, asked: Path) -> None:
    environment = interpreter(tmp_path, asked, words="error", code=2)

    await check_options(an_engine(), environment)
    await check_options(an_engine(options={"tp_sise": 2}), {})

    assert not asked.exists()
