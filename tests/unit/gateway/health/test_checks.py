"""Each dead signal is named by its cause alone, and what is healthy by nothing."""

from pathlib import Path
from typing import Any

import pytest

from flotilla.services.gateway.monitoring.health.checks import CHECKS, find
from flotilla.services.gateway.monitoring.health.evidence import Sampled
from flotilla.shared.config.sections.health import CheckName, HealthConfig
from flotilla.shared.schemas.health import SampleExcerpt
from tests.unit.gateway.health.builders import evidence, facts, found, graded, steps

PAGE = (Path(__file__).parents[4] / "docs" / "health.md").read_text()
NEVER = {"flat_groups": 40, "signalless_groups": 40, "repeated": 350, "answered": 0}
DEAD = {"flat_groups": 48, "signalless_groups": 48, "repeated": 384}


@pytest.mark.parametrize(
    ("seen", "name"),
    [
        ({"graded": graded(errors=384, scored=0, repeated=0), "last_error": "custom: boom"}, "grader_failing"),
        (
            {"graded": graded(errors=384, label_errors=384, scored=0, repeated=0), "last_error": "the label is empty"},
            "wrong_labels",
        ),
        ({"graded": graded(errors=20, scored=364)}, "grades_missing"),
        ({"graded": graded(scored=364)}, "grades_missing"),
        ({"graded": graded(errors=128, scored=256, groups=5), "last_error": "custom: boom"}, "grades_missing"),
        ({"graded": graded(**DEAD, answered=2), "graded_ever": graded(**DEAD)}, "no_answer_found"),
        ({"graded": graded(**DEAD), "graded_ever": graded(**DEAD)}, "never_right"),
        (
            {"facts": facts(names_answers=False), "graded": graded(**DEAD), "graded_ever": graded(**DEAD)},
            "constant_reward",
        ),
        ({"graded": graded(**DEAD), "last_reward": 1.0}, "nothing_left"),
        ({"graded": graded(flat_groups=48, signalless_groups=48, repeated=370)}, "no_signal"),
        ({"graded": graded(truncated=384, **NEVER)}, "always_truncated"),
        ({"graded": graded(empty=384, **NEVER)}, "empty_completions"),
        ({"sampled": Sampled(prompts=48, doubled_special=48)}, "template_mismatch"),
        ({"sampled": Sampled(prompts=48, without_start=48), "graded": graded(truncated=384)}, "template_mismatch"),
        ({"sampled": Sampled(prompts=48, completions=384, past_special=384)}, "template_mismatch"),
        ({"steps": steps(**{"updates/skipped": 1.0})}, "not_finite"),
        ({"steps": steps(grad_norm=4000.0)}, "diverging"),
        ({"steps": steps(**{"loss/total": -900.0}), "graded": graded(**DEAD, answered=0)}, "diverging"),
        ({"steps": steps(**{"kl/mean": 3.0})}, "kl_exploding"),
        ({"steps": steps(**{"ratio/approx_kl": 1.5})[-3:]}, "engine_mismatch"),
        (
            {"steps": steps(**{"correction/log_ppl_abs_diff": 0.9})},
            "engine_mismatch",
        ),
        ({"steps": steps(**{"ratio/approx_kl": 6.0, "lag/max": 1.0}), "graded": graded(truncated=384)}, "diverging"),
        ({"steps": steps(**{"correction/log_ppl_abs_diff": 39.0, "lag/max": 2.0})}, "diverging"),
        ({"graded": graded(truncated=384, answered=0, **DEAD)}, "collapsed"),
        ({"graded": graded(flat_groups=48, signalless_groups=48, identical_groups=48, repeated=300)}, "entropy_gone"),
        ({"steps": steps(entropy=0.001), "graded": graded(flat_groups=40, signalless_groups=40)}, "entropy_gone"),
    ],
)
def test_a_dead_signal_is_named_by_its_cause(seen: dict[str, Any], name: str) -> None:
    assert found(**seen) == [CheckName(name)]


