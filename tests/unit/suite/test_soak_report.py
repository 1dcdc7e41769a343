"""What a soak concludes from its windows."""

import json

import pytest

from flotilla.services.reward.verifiers.code import parse_cases
from flotilla.shared.schemas.grading import GradingResponse
from tests.soak.load import LABEL, NUMBERS, grader_answer
from tests.soak.report import BEGIN, END, Report, Window, markdown, order_of, page_with, verdicts


def a_report(*windows: tuple[bool, float, float, int, int], **fields: object) -> Report:
    made = [Window(kind, seconds, steps, gradings, answers) for kind, seconds, steps, gradings, answers in windows]
    return Report("A", made, ledger={"issued": 4, "trained": 4, "balanced": True}, **fields)  # type: ignore[arg-type]


def test_windows_come_in_pairs_whose_order_changes() -> None:
    assert order_of(8) == [False, True, True, False, False, True, True, False]


def test_losses_compare_rates_and_not_counts() -> None:
    report = a_report((False, 10, 20, 10, 10), (True, 20, 36, 20, 20), (True, 10, 5, 10, 10), (False, 10, 10, 10, 10))

    assert report.rate("steps", is_hostile=False) == 1.5
    assert report.loss("steps") == pytest.approx(1 - (41 / 30) / 1.5)
    # Of the first pair 10 %, of the second half: the second one's order is the other way round.
    assert report.paired_loss("steps") == pytest.approx(0.3)
    assert report.loss("gradings") == pytest.approx(0.0)


def test_a_run_without_honest_work_has_lost_all() -> None:
    assert a_report((False, 10, 0, 0, 0), (True, 10, 0, 0, 0)).loss("steps") == 1.0
    assert Report().paired_loss("steps") == 1.0
    assert not Report().is_good


@pytest.mark.parametrize(
    ("fields", "hostile_steps", "is_good"),
    [
        ({}, 19, True),
        ({}, 17, False),
        ({"false_grades": ["1.0 was graded 0.0"]}, 20, False),
        ({"rewarded": ["a hostile reply"]}, 20, False),
        ({"problem": "it ended"}, 20, False),
        ({"absent": {"the sandbox does not answer": 3}}, 20, True),
    ],
)
def test_what_is_good(fields: dict[str, object], hostile_steps: float, is_good: bool) -> None:
    report = a_report((False, 10, 20, 20, 20), (True, 10, hostile_steps, 20, 20), **fields)

    assert report.is_good is is_good
    report.ledger = {**report.ledger, "balanced": False}
    assert not report.is_good


def test_the_page_says_what_was_seen() -> None:
    report = a_report((False, 10, 20, 20, 20), (True, 10, 19, 20, 20), absent={"no answer": 2})

    page = markdown(report, "python -m tests.soak --minutes 1", "2 cores")

    assert "| training steps | 2.000 | 1.900 | 5.0% | 5.0% |" in page
    assert "0 honest samples were graded wrongly, 2 got no grade" in page
    assert "issued 4, trained 4, balanced True" in page


def test_the_honest_grader_is_right() -> None:
    request = json.dumps({"id": "r", "samples": [{"response": "abc"}]}).encode()

    assert GradingResponse.model_validate_json(grader_answer("/", request)).grades[0].reward == 3.0
    assert [case.expected for case in parse_cases(LABEL, "python")] == [
        f"{sum(i * i for i in range(number))}\n" for number in NUMBERS
    ]


def test_a_run_takes_the_place_of_the_one_before_in_a_page_and_the_rest_of_it_stays() -> None:
    page = f"# Title\n\nbefore\n\n{BEGIN}\nold\n{END}\n\nafter\n"

    assert page_with("new\n", page) == page.replace("old", "new")
    assert f"{BEGIN}\nnew\n{END}" in page_with("new\n", "")


def test_each_thing_that_is_asked_has_a_verdict() -> None:
    windows = [Window(False, 10.0, 100, 20, 20), Window(True, 10.0, 80, 20, 20)]
    report = Report("A", windows, false_grades=["1.0 was graded 0.0"], ledger={"balanced": True})

    told = verdicts(report)

    assert [line.partition(":")[0] for line in told] == ["NO", "yes", "yes", "NO", "yes", "yes", "yes"]
    assert "20.0%" in told[0]
