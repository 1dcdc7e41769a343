"""Devices are lent where the trainer waits for longer than that takes, and no longer than its steps show a gain."""

import pytest

from flotilla.services.gateway.monitoring.lending import HEARD_SECONDS, REST, Lending, LentStep, Verdict, judge
from flotilla.shared.config.sections.resources import LendingConfig

CONFIG = LendingConfig(when_waiting=0.5, over_steps=3)
WAITING = LentStep(total=3.0, waited=2.0)
HELPED = LentStep(total=2.2, waited=1.0, lent=0.9, back=0.2)


def after(*steps: LentStep, before: Verdict | None = None) -> Verdict:
    return judge(steps, before or Verdict(), CONFIG)


LENDING = after(WAITING, WAITING, WAITING)


def test_nothing_is_lent_before_enough_steps_were_seen() -> None:
    found = after(WAITING, WAITING)

    assert not found.lends
    assert found.reason == "2 of 3 steps were seen"


def test_a_trainer_that_waits_for_most_of_its_time_lends() -> None:
    assert LENDING.lends
    assert LENDING.reason == "the trainer waited 67% of its time, 2.00 s in each step"


@pytest.mark.parametrize(
    ("step", "before", "words"),
    [
        (LentStep(total=3.0, waited=1.0), Verdict(), "waits 33% of its time, less than the 50% of when_waiting"),
        (WAITING, Verdict(back_seconds=2.5), "waits 2.00 s, and to get the devices back took 2.50 s"),
    ],
)
def test_one_that_waits_little_or_for_less_than_lending_takes_keeps_them(
    step: LentStep, before: Verdict, words: str
) -> None:
    found = after(step, step, step, before=before)

    assert not found.lends
    assert words in found.reason


def test_devices_that_came_back_late_once_are_lent_again_after_some_rests() -> None:
    before, rest = Verdict(back_seconds=7.5, is_resting=True), REST * CONFIG.over_steps

    assert not after(*[WAITING] * (rest - 1), before=before).lends
    assert not after(*[WAITING] * rest, before=before).lends
    assert not after(*[WAITING] * (3 * rest - 1), before=before).lends, "a step waits 2 s, and 3.75 s are believed"
    assert after(*[WAITING] * (3 * rest), before=before).lends


def test_lending_that_makes_steps_shorter_goes_on() -> None:
    found = after(HELPED, HELPED, HELPED, before=LENDING)

    assert found.lends
    assert found.reason == "a step takes 2.20 s, 0.20 s of it to get them back, and 3.00 s without lending"


def test_one_step_that_took_long_decides_nothing() -> None:
    loading = LentStep(total=20.0, waited=2.0, lent=0.1, back=12.0)

    assert after(loading, HELPED, HELPED, before=LENDING).lends


def test_steps_in_which_nothing_was_lent_say_nothing_of_lending() -> None:
    assert after(*[WAITING] * 9, HELPED, before=LENDING) == LENDING


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (
            LentStep(total=3.1, waited=1.9, lent=1.8, back=0.3),
            "it did not pay: a step took 3.10 s with it, and 3.00 s",
        ),
        (
            LentStep(total=2.2, waited=0.3, lent=0.1, back=0.2),
            "lent 0.10 s in each step, and getting them back took 0.20",
        ),
    ],
)
def test_lending_that_does_not_pay_ends_and_rests(step: LentStep, words: str) -> None:
    ended = after(step, step, step, before=LENDING)

    assert not ended.lends
    assert words in ended.reason
    assert after(*[WAITING] * (3 * REST - 1), before=ended) == ended
    assert after(*[WAITING] * 3 * REST, before=ended).lends


def lent_steps(num: int, seconds: float, sampled: float | None, more: float = 0.0, lent: float = 0.3) -> list[LentStep]:
    """Steps that are shorter than those before, of whose lent rollouts each samples some tokens more, or none."""
    return [
        LentStep(seconds, 0.5, lent, 0.1, None if sampled is None else sampled + more * number) for number in range(num)
    ]


@pytest.mark.parametrize("seconds", [0.4, 2.5])
def test_lending_in_which_nothing_is_sampled_ends_though_steps_are_shorter(seconds: float) -> None:
    """Where every shift ends before an engine has its weights, a step is shorter by chance, if it is."""
    num = 1 + max(3, round(HEARD_SECONDS / seconds))
    steps = lent_steps(num, seconds, 7.0)

    assert after(*steps[1:], before=LENDING).lends, "what was said before them is not known"
    ended = after(*steps, before=LENDING)
    assert (ended.lends, ended.is_resting) == (False, True)
    assert (
        ended.reason == f"they were lent 0.30 s in each step, and nothing was sampled there in the last {num - 1} steps"
    )
    assert not after(*lent_steps(50, seconds, 0.0, more=5.0), *steps, before=LENDING).lends, "it did before"


def test_lending_in_which_something_is_sampled_goes_on_and_so_does_one_of_which_nobody_says_it() -> None:
    assert after(*lent_steps(30, 1.0, 0.0, more=1.0), before=LENDING).lends
    assert after(*lent_steps(30, 1.0, None), before=LENDING).lends
    # An engine that died and began again counts from 0.
    assert after(*lent_steps(5, 1.0, 100.0), *lent_steps(5, 1.0, 0.0), before=LENDING).lends
    # Few of many steps lent anything.
    rarely = [*lent_steps(2, 1.0, 0.0), *lent_steps(20, 1.0, 0.0, lent=0.0)]
    assert after(*rarely, before=LENDING).lends


def test_steps_count_from_the_last_change_on() -> None:
    lending, values = Lending(), {"time/step_seconds": 3.0, "time/wait_seconds": 2.0}
    for _ in range(3):
        lending.add_step(values, CONFIG)
    assert lending.verdict.lends

    for _ in range(2):
        lending.add_step(values | {"time/lent_seconds": 1.9, "time/device_seconds": 0.4}, CONFIG)
    assert lending.verdict.lends
    lending.add_step(values | {"time/lent_seconds": 1.9, "time/device_seconds": 0.4}, CONFIG)

    assert not lending.verdict.lends


def test_metrics_without_times_are_no_step() -> None:
    assert LentStep.from_metrics({"loss/total": 1.0}) is None
