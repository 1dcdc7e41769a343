"""The simulation of a fleet: cases worked out by hand, and what holds for any."""

import random
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import pytest

from flotilla.planning import simulation
from flotilla.planning.fleet import Costs, Setup, Simulated, Work
from flotilla.planning.simulation import Simulation

TEN = Work(lengths=(10,), grading_seconds=0.0, train_tokens=10)
"""A group of one answer that takes ten steps of the engine."""
ALONE = Costs(tick=1.0, row=0.0, update=5.0, token=0.0)


def setup_of(staleness: float, **changes: Any) -> Setup:
    """One rollout with one slot, one group per step."""
    groups = changes.get("groups_per_step", 1) * changes.get("steps_per_version", 1)
    given: dict[str, Any] = {
        "rollouts": 1, "slots": 1, "groups_per_step": 1, "steps_per_version": 1,
        "budget": int(groups * (1 + staleness) + 1e-9), "max_lag": ceil(staleness) + 1 if staleness else 0,
        "drains": not staleness,
    }  # fmt: skip
    return Setup(**(given | changes))


def simulated(setup: Setup, costs: Costs, *work: Work) -> Simulated:
    return Simulation(setup, costs, work or (TEN,)).run(60, 20)


def test_on_policy_a_step_is_the_sum_of_all_that_follows_each_other() -> None:
    costs = replace(ALONE, claim=0.25, forward=0.5, pickup=0.125, publish=0.5, publication=2.0, switch=1.0)
    work = replace(TEN, grading_seconds=4.0)

    found = simulated(setup_of(0), costs, work)

    # Issued with the commit, claimed while engines switch: 2 + 1, sampled 10, forwarded and graded 4.5, trained 5.125.
    assert found.step_seconds == pytest.approx(2 + 1 + 10 + 0.5 + 4 + 0.125 + 5)
    assert found.lag == 0
    assert found.compute == pytest.approx(5)
    assert found.binds.component == "admission"


def test_sampling_ahead_a_step_takes_as_long_as_the_slower_of_the_two() -> None:
    sampling, training = simulated(setup_of(1), ALONE), simulated(setup_of(1), replace(ALONE, update=20.0))

    assert sampling.step_seconds == pytest.approx(10)
    assert sampling.binds.component == "generation"
    assert training.step_seconds == pytest.approx(20)
    assert training.binds.component == "trainer"


def test_a_slow_grader_binds_as_many_groups_at_a_time_as_it_grades() -> None:
    work = replace(TEN, grading_seconds=30.0)

    one, two = (simulated(setup_of(5, graders=graders), ALONE, work) for graders in (1, 2))

    assert one.step_seconds == pytest.approx(30) and one.binds.component == "reward"
    assert two.step_seconds == pytest.approx(15)


def test_answers_of_one_batch_share_the_engines_steps() -> None:
    costs = Costs(tick=1.0, row=0.5, update=0.0, token=0.0)
    eight = Work(lengths=(10,) * 8, grading_seconds=0.0, train_tokens=80)

    found = simulated(setup_of(0, slots=8), costs, eight)
    halved = simulated(setup_of(0, slots=4), costs, eight)

    assert found.step_seconds == pytest.approx(10 * (1 + 8 * 0.5))
    assert halved.step_seconds == pytest.approx(2 * 10 * (1 + 4 * 0.5)), "a group larger than the batch joins in parts"
    assert found.tokens_per_second == pytest.approx(80 / 50)


def test_a_step_of_unequal_answers_ends_with_the_longest_and_speeds_up_before() -> None:
    costs = Costs(tick=1.0, row=1.0, update=0.0, token=0.0)

    found = simulated(setup_of(0, slots=2), costs, Work((4, 10), 0.0, 14))

    assert found.step_seconds == pytest.approx(4 * 3 + 6 * 2)


