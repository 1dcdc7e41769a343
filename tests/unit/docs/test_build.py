"""The site has every page once, each where its links expect it, and loads nothing from elsewhere."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.site.build import ROOT, SHIM, lay_out, make_whole, pages

MADE = {"docs/reference/rest.md", "docs/reference/cli.md", "examples/notebook.md", "examples/sweep/sweep.md"}
"""Pages that the build writes."""


def entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(each)


def test_every_page_has_one_place_in_the_navigation() -> None:
    settings = tomllib.loads((ROOT / "docs" / "site" / "zensical.toml").read_text(encoding="utf-8"))

    assert sorted(entries(settings["project"]["nav"])) == sorted({*map(Path.as_posix, pages(ROOT)), *MADE})


def test_every_page_of_docs_is_listed_for_coding_assistants() -> None:
    listed = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    of_docs = [page.relative_to("docs").as_posix() for page in pages(ROOT) if page.parts[0] == "docs"]

    assert [page for page in of_docs if f"({page})" not in listed and not page.startswith("decisions/0")] == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for folder in ("docs/site", "examples/one"):
        (root / folder).mkdir(parents=True)
    for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG", "AGENTS"):
        (root / f"{name}.md").write_text(f"# {name}\n")
    (root / "docs" / "a.md").write_text("# A\n\n![plot](b.svg) [code](../examples/one/run.py) [root](../README.md#x)\n")
    (root / "docs" / "b.svg").write_text("<svg/>")
    (root / "examples" / "one" / "run.py").write_text("run()\n")
    (root / "examples" / "one" / "n.ipynb").write_text(
        '{"cells": [{"cell_type": "markdown", "source": ["# N"]}, {"cell_type": "code", "source": ["x = 1\\n", "x"]}]}'
    )
    return root


def test_pages_and_what_they_link_to_keep_their_places(repository: Path, tmp_path: Path) -> None:
    lay_out(repository, tmp_path / "pages")

    found = {path.relative_to(tmp_path / "pages").as_posix() for path in (tmp_path / "pages").rglob("*.*")}
    assert found >= {"README.md", "docs/a.md", "docs/b.svg", "examples/one/run.py", "docs/reference/cli.md"}
    notebook = (tmp_path / "pages" / "examples" / "one" / "n.md").read_text()
    assert notebook.startswith("# N\n") and "```python\nx = 1\nx\n```" in notebook


def test_a_page_that_shows_what_is_not_there_is_refused(repository: Path, tmp_path: Path) -> None:
    (repository / "docs" / "b.svg").unlink()

    with pytest.raises(FileNotFoundError, match=r"b\.svg"):
        lay_out(repository, tmp_path / "pages")


def test_a_script_of_another_server_is_found_and_the_builders_own_replaced(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.html"
    page.write_text(f'<script src="{SHIM}"></script><a href="https://a.example/">a link is followed, not loaded</a>')
    (tmp_path / "b.html").write_text('<link rel="stylesheet" href="https://b.example/font.css">')

    assert make_whole(tmp_path) == ["b.html: https://b.example/font.css"]
    assert '<script src="../assets/iframe_worker.js">' in page.read_text()
