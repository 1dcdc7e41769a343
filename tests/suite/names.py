"""Whether a stranger finds a module's unit tests by its name: ``python -m tests.suite.names``.

The tests of ``a/b/c.py`` are in ``tests/unit/**/test_c.py``, in ``test_c_<aspect>.py`` where there are many, or in
``test_b.py`` where one file holds those of a small folder; each imports from the module.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("flotilla", "services", "shared")
DATA = ("shared/schemas/", "shared/config/", "shared/testing/", "shared/errors", "shared/clock")
"""What most tests build their cases of: it is their subject only where they are named after it."""


@cache
def modules() -> dict[str, Path]:
    """Name each module of the product as it is imported."""
    paths = (path.relative_to(ROOT) for top in PRODUCT for path in (ROOT / top).rglob("[!_]*.py"))
    return {".".join(path.with_suffix("").parts): path for path in paths if "migrations" not in path.parts}


def uses(text: str) -> Counter[str]:
    """Count how often a test file mentions what it imports of each module."""
    found = Counter[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            origin = node.module.removeprefix("flotilla.") if "flotilla." in node.module else node.module
            for name in node.names:
                for module in (f"{origin}.{name.name}", origin, f"flotilla.{origin}"):
                    if module in modules():
                        found[module] += text.count(name.asname or name.name)
                        break
    return found


def is_named_after(test: Path, module: str) -> bool:
    """Tell whether the file's name leads from the module to it."""
    *_, folder, name = ("", *module.split("."))
    stem = test.stem.removeprefix("test_")
    return stem in (name, folder) or stem.startswith((f"{name}_", f"{folder}_{name}"))


def measure() -> tuple[set[str], set[str]]:
    """Return the modules whose tests are found by name, and those that are some file's main subject but are not."""
    found, subjects = set[str](), set[str]()
    for test in (ROOT / "tests/unit").rglob("test_*.py"):
        counts = uses(test.read_text(encoding="utf-8"))
        found |= {module for module in counts if is_named_after(test, module)}
        code = Counter({name: num for name, num in counts.items() if not str(modules()[name]).startswith(DATA)})
        subjects |= {name for name, _ in code.most_common(1)}
    return found, subjects - found


def main() -> None:
    """Print the share, and the modules whose tests have another name."""
    found, missed = measure()
    print(f"{len(found)} of {len(found) + len(missed)} modules with unit tests are found by name")
    for module in sorted(missed):
        print(f"  {modules()[module]}")


if __name__ == "__main__":
    main()
