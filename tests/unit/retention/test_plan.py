"""What goes by age and size, and what stays since somebody refers to it."""

from flotilla.services.gateway.retention.plan import DAY_SECONDS, Left, Plan, plan
from flotilla.services.gateway.retention.references import Reference
from flotilla.shared.schemas.retention import Part, Retention

NOW = 100 * DAY_SECONDS


def left(experiment_id: str, days_ago: float, **sizes: int) -> Left:
    """Make what an experiment left that ended so many days ago."""
    return Left(experiment_id, NOW - days_ago * DAY_SECONDS, {Part(name): size for name, size in sizes.items()})


def fork(by: str, to: str) -> Reference:
    """Make an experiment that began from another."""
    return Reference(by, to, Part.CHECKPOINTS, f"{by} began from its step 2")


def gone(found: Plan) -> list[tuple[str, Part]]:
    """List what goes, in order."""
    return [(each.left.experiment_id, each.part) for each in found.removed]


def test_a_run_goes_as_a_whole_once_its_time_is_over() -> None:
    runs = [left("old", 31, checkpoints=5, samples=2), left("young", 29, checkpoints=5)]

    found = plan(runs, [], Retention(run_days=30), NOW)

    assert gone(found) == [("old", Part.RUN)]
    assert (found.removed[0].num_bytes, found.removed[0].why) == (7, "it ended 31.0 days ago, runs are kept for 30")


def test_each_part_has_its_own_time() -> None:
    runs = [left("a", 8, checkpoints=5, samples=2, logs=1), left("b", 2, samples=2)]

    found = plan(runs, [], Retention(samples_days=7, logs_days=9), NOW)

    assert gone(found) == [("a", Part.SAMPLES)]


def test_nothing_goes_that_nothing_is_said_of() -> None:
    assert gone(plan([left("a", 90, checkpoints=5)], [], Retention(), NOW)) == []
    assert not Retention().is_set


def test_checkpoints_that_a_fork_began_from_stay_and_other_parts_go() -> None:
    runs = [left("parent", 40, checkpoints=5, samples=2)]

    found = plan(runs, [fork("child", "parent")], Retention(checkpoints_days=30, samples_days=30), NOW)

    assert gone(found) == [("parent", Part.SAMPLES)]
    assert [(each.part, each.why) for each in found.kept] == [(Part.CHECKPOINTS, "child began from its step 2")]


def test_a_run_stays_for_a_fork_that_stays_and_goes_with_one_that_goes() -> None:
    chain = [fork("b", "a"), fork("c", "b")]
    runs = [left("a", 90), left("b", 80), left("c", 70)]

    assert gone(plan(runs, chain, Retention(run_days=60), NOW)) == [
        ("c", Part.RUN),
        ("b", Part.RUN),
        ("a", Part.RUN),
    ]
    # The last of the chain stays, and so does what it began from, and what that began from.
    found = plan(runs, chain, Retention(run_days=75), NOW)
    assert gone(found) == []
    assert {each.left.experiment_id: each.why for each in found.kept} == {
        "a": "b began from its step 2",
        "b": "c began from its step 2",
    }


def test_beyond_the_size_files_of_the_one_that_ended_first_go_first() -> None:
    runs = [left("new", 1, checkpoints=40), left("old", 9, checkpoints=30, samples=20), left("mid", 5, logs=30)]

    found = plan(runs, [], Retention(max_bytes=75), NOW)

    assert gone(found) == [("old", Part.CHECKPOINTS), ("old", Part.SAMPLES)]
    assert found.removed[0].why == "finished experiments would keep 120 bytes, and may keep 75"


def test_by_size_what_is_needed_stays_and_the_next_one_goes() -> None:
    runs = [left("old", 9, checkpoints=30), left("new", 1, checkpoints=40)]

    found = plan(runs, [fork("child", "old")], Retention(max_bytes=35), NOW)

    assert gone(found) == [("new", Part.CHECKPOINTS)]
    assert [each.left.experiment_id for each in found.kept] == ["old"]


def test_what_goes_by_age_counts_before_the_size_does() -> None:
    runs = [left("old", 40, checkpoints=30), left("new", 1, checkpoints=40)]

    assert gone(plan(runs, [], Retention(run_days=30, max_bytes=40), NOW)) == [("old", Part.RUN)]
