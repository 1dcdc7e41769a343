"""Every name of the lists has its verdict, and the share of refusals is what the documentation says."""

import json
import re
from pathlib import Path

import pytest

from flotilla.importers.coverage import RECORDED, UNACCOUNTED, counts, coverage, find, refused_share
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import SYSTEMS
from flotilla.shared.errors import InvalidSpec

LISTS = Path(__file__).parent / "parameters"
ROOT = Path(__file__).parents[3]
ROWS = coverage(LISTS)


def test_every_listed_name_is_accounted_for() -> None:
    names = sum(len(json.loads(path.read_text())["parameters"]) for path in LISTS.glob("*.json"))

    assert len(ROWS) == names > 640
    assert [row.name for row in ROWS if row.verdict == UNACCOUNTED] == []


def test_at_most_three_in_ten_are_refused() -> None:
    refused, relevant = refused_share(ROWS)

    assert refused / relevant < 0.3


def test_each_verdict_has_its_reason_and_those_with_an_effect_their_fields() -> None:
    for row in ROWS:
        assert row.reason
        assert bool(row.targets) == (row.verdict in {Verdict.APPLIED, Verdict.TRANSLATED}), row.name


@pytest.mark.parametrize("metric", RECORDED)
def test_a_metric_that_is_called_recorded_is_recorded_under_its_name(metric: str) -> None:
    recorders = (ROOT / "services" / "trainer", ROOT / "services" / "gateway")
    sources = [path.read_text(encoding="utf-8") for folder in recorders for path in folder.rglob("*.py")]

    assert any(f'"{metric}"' in source for source in sources)


def test_the_documentation_has_these_counts() -> None:
    page = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")

    for file, found in counts(ROWS).items():
        numbers = " | ".join(str(found[verdict]) for verdict in Verdict)
        assert f"| `{file}` | {numbers} |" in page, f"{file}: {numbers}"
    refused, relevant = refused_share(ROWS)
    assert f"{refused} of {relevant}" in re.sub(r"\s+", " ", page)


def test_an_unknown_name_is_unaccounted(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('{"system": "verl", "parameters": [{"name": "data.unheard_of"}]}')

    assert [row.verdict for row in coverage(tmp_path)] == [UNACCOUNTED]
    assert find("another system", "data.path") is None


@pytest.mark.parametrize("text", ["", "[]", '{"system": "verl"}', '{"system": 1, "parameters": [1]}'])
def test_a_file_that_is_no_list_is_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.json").write_text(text)

    with pytest.raises(InvalidSpec, match="no list of parameters"):
        coverage(tmp_path)


def test_a_directory_without_lists_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="holds no list"):
        coverage(tmp_path)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_spelling_leads_to_its_row(system: str) -> None:
    for spelling, name in SYSTEMS[system].spellings.items():
        found = SYSTEMS[system].find(spelling)
        assert found is not None and found.name == name
