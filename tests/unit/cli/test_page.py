"""How ``flotilla page`` opens a browser, and what its demo is recorded by."""

import importlib.util
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from flotilla.cli.commands.page import open_browser


def test_the_token_is_in_no_command_line_and_the_browser_gets_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)

    open_browser("http://127.0.0.1:1234/#token=secret&x", tmp_path)

    (url,) = opened
    assert "secret" not in url
    leading = Path(url2pathname(urlsplit(url).path))
    assert leading.parent == tmp_path
    assert 'content="0; url=http://127.0.0.1:1234/#token=secret&amp;x"' in leading.read_text()


@pytest.mark.parametrize("name", ["record_demo", "openapi"])
def test_the_scripts_beside_the_page_import_what_there_is(name: str) -> None:
    path = Path(__file__).parents[3] / "page" / f"{name}.py"
    found = importlib.util.spec_from_file_location(f"page_{name}", path)
    assert found is not None and found.loader is not None

    found.loader.exec_module(importlib.util.module_from_spec(found))
