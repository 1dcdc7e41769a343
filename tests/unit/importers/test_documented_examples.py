"""The examples on the pages of the importers become what the tables beside them say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.importers.build import build
from flotilla.importers.systems import read, read_launch_text, system_of
from tests.contract.shell_text import named_files

PAGES = Path(__file__).parents[3] / "docs" / "import"
ROW = re.compile(r"^\|([^|]*)\|([^|]*)\|[^|]*\|$", re.MULTILINE)
COMMAND = re.compile(r"flotilla import (\w+) (\S+)(?: --rows (\d+))? -o (\S+)")
EXAMPLES = [(page.name, *found) for page in sorted(PAGES.glob("*.md")) for found in COMMAND.findall(page.read_text())]


def value_at(document: dict[str, Any], path: str) -> object:
    """Take the value of a dotted key."""
    found: Any = document
    for key in path.split("."):
        found = found[key]
    return found


def rows_of(page: str, file: str, spec: str) -> list[tuple[list[str], list[str]]]:
    """List an example's rows: what is quoted of the launch file, and of the spec."""
    _, header, rest = page.partition(f"| `{file}` | `{spec}` | |\n")
    assert header, f"no table of {file} and {spec}"
    quoted = ROW.findall(rest.partition("\n\n")[0])
    return [(re.findall("`([^`]+)`", given), re.findall("`([^`]+)`", made)) for given, made in quoted[1:]]


def test_each_page_has_its_examples() -> None:
    names = [name for name, *_ in EXAMPLES]

    assert {name: names.count(name) for name in names} == {"openrlhf.md": 3, "roll.md": 3, "trl.md": 11, "verl.md": 3}


@pytest.mark.parametrize(("page", "system", "file", "rows", "spec"), EXAMPLES)
def test_an_example_becomes_what_its_table_says(
    page: str, system: str, file: str, rows: str, spec: str, tmp_path: Path
) -> None:
    text = (PAGES / page).read_text(encoding="utf-8")
    for name, content in named_files(text).items():
        (tmp_path / name).write_text(content)

    given = read(system, read_launch_text(tmp_path / file), (), {}, source=str(tmp_path / file))
    imported = build(system_of(system, given), given, rows=int(rows) if rows else None)

    assert imported.may_run(), imported.report.render()
    table = rows_of(text, file, spec)
    assert len(table) >= 5
    launch = (tmp_path / file).read_text()
    assert [each for quoted, _ in table for each in quoted if each not in launch] == []
    promised = dict(each.split(": ", 1) for _, quoted in table for each in quoted)
    assert {path: value_at(imported.document, path) for path in promised} == {
        path: yaml.safe_load(value) for path, value in promised.items()
    }
