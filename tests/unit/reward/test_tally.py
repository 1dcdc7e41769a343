from dataclasses import replace

from flotilla.services.reward.grading import with_grades
from flotilla.services.reward.tally import GradingTally
from flotilla.shared.schemas.grading import Grade
from flotilla.shared.schemas.health import LONGEST_TEXT, MOST_OUTCOMES
from flotilla.shared.schemas.trajectory import FinishReason, Group, Trajectory
from flotilla.shared.schemas.turns import Turn
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory


def a_graded_group(*grades: Grade, **trajectory: object) -> Group:
    members = tuple(a_trajectory(**trajectory) for _ in grades)  # type: ignore[arg-type]
    return with_grades(Group(a_task(0, group_size=len(grades)), members, "1+1?"), grades, 0.1)


def test_rewards_are_counted_by_group_and_by_sample() -> None:
    tally = GradingTally()
    tally.add(a_group(0, rewards=[1.0, 0.0]), is_filtered=False)
    tally.add(a_group(1, rewards=[0.0, 0.0]), is_filtered=True)
    tally.add(a_group(2, rewards=[0.0]), is_filtered=False)

    report = tally.report()

    assert (report.groups, report.flat_groups, report.signalless_groups, report.filtered_groups) == (3, 1, 1, 1)
    assert (report.samples, report.scored, report.repeated, report.last_reward) == (5, 5, 3, 0.0)
    assert report.identical_groups == 2
    assert (report.highest_reward, report.lowest_reward) == (1.0, 0.0)


def test_how_completions_end_and_what_graders_find_is_counted() -> None:
    tally = GradingTally()
    tally.add(
        a_graded_group(Grade.scored(0.0, answer="2"), Grade.scored(0.0), finish_reason=FinishReason.LENGTH, text=" "),
        is_filtered=False,
    )
    tally.add(a_graded_group(Grade.error("exact: the sample has no label"), Grade.error("boom")), is_filtered=False)

    report = tally.report()

    assert (report.samples, report.truncated, report.empty, report.answered) == (4, 2, 2, 1)
    assert (report.errors, report.label_errors, report.last_error) == (2, 1, "boom")


def an_episode(*texts: str) -> Trajectory:
    turns = [
        Turn(4 * number, 4 * number + 2, 4 * number + 4, FinishReason.STOP, text) for number, text in enumerate(texts)
    ]
    return a_trajectory(prompt_tokens=2, sampled_tokens=4 * len(texts) - 2, text=texts[-1], turns=tuple(turns))


def test_episodes_are_alike_where_all_of_their_turns_are() -> None:
    tally = GradingTally()
    for episodes in [
        (("left", "right"), ("up", "right")),
        (("left", "right"), ("left", "right")),
        (("up", ""), ("", "")),
    ]:
        members = tuple(an_episode(*texts) for texts in episodes)
        tally.add(Group(a_task(0, group_size=2), members, "a lake"), is_filtered=False)

    report = tally.report()

    assert report.identical_groups == 1
    assert report.empty == 1


def test_two_samples_are_kept_a_good_and_a_bad_one_and_cut() -> None:
    tally = GradingTally()
    long = "x" * 5000
    tally.add(
        a_graded_group(Grade.scored(0.0, answer="3"), Grade.scored(1.0, answer="2"), text=long), is_filtered=False
    )

    best, worst = tally.report().samples_seen

    assert (best.reward, best.answer, worst.reward, worst.answer) == (1.0, "2", 0.0, "3")
    assert len(best.completion) <= LONGEST_TEXT
    assert (best.prompt, best.label) == ("1+1?", "1")


def test_of_groups_that_are_alike_the_last_two_have_a_sample_each() -> None:
    tally = GradingTally()
    for number in range(5):
        tally.add(a_group(number, rewards=[0.0, 0.0]), is_filtered=True)

    assert [sample.label for sample in tally.report().samples_seen] == ["4", "5"]


def test_the_newest_sample_without_a_grade_is_kept_beside_the_others() -> None:
    tally = GradingTally()
    tally.add(a_graded_group(Grade.error("boom"), Grade.scored(1.0), text="bad"), is_filtered=False)
    tally.add(a_graded_group(Grade.scored(0.0), Grade.scored(1.0), text="good"), is_filtered=False)

    ungraded = tally.report().ungraded_sample

    assert ungraded is not None and (ungraded.completion, ungraded.reason) == ("bad", "boom")


def test_how_each_row_was_answered_is_told_where_somebody_wants_to_know() -> None:
    silent, tally = GradingTally(), GradingTally(keeps_outcomes=True)
    for each in (silent, tally):
        each.add(a_group(4, rewards=[1.0, 0.0]), is_filtered=False)
        each.add(a_group(7, rewards=[0.0, 0.0]), is_filtered=True)

    assert silent.report().outcomes == ()
    assert [(each.number, each.row, each.reward) for each in tally.report().outcomes] == [(1, 4, 0.5), (2, 7, 0.0)]
    for number in range(MOST_OUTCOMES):
        tally.add(a_group(number, rewards=[0.0]), is_filtered=False)
    assert len(tally.report().outcomes) == MOST_OUTCOMES and tally.report().outcomes[-1].number == MOST_OUTCOMES + 2


def test_groups_are_counted_by_data_source_too() -> None:
    tally = GradingTally()
    for number, rewards in enumerate(([1.0, 0.0], [1.0, 1.0], [0.0, 0.0])):
        group = a_group(number, rewards=rewards)
        tally.add(replace(group, task=replace(group.task, data_source="easy")), is_filtered=False)
    tally.add(a_group(3, rewards=[0.0, 0.0]), is_filtered=False)

    ((name, report),) = tally.report().sources.items()

    assert (name, report.groups, report.signalless_groups) == ("easy", 3, 2)
    assert report.sample is not None and report.sample.reward == 0.0
