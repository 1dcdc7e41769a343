"""The site has each page where its links expect it, and loads nothing from elsewhere."""

from pathlib import Path

import pytest

from docs.site.build import SHIM, lay_out, make_whole


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
