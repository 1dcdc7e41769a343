"""What the comparison with TRL concludes from two runs, and that both sides are graded alike."""

from pathlib import Path

import anyio
import pytest

from benchmarks.end_to_end import ACCURACY, lines_of, per_step, row, seconds_to
from benchmarks.end_to_end_runs import Run
from benchmarks.plain_rewards import checksum, numeric
from flotilla.services.reward.verifiers.matching import NumericVerifier
from flotilla.shared.config.sections.reward import NumericConfig
from flotilla.shared.schemas.grading import GradingSample

ANSWERS = [
    "1+2=3 #### 3",
    "#### 4",
    "3",
    "#### 3 #### 4",
    "#### 3.",
    "#### 3,000",
    "#### 03",
    "####",
    "#### -3",
    "#### 3 pens",
]


def a_run(started: float, *ends: float) -> Run:
    return Run(started, ends, [100.0] * len(ends), {}, [0.1] * len(ends), [0.2] * len(ends))


@pytest.mark.parametrize("label", ["3", "3000", "-3"])
def test_trl_is_given_the_reward_of_the_numeric_component(label: str) -> None:
    samples = [GradingSample(id="0/0", prompt="", response=answer, label=label) for answer in ANSWERS]

    grades = anyio.run(NumericVerifier(NumericConfig()).score, samples)

    assert [numeric(answer, label) for answer in ANSWERS] == [grade.reward for grade in grades]


def test_a_checksum_differs_from_answer_to_answer() -> None:
    rewards = [checksum(f"answer {number}", "") for number in range(8)]

    assert len(set(rewards)) == 8
    assert all(0 <= reward < 1 for reward in rewards)


def test_neither_the_start_nor_the_end_of_a_run_counts() -> None:
    run = a_run(0.0, 50.0, 51.0, 53.0, 99.0)  # loads, warms up, two steps, a checkpoint at the end

    assert run.seconds_per_step(warmup=1) == pytest.approx(1.5)
    assert run.seconds_until(3) == 53.0


def test_a_ratio_is_how_many_times_longer_trl_takes() -> None:
    found = per_step("real_size", "default", 0, (a_run(0.0, 1, 2, 3), a_run(0.0, 10, 14, 18)), 1)

    assert (found["flotilla"], found["trl"], found["ratio"]) == (1.0, 4.0, 4.0)


def test_without_trl_only_our_figures_are_there() -> None:
    found = per_step("real_size", "default", 0, (a_run(0.0, 1, 2, 3), None), 1)

    assert (found["flotilla"], found["trl"], found["ratio"]) == (1.0, None, None)
    assert lines_of([found])[1].split() == ["real_size", "default", "1", "1.000", "-", "-", "1.6x"]


def test_an_accuracy_is_reached_with_the_first_weights_that_have_it() -> None:
    run = a_run(100.0, 101, 102, 103, 104)

    assert seconds_to(run, {2: ACCURACY - 0.01, 4: ACCURACY}) == 4.0
    assert seconds_to(run, {2: 0.1, 4: 0.2}) is None


def test_medians_are_taken_over_seeds() -> None:
    found = [row("accuracy", "preset", seed, 1.0, theirs) for seed, theirs in enumerate((2.0, 3.0, 9.0))]

    assert lines_of(found)[1].split() == ["accuracy", "preset", "3", "1.000", "3.000", "3.00x", "3.0x"]


def test_our_custom_component_is_the_function_that_trl_is_given(tmp_path: Path) -> None:
    from benchmarks import plain_rewards

    sample = GradingSample(id="0/0", prompt="", response="words", label=None)

    assert plain_rewards.score(sample) == checksum("words", "")
