"""The arithmetic example's problems say what their chains say, and the split keeps chains apart."""

import random
import re
from dataclasses import replace

import pytest

from examples.arithmetic.problems import (
    Problem,
    chain_of,
    draw,
    guess_near,
    heldout_set,
    is_held_out,
    terse_answer,
    training_set,
    worked_solution,
)
from examples.arithmetic.settings import ProblemSettings, settings_of

PENS = Problem("Ana", "pens", 47, (8, -5), ("buys", "sells"))


def test_a_problem_reads_as_its_chain_says() -> None:
    assert PENS.prompt == "Ana has 47 pens, buys 8 and sells 5. How many now?"
    assert chain_of(PENS) == "47+8-5"
    assert worked_solution(PENS) == "47+8=55; 55-5=50 #### 50"
    assert terse_answer(PENS.answer) == "#### 50"


def test_every_step_of_a_worked_solution_is_right() -> None:
    rng = random.Random(1)
    for _ in range(200):
        problem = draw(settings_of("hard", 0).problems, rng)

        working, final = worked_solution(problem).split(" #### ")

        total = problem.start
        for step, change in zip(working.split("; "), problem.changes, strict=True):
            left, operand, result = re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", step).groups()
            assert (int(left), int(operand)) == (total, change)
            total += change
            assert int(result) == total
        assert int(final) == total == eval(chain_of(problem))


def test_the_split_looks_at_the_chain_and_not_at_the_words() -> None:
    problems = [draw(ProblemSettings(), random.Random(seed)) for seed in range(200)]
    retold = [replace(problem, name="Someone", item="things") for problem in problems]

    assert [is_held_out(problem) for problem in problems] == [is_held_out(problem) for problem in retold]
    assert 0 < sum(map(is_held_out, problems)) < 40


def test_held_out_problems_share_no_chain_with_training_ones() -> None:
    rng = random.Random(0)

    training = training_set(1000, ProblemSettings(), rng)
    heldout = heldout_set(100, ProblemSettings(), rng)

    assert len({problem.prompt for problem in training}) == 1000
    assert len({chain_of(problem) for problem in heldout}) == 100
    assert not {chain_of(problem) for problem in training} & {chain_of(problem) for problem in heldout}


def test_a_distribution_with_too_few_problems_is_refused() -> None:
    few = ProblemSettings({2: 1.0}, largest_start=1, largest_operand=1)

    with pytest.raises(ValueError, match="do not have 10 distinct"):
        heldout_set(10, few, random.Random(0))


def test_a_guess_is_near_and_never_negative() -> None:
    small = Problem("Ana", "pens", 3, (-1, -1), ("sells", "sells"))
    rng = random.Random(0)

    guesses = {guess_near(PENS, 9, rng) for _ in range(1000)}

    assert guesses == set(range(41, 60))
    assert min(guess_near(small, 9, rng) for _ in range(100)) == 0


def test_the_fingerprint_follows_every_setting() -> None:
    standard = settings_of("standard", 0)

    assert settings_of("standard", 0).fingerprint() == standard.fingerprint()
    assert settings_of("standard", 1).fingerprint() != standard.fingerprint()
    assert settings_of("hard", 0).fingerprint() != standard.fingerprint()
    assert replace(standard, problems=ProblemSettings(largest_start=40)).fingerprint() != standard.fingerprint()


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="standard, hard"):
        settings_of("easy", 0)
