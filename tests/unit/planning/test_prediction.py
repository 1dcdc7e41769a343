"""From recorded timestamps to costs, and from costs to a prediction."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla.planning.fitting import Scales, cores_left, engine_costs, fit, line, work_of
from flotilla.planning.prediction import Change, predict
from flotilla.planning.recorded import RecordedGroup, RecordedRun, RecordedStep
from flotilla.shared.errors import InvalidRequest, InvalidSpec
from tests.unit.gateway.builders import a_spec, spec_document

TICK, ROW, COMPUTE = 0.01, 0.002, 0.5
STEP_SECONDS = 40 * (TICK + ROW * 8) + COMPUTE + 0.1
"""On-policy: two groups of four answers of 40 tokens, then training, then a publication of 0.1 s."""


def a_group(number: int, at: float, grading: float = 0.0) -> RecordedGroup:
    sampling = 40 * (TICK + ROW * 8)
    return RecordedGroup(
        group_id=number,
        kind="trained",
        issued_at=at,
        generated_at=at + sampling,
        graded_at=at + sampling + grading,
        generation_seconds=sampling,
        grading_seconds=grading,
        lengths=(40,) * 4,
        totals=(50,) * 4,
        rewards=(0.0, 1.0, 0.0, 1.0),
    )


def a_run(
    num_steps: int = 8, *, staleness: float = 0.0, filtered_share: float = 0.0, grading: float = 0.0
) -> RecordedRun:
    document = spec_document(
        asynchrony={"staleness_threshold": staleness},
        optimisation={"steps": 99, "groups_per_mini_batch": 2},
        parallelism={"threads": 1},
        reward={"components": [{"kind": "numeric"}], "filter_zero_spread": True},
    )
    seconds = STEP_SECONDS + grading
    document["rollout"] = {
        "group_size": 4, "sampling": {"max_new_tokens": 64}, "engine": {"threads": 1, "slots": 16},
    }  # fmt: skip
    steps = [
        RecordedStep(
            step=number + 1, ended_at=(number + 1) * seconds, wait=seconds - COMPUTE, compute=COMPUTE,
            publish=0.0, checkpoint=0.0, tokens=320.0, lag=0.0,
        )
        for number in range(num_steps)
    ]  # fmt: skip
    groups = [a_group(number, (number // 2) * seconds + 0.1, grading) for number in range(2 * num_steps)]
    return RecordedRun(
        spec=a_spec(**document), rollouts=1, groups=groups, steps=steps, publication_seconds=0.1, switch_seconds=0.0,
        filtered_share=filtered_share, engine_cores=1.0, trainer_cores=1.0,
    )  # fmt: skip


def test_the_run_as_it_was_is_simulated_as_it_was_measured() -> None:
    model = fit(a_run(), cores=2)

    assert model.base.step_seconds == pytest.approx(STEP_SECONDS, rel=0.03)
    assert model.base.compute == pytest.approx(COMPUTE, rel=0.02)
    assert model.base.generation == pytest.approx(40 * (TICK + ROW * 8), rel=0.02)


def test_without_a_change_what_was_measured_is_predicted() -> None:
    found = predict(a_run(), Change(), cores=2)

    assert found.predicted.step_seconds == pytest.approx(found.measured.step_seconds)
    assert found.predicted.tokens_per_second == pytest.approx(found.measured.tokens_per_second)
    assert found.measured.step_seconds == pytest.approx(STEP_SECONDS)


def test_sampling_ahead_takes_away_what_was_waited_for() -> None:
    found = predict(a_run(), Change(staleness=2.0), cores=2)

    # One core each: sampling and training overlap, and the engine never stands still.
    assert found.predicted.step_seconds < STEP_SECONDS - 0.4
    assert found.predicted.lag > 0
    assert found.predicted.binds == "generation"


def test_a_slower_grader_adds_its_time_to_a_step_on_policy() -> None:
    run = a_run(grading=0.2)
    base, slower = predict(run, Change(), cores=2), predict(run, Change(grading=6.0), cores=2)

    assert slower.predicted.step_seconds - base.predicted.step_seconds == pytest.approx(1.0, rel=0.1)


def test_longer_answers_take_longer_and_are_cut_where_the_spec_says() -> None:
    run = a_run()

    assert {each.lengths for each in work_of(run, run.spec, Scales(lengths=0.5))} == {(20,) * 4}
    assert {each.lengths for each in work_of(run, run.spec, Scales(lengths=9.0))} == {(64,) * 4}
    assert {each.train_tokens for each in work_of(run, run.spec, Scales(lengths=0.5))} == {4 * 30}


def test_another_group_size_is_drawn_from_recorded_answers_and_filtered_by_their_rewards() -> None:
    run = a_run()

    larger = work_of(run, Change(group_size=8).spec_of(run.spec), Scales())
    pairs = work_of(run, Change(group_size=2).spec_of(run.spec), Scales())

    assert {len(each.lengths) for each in larger} == {8} and all(each.is_kept for each in larger)
    # Of two right and two wrong answers a pair is equal in a third of the draws.
    assert sum(not each.is_kept for each in pairs) / len(pairs) == pytest.approx(1 / 3, abs=0.07)


def test_groups_are_filtered_as_often_as_the_ledger_says() -> None:
    run = a_run(filtered_share=0.4)

    work = work_of(run, run.spec, Scales())

    assert sum(not each.is_kept for each in work) / len(work) == pytest.approx(0.4, abs=0.07)


def test_a_change_that_the_spec_refuses_is_refused() -> None:
    with pytest.raises(InvalidSpec):
        Change(group_size=1).spec_of(a_run().spec)


def test_a_run_of_one_step_is_too_short() -> None:
    with pytest.raises(InvalidRequest, match="two in a row"):
        predict(a_run(1), Change(), cores=2)


def test_a_line_is_found_as_far_as_points_tell_and_else_has_the_usual_share() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])

    assert line(x, 0.5 + 0.25 * x, 0.9) == pytest.approx((0.5, 0.25)), "points without noise tell all"
    assert line(np.full(4, 2.0), np.full(4, 1.0), 0.2) == pytest.approx((0.8, 0.1)), "points of one x tell nothing"
    assert line(x, np.full(4, 3.0), 0.9) == pytest.approx((3.0, 0.0))
    constant, slope = line(np.array([2.0, 2.01, 1.99, 2.0]), np.array([1.0, 1.4, 1.2, 0.6]), 0.2)
    assert slope == pytest.approx(0.2 * 1.05 / 2.0, rel=0.3) and constant > 0, "noise is no slope"


def test_an_engines_step_is_fitted_from_groups_that_ran_beside_more_or_fewer_others() -> None:
    groups, at = [], 1.0
    for together in (1, 2, 3, 4, 1, 2, 3, 4):
        seconds = 40 * (TICK + ROW * 4 * together)
        for _ in range(together):
            groups.append(replace(a_group(len(groups), at), generation_seconds=seconds, generated_at=at + seconds))
        at += seconds + 1
    run = replace(a_run(), groups=groups)

    assert engine_costs(run) == pytest.approx((TICK, ROW), rel=0.02)


def test_where_others_starve_the_trainer_what_the_fleet_got_is_all_there_is() -> None:
    run = a_run()

    assert cores_left(run, 2) == 2
    assert cores_left(replace(run, trainer_cores=0.25, engine_cores=0.125, rollouts=2), 2) == 0.5
    assert cores_left(replace(run, trainer_cores=0.25, engine_cores=None), 2) == 2


def test_on_a_starved_machine_another_rollout_takes_from_the_trainer() -> None:
    run = replace(a_run(staleness=1.0), trainer_cores=0.4, engine_cores=0.4)

    found = predict(run, Change(rollouts=4), cores=2)

    assert found.predicted.step_seconds > 0.8 * found.measured.step_seconds, "there are no cores for more"