@pytest.mark.parametrize(("reward", "answers", "name"), [(1.0, False, "constant_reward"), (0.0, True, "never_right")])
def test_a_reward_service_that_joins_makes_no_constant_reward_a_different_one(
    reward: float, answers: bool, name: str
) -> None:
    """The first sample that each of three services grades repeats nothing that it knows of."""
    rewards = {"last_reward": reward, "highest_reward": reward, "lowest_reward": reward}
    graded_ever = graded(**DEAD | {"repeated": 381})

    assert found(facts=facts(names_answers=answers), graded=graded(**DEAD), graded_ever=graded_ever, **rewards) == [
        CheckName(name)
    ]


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {"steps": ()},
        {"steps": steps(1)},
        # Few groups may be alike by chance.
        {"graded": graded(groups=20, flat_groups=20, signalless_groups=20, samples=80, scored=80, repeated=79)},
        # A weak start: most groups are all wrong, some are not.
        {"graded": graded(flat_groups=44, signalless_groups=44, filtered_groups=44, repeated=370, answered=300)},
        # A hard one: half of the answers are cut off.
        {"graded": graded(truncated=200, answered=150)},
        # A grader that fails now and then.
        {"graded": graded(errors=15, scored=369, repeated=200)},
        # The gradient norm of the first steps, and of an unlucky one.
        {"steps": steps(grad_norm=7.0)},
        {"steps": steps(**{"loss/total": 3.0})},
        # Answers are sure, and still differ in their reward.
        {"steps": steps(entropy=0.005)},
        # Stale tokens, or those of a version with several updates, differ rightly.
        {"steps": steps(**{"ratio/approx_kl": 0.5, "lag/max": 1.0})},
        {"steps": steps(**{"ratio/approx_kl": 1.5, "lag/max": 2.0})},
        {"steps": steps(**{"ratio/approx_kl": 1.5}), "facts": facts(updates_per_version=4)},
        # What the engine recorded is after a cut, and the trainer's before it.
        {"steps": steps(**{"correction/log_ppl_abs_diff": 1.5}), "facts": facts(records_the_cut=True)},
        {"steps": steps(**{"correction/log_ppl_abs_diff": 9.0, "lag/max": 1.0}), "facts": facts(records_the_cut=True)},
        # A dump may have been sampled by other weights than those that it trains.
        {"steps": steps(**{"ratio/approx_kl": 1.5}), "facts": facts(is_dump=True)},
        {"steps": steps(**{"kl/mean": 1.0})},
        {"sampled": Sampled(prompts=48, doubled_special=5, completions=384, past_special=90)},
    ],
)
def test_what_is_healthy_is_named_by_nothing(seen: dict[str, Any]) -> None:
    assert found(**seen) == []


def test_rewards_that_nothing_learns_from_may_be_alike() -> None:
    taught = facts(names_answers=False, learns_from_rewards=False)
    constant = {"graded": graded(**DEAD), "graded_ever": graded(**DEAD), "highest_reward": 0.0}

    assert found(facts=taught, **constant) == []
    assert found(facts=facts(names_answers=False), **constant) == [CheckName.CONSTANT_REWARD]


def test_a_check_that_is_off_finds_and_explains_nothing() -> None:
    dead = evidence(graded=graded(truncated=384, answered=0, **DEAD), graded_ever=graded(**DEAD))

    assert [each.check.name for each in find(dead)] == [CheckName.ALWAYS_TRUNCATED]
    off = find(dead, without=[CheckName.ALWAYS_TRUNCATED])
    assert [each.check.name for each in off] == [CheckName.NO_ANSWER_FOUND]


def test_thresholds_are_the_specs() -> None:
    strict = facts(thresholds=HealthConfig(signalless_share=0.1, min_groups=10))

    assert found(facts=strict) == [CheckName.NO_SIGNAL]


def test_every_check_is_made_once_and_is_in_the_page() -> None:
    assert sorted(check.name for check in CHECKS) == sorted(CheckName)
    assert [name for name in CheckName if f"| `{name.value}` |" not in PAGE] == []


@pytest.mark.parametrize("counts", [{"errors": 19, "scored": 365}, {"samples": 16, "errors": 1, "scored": 15}])
def test_a_few_samples_without_a_grade_are_no_finding(counts: dict[str, int]) -> None:
    assert CheckName.GRADES_MISSING not in found(graded=graded(**counts))


def test_a_part_without_grades_is_told_with_the_last_error_and_such_an_answer() -> None:
    example = SampleExcerpt(prompt="1+1?", completion="two", label="2", reason="custom: boom")
    seen = graded(samples=300, errors=90, scored=200, repeated=100)

    (finding,) = find(evidence(graded=seen, last_error="custom: boom", ungraded_sample=example))

    assert finding.seen.text == (
        "100 of the last 300 samples (33%) have no grade: grading failed for 90, no grader had an opinion of 10; the "
        "last error: custom: boom; such as the answer 'two' (label '2')"
    )
    assert finding.seen.sample == example
