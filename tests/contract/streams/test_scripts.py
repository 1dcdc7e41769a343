"""How the server's scripts are written: what they are given has names, in one place at the top."""

import re
from pathlib import Path

import pytest

LUA = Path(__file__).parents[3] / "shared" / "streams" / "redis" / "lua"
SCRIPTS = sorted(path for path in LUA.glob("*.lua") if path.stem != "prelude")
GIVEN = re.compile(r"\b(KEYS|ARGV)\b")


def parts(path: Path) -> tuple[str, list[str]]:
    """Split a script into the comment at its head, and its code without comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(lines[:count]), [line.partition("--")[0] for line in lines[count:]]


def test_there_are_scripts_to_check() -> None:
    assert len(SCRIPTS) > 15


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_is_given_is_named_before_anything_else_and_documented(path: Path) -> None:
    head, code = parts(path)
    names = [line for line in code if GIVEN.search(line)]

    assert names == code[: len(names)], "only the first lines of code know positions"
    assert all(re.match(r"local [a-z_]+(, [a-z_]+)* = ", line) for line in names), names
    assert {match[1] for line in names for match in GIVEN.finditer(line)} == set(GIVEN.findall(head)), head
    assert "Returns" in head
