"""``flotilla costs`` shows hours, tokens and, with prices, costs."""

import json
from pathlib import Path

import pytest

from flotilla.cli.__main__ import main
from flotilla.cli.exit_codes import ExitCode
from tests.unit.cli.gateway import serve
from tests.unit.cli.test_progress import a_view
from tests.unit.gateway.test_usage import A_USAGE, PRICES


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    view = a_view().model_copy(update={"id": "sum-1", "name": "sum"})
    serve(monkeypatch, [view], {"/experiments/sum-1/usage": A_USAGE.model_dump(mode="json")})


def test_without_prices_hours_and_tokens_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["costs", "sum-1"]) == ExitCode.DONE

    said = capsys.readouterr().out
    assert "spot-1" in said and "4.00" in said and "1,000,000" in said
    assert "2,000,000 of 4,000,000 generated tokens were trained (50%)" in said
    assert "500,000 of them had been handed over by rollouts that left" in said
    assert "all services" not in said


def test_with_prices_costs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)

    assert main(["costs", "sum-1", "--prices", str(tmp_path / "prices.yaml")]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "all services together cost 13.00 EUR, 6.50 EUR for a million trained tokens" in said

    assert main(["costs", "sum-1", "--prices", str(tmp_path / "prices.yaml"), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["costs"]["cost"] == 13.0


def test_a_gap_in_the_gateways_prices_is_told_and_ones_own_go_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = a_view().model_copy(update={"id": "sum-1", "name": "sum"})
    answer = A_USAGE.model_copy(update={"costs_problem": "no price fits cpu in the pool spot-1"})
    serve(monkeypatch, [view], {"/experiments/sum-1/usage": answer.model_dump(mode="json")})
    (tmp_path / "prices.yaml").write_text(PRICES)

    assert main(["costs", "sum-1"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "1,000,000" in said and "no price fits cpu in the pool spot-1; or give --prices FILE" in said

    assert main(["costs", "sum-1", "--prices", str(tmp_path / "prices.yaml")]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "all services together cost 13.00 EUR" in said and "no price fits" not in said


def test_prices_that_cannot_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["costs", "sum-1", "--prices", str(tmp_path / "none.yaml")]) != ExitCode.DONE
    assert "none.yaml cannot be read" in capsys.readouterr().err
