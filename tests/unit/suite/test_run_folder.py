"""What takes long is made once in a run, whichever of its processes asks first."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.suite.run_folder import VARIABLE, made_once


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def test_who_asks_while_it_is_made_waits_and_makes_nothing() -> None:
    calls: list[Path] = []
    both = Barrier(2)

    def make(path: Path) -> None:
        calls.append(path)
        path.mkdir()
        (path / "content").write_text("whole")

    def ask() -> str:
        both.wait(10)
        return (made_once("thing", make) / "content").read_text()

    with ThreadPoolExecutor(2) as askers:
        contents = [asked.result(10) for asked in [askers.submit(ask), askers.submit(ask)]]

    assert contents == ["whole", "whole"]
    assert len(calls) == 1


def test_what_was_not_finished_is_made_again() -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        made_once("thing", fail)

    assert list(made_once("thing", Path.mkdir).iterdir()) == []
