"""Pages name files that exist, and link to pages and sections that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OURS = ("flotilla", "services", "shared", "tests", "benchmarks", "examples", "docker", "docs")
FILE = re.compile(rf"`((?:{'|'.join(OURS)})/[\w./-]+)(?::\w+)?`")
SHORT = re.compile(r"`([\w.]+(?:/[\w.-]+)+\.(?:py|lua|md))`")
"""The end of a path, such as ``redis/hop.py``."""
LINK = re.compile(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]+))?\)")


def anchors_of(text: str) -> set[str]:
    """List the names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = FILE.findall(page.read_text(encoding="utf-8"))

    assert [name for name in named if "prepared" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_end_of_a_path_that_a_page_names_is_that_of_a_file(page: Path) -> None:
    there = [path.relative_to(ROOT).as_posix() for top in OURS for path in (ROOT / top).rglob("*.*")]

    named = set(SHORT.findall(page.read_text(encoding="utf-8")))

    assert {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in there)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for target, anchor in LINK.findall(text):
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors_of(path.read_text())):
            missing.append(f"{target}#{anchor}" if anchor else target)

    assert missing == []
