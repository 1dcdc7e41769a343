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


def an_areal_case(expected: list[list[int]], **config: object) -> Case:
    """A rejection over one row of x = 0.5, -0.2, which AReaL's k1 is itself."""
    case = next(read_cases(DATA / "rollout_correction.areal.json"))
    assert case.function == "apply_rejection_sampling"
    inputs = {
        "old_log_probs": torch.tensor([[-1.0, -1.2]]),
        "rollout_log_probs": torch.tensor([[-1.5, -1.0]]),
        "response_mask": torch.tensor([[1, 1]]),
    }
    options = {"level": "token", "action": "mask", "agg": "mean", "upper": None, "lower": None} | config
    return replace(case, config=options, inputs=inputs, expected={"mask_out": torch.tensor(expected)})


@pytest.mark.parametrize(
    ("expected", "config"),
    [
        ([[0, 1]], {"metric": "kl_k1", "upper": 0.3}),
        ([[1, 0]], {"metric": "kl_k1", "upper": 0.6, "lower": -0.1}),
        ([[0, 0]], {"metric": "kl_k1", "upper": 0.1, "level": "sequence"}),
        # exp(-x) - 1 + x is 0.1065 and 0.0214; exp(x) - 1 - x would be 0.1487.
        ([[1, 1]], {"metric": "kl_k3", "upper": 0.12}),
        ([[0, 1]], {"metric": "kl_k3", "upper": 0.1}),
    ],
)
def test_areals_kl_is_of_the_proximal_policy_against_the_sampler(
    expected: list[list[int]], config: dict[str, object]
) -> None:
    result = run_case(an_areal_case(expected, **config))

    assert result.outcome is Outcome.PASSED, result.reason


def test_areals_largest_k1_of_a_sequence_is_not_offered() -> None:
    result = run_case(an_areal_case([[1, 1]], metric="kl_k1", upper=0.6, level="sequence", agg="max"))

    assert result.outcome is Outcome.NOT_APPLICABLE


@pytest.mark.parametrize(("worker", "is_read"), [("agentic", False), ("rlvr", True)])
def test_rolls_weight_of_the_policy_loss_is_read_outside_the_agentic_pipeline(worker: str, is_read: bool) -> None:
    cases = read_cases(DATA / "policy_losses.roll.json")
    case = next(case for case in cases if f"pipeline/{worker}/" in case.source and case.function.endswith("loss_func"))
    assert run_case(case).outcome is Outcome.PASSED

    result = run_case(replace(case, config=case.config | {"rl_loss_coef": 0.5}))

    assert (result.outcome is Outcome.FAILED) == is_read


@pytest.mark.parametrize("estimator", ["reinforce_baseline", "group_norm", "rloo", "dr_grpo"])
def test_openrlhfs_discount_is_1_where_members_of_a_group_are_compared(estimator: str) -> None:
    cases = read_cases(DATA / "advantages.openrlhf.json")
    case = next(case for case in cases if case.config.get("estimator") == estimator)

    assert run_case(replace(case, config=case.config | {"gamma": 0.9})).outcome is Outcome.PASSED


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
