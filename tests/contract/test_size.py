"""No module is longer than a reader takes in at once, and no function longer than a screen."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES_OF_A_MODULE = 400
MOST_LINES_OF_A_FUNCTION = 60
LONGER = {
    "services/trainer/algorithms/objective.py:policy_objective": "its arguments are documented one by one, with shapes",
}
"""Functions that are longer, and why."""


def modules() -> list[Path]:
    return sorted(path for top in ("flotilla", "services", "shared") for path in (ROOT / top).rglob("*.py"))


@cache
def functions(path: Path) -> dict[str, int]:
    """Count the lines of each function of a module."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            name = f"{path.relative_to(ROOT).as_posix()}:{node.name}"
            found[name] = max(found.get(name, 0), node.end_lineno - node.lineno + 1)
    return found


def test_modules_and_functions_are_of_a_readable_size() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_bytes().splitlines()) for path in modules()}
    functions_of_all = {name: lines for path in modules() for name, lines in functions(path).items()}

    assert len(lengths) > 50
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES_OF_A_MODULE} == {}
    long = {name: lines for name, lines in functions_of_all.items() if lines > MOST_LINES_OF_A_FUNCTION}
    assert long.keys() == LONGER.keys(), "functions that are too long, and exceptions that are needed no more"
