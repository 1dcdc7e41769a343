"""The two twins of the data plane lie side by side: whoever reads one finds the other under the same name."""

import ast
from pathlib import Path

import pytest

STREAMS = Path(__file__).parents[3] / "shared" / "streams"
OF_THE_SERVER = {"connection", "forwarding", "scripts"}
"""What only the client of a server needs."""
IN_PLACE_OF_THE_SERVER = {"streams"}


def modules(folder: str) -> set[str]:
    return {path.stem for path in (STREAMS / folder).glob("*.py")} - {"__init__"}


def classes(folder: str, module: str) -> set[str]:
    tree = ast.parse((STREAMS / folder / f"{module}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def test_each_module_of_one_has_one_of_the_other() -> None:
    assert modules("redis") - OF_THE_SERVER == modules("memory") - IN_PLACE_OF_THE_SERVER


@pytest.mark.parametrize("module", sorted(modules("memory") - IN_PLACE_OF_THE_SERVER))
def test_both_have_the_same_classes(module: str) -> None:
    memory = {name.removeprefix("Memory") for name in classes("memory", module)}

    assert {name.removeprefix("Redis") for name in classes("redis", module)} == memory
