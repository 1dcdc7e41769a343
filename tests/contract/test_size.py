"""No module is longer than a reader takes in at once, and no function longer than a screen."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES_OF_A_MODULE = 400
MOST_LINES_OF_A_FUNCTION = 60
LONGER = {
    "services/trainer/algorithms/objective.py:policy_objective": "its arguments are documented one by one, with shapes",
}
"""Functions that are longer, and why."""


def modules() -> list[Path]:
    return sorted(path for top in ("flotilla", "services", "shared") for path in (ROOT / top).rglob("*.py"))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{path.relative_to(ROOT).as_posix()}:{node.name}", node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_is_of_a_readable_size(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_A_MODULE
    long = {name: lines for name, lines in functions(path) if lines > MOST_LINES_OF_A_FUNCTION and name not in LONGER}
    assert long == {}


def test_the_exceptions_are_still_needed() -> None:
    lengths = dict(pair for path in modules() for pair in functions(path))

    assert all(lengths[name] > MOST_LINES_OF_A_FUNCTION for name in LONGER)
