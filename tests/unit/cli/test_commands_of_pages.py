"""Commands that pages show are commands that there are."""

import re
import shlex
from pathlib import Path

import pytest

from flotilla.cli.command_line import build_parser

PAGE = Path(__file__).parents[3] / "docs" / "continue.md"


def commands_of(page: Path) -> list[list[str]]:
    """List the commands of a page's code blocks, without ``flotilla`` and comments."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("flotilla ")]


@pytest.mark.parametrize("words", commands_of(PAGE), ids=" ".join)
def test_the_command_line_takes_it(words: list[str]) -> None:
    assert build_parser().parse_args(words).function