def test_what_computes_at_the_same_time_shares_the_cores() -> None:
    costs = replace(ALONE, update=10.0, engine_cores=2.0, trainer_cores=2.0)

    shared, apart = simulated(setup_of(3, cores=2.0), costs), simulated(setup_of(3, cores=4.0), costs)

    assert shared.step_seconds == pytest.approx(20), "10 s of sampling and 10 s of training on all cores"
    assert apart.step_seconds == pytest.approx(10)
    assert shared.engine_cores == pytest.approx(1.0, rel=0.05)


def test_more_rollouts_help_only_where_there_are_cores_for_them() -> None:
    costs = replace(ALONE, update=0.5, engine_cores=2.0)

    one, two_on_two, two_on_four = (
        simulated(setup_of(7, rollouts=rollouts, cores=cores), costs)
        for rollouts, cores in ((1, 2.0), (2, 2.0), (2, 4.0))
    )

    assert one.step_seconds == pytest.approx(10)
    assert two_on_two.step_seconds == pytest.approx(10, rel=0.01)
    assert two_on_four.step_seconds == pytest.approx(5, rel=0.01)


def test_filtered_groups_are_replaced() -> None:
    found = simulated(setup_of(0), ALONE, TEN, replace(TEN, is_kept=False))

    assert found.step_seconds == pytest.approx(10 + 10 + 5)
    assert sum(found.ledger.filtered.values()) == found.ledger.planned


def test_several_steps_in_a_version_sample_ahead_of_the_publication() -> None:
    found = simulated(setup_of(0, steps_per_version=2), replace(ALONE, publication=3.0))

    # Two groups are issued at once: 10, then the second is sampled while the first is trained, 5 after it, then 3.
    assert found.step_seconds == pytest.approx((10 + 10 + 5 + 3) / 2)


def test_lag_counts_the_tokens_of_each_version() -> None:
    found = simulated(setup_of(1), replace(ALONE, update=9.0))

    assert 0 < found.lag <= 1


@pytest.mark.parametrize("seed", range(6))
def test_more_staleness_is_never_slower_and_every_group_is_somewhere(seed: int) -> None:
    draw = random.Random(seed)
    work = [
        Work(
            lengths=tuple(draw.randint(5, 40) for _ in range(4)),
            grading_seconds=draw.choice([0.0, 0.02, 0.2]),
            train_tokens=200,
            is_kept=draw.random() > 0.3,
        )
        for _ in range(32)
    ]
    costs = Costs(
        tick=draw.uniform(0.001, 0.02), row=draw.uniform(0, 0.001), update=draw.uniform(0, 0.3), token=1e-4,
        claim=0.01, forward=0.01, publish=0.02, publication=0.1, switch=0.05,
        engine_cores=draw.uniform(0.5, 2), trainer_cores=draw.uniform(0.5, 2),
    )  # fmt: skip

    found = [
        Simulation(setup_of(staleness, groups_per_step=4, slots=16, cores=2.0), costs, work).run(40, 10)
        for staleness in (0, 0.5, 1, 2)
    ]

    for before, after in pairwise(found):
        assert after.step_seconds <= before.step_seconds * 1.02
    assert all(each.ledger.balanced for each in found)
    assert found[0].lag == 0


def test_a_step_larger_than_the_budget_is_told_and_not_waited_for() -> None:
    with pytest.raises(ValueError, match="nothing can move"):
        Simulation(setup_of(0, budget=0), ALONE, [TEN]).run(2, 0)


def test_a_simulation_has_a_bound_of_events_whatever_its_times_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "MOST_EVENTS", 10_000)

    # At 1e30 s a clock does not see what a look is later: its timers are due at once, for ever.
    with pytest.raises(ValueError, match="comes to no end: 0 steps took 10000 events"):
        simulated(setup_of(0), ALONE, replace(TEN, grading_seconds=1e30))


def test_looks_become_fewer_where_a_step_is_much_longer_than_was_guessed() -> None:
    made = Simulation(setup_of(0), ALONE, [replace(TEN, grading_seconds=1e5)])

    found = made.run(60, 20)

    assert found.step_seconds == pytest.approx(1e5 + 15)
    assert len(made._looks) <= simulation.MOST_LOOKS
