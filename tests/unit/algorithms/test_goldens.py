"""The committed golden vectors, and that the runner notices what is wrong."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests import goldens
from tests.goldens.__main__ import main
from tests.goldens.case import Case, read_cases
from tests.goldens.runner import Outcome, Result, run, run_case, summary

DATA = Path(goldens.__file__).parent / "data"
FILES = sorted(path.name for path in DATA.glob("*.json"))


@pytest.fixture(scope="module")
def results() -> dict[str, list[Result]]:
    """Every committed case, run once."""
    return {name: list(run(read_cases(DATA / name))) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_every_case_of_a_file_agrees(name: str, results: dict[str, list[Result]]) -> None:
    assert results[name]
    assert summary(results[name])["failed"] == []


def test_few_cases_are_not_offered_and_each_says_why(results: dict[str, list[Result]]) -> None:
    result = summary(chain.from_iterable(results.values()))

    assert result["totals"][Outcome.NOT_APPLICABLE] <= 9
    assert all(len(reason.split(": ", 2)[2]) > 20 for reason in result["reasons"])


def a_case(**changes: object) -> Case:
    case = next(case for case in read_cases(DATA / "policy_losses.verl.json") if "loss" in case.expected)
    return replace(case, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["loss", "grad_log_probs"])
def test_a_wrong_expectation_fails(field: str) -> None:
    case = a_case()
    wrong = case.expected | {field: torch.as_tensor(case.expected[field]) * 1.01 + 1e-3}

    result = run_case(replace(case, expected=wrong))

    assert result.outcome is Outcome.FAILED
    assert field in result.reason


def test_the_name_of_a_case_does_not_matter() -> None:
    assert run_case(a_case(name="anything")).outcome is Outcome.PASSED


def test_an_unknown_function_is_not_applicable() -> None:
    result = run_case(a_case(function="compute_something_new"))

    assert result.outcome is Outcome.NOT_APPLICABLE
    assert "compute_something_new" in result.reason


def test_a_case_of_which_nothing_was_compared_fails() -> None:
    assert run_case(a_case(expected={"another figure": 1.0})).outcome is Outcome.FAILED


def test_the_command_exits_with_1_on_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((DATA / "preference_losses.openrlhf.json").read_text())
    content["cases"][0]["expected"]["loss"] += 0.1
    (tmp_path / "a.json").write_text(json.dumps(content))

    assert main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["totals"] == {"failed": 1, "passed": len(content["cases"]) - 1}


def test_the_command_exits_with_2_where_there_is_no_case(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2
