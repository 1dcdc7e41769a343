"""The soak in its smallest form: one window alone, one beside hostile neighbours."""

import json
import sys
from pathlib import Path

import pytest

from tests.soak import __main__ as soak

pytestmark = pytest.mark.long


def test_a_short_soak_grades_nothing_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, figures = tmp_path / "soak.md", tmp_path / "figures.json"
    options = ["--minutes", "0.5", "--window-seconds", "15", "--report", str(page), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["soak", *options])

    soak.main()  # what is lost in so short a time says nothing

    found = json.loads(figures.read_text())
    assert (found["false_grades"], found["rewarded"], found["problem"]) == ([], [], "")
    assert found["ledger"]["balanced"]
    assert [window["is_hostile"] for window in found["windows"]] == [False, True]
    alone, beside = found["windows"]
    assert (alone["programs"], alone["replies"], alone["requests"]) == (0, 0, 0)
    assert beside["programs"] > 0
    assert beside["replies"] > 0
    assert beside["requests"] > 0
    assert "| training steps |" in page.read_text()
