"""What the documents name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([\w.]+(?:/[\w.-]+)+\.(?:py|lua|md))`")
TOPS = ("benchmarks", "docs", "examples", "flotilla", "services", "shared", "tests", "docker")


def documents() -> list[Path]:
    return sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_files_that_a_document_names_are_there(document: Path) -> None:
    there = [path.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).rglob("*.*")]

    named = set(NAMED.findall(document.read_text(encoding="utf-8")))

    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)} == set()
