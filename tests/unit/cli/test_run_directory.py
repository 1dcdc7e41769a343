"""A directory belongs to one run at a time, and an earlier run is never moved without a word."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla.cli.run_directory import RunDirectory
from flotilla.shared.errors import Conflict, NotFound


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The directory of a run that has ended."""
    directory = RunDirectory(tmp_path, "trial")
    directory.take()
    directory.record("trial-1a2b3c")
    directory.release()
    return directory.path


def test_a_name_that_is_taken_is_refused_with_the_ways_on(earlier: Path) -> None:
    directory = RunDirectory(earlier.parent, "trial")

    with pytest.raises(Conflict, match=r"the run trial-1a2b3c already: add --continue .* --fresh .* --name") as refusal:
        directory.take()

    assert str(earlier.parent / "earlier") in refusal.value.detail
    assert directory.experiment_id == "trial-1a2b3c"
    assert directory.reopen() == earlier, "who was refused holds no lock"
    directory.release()


@pytest.mark.parametrize("left", ["summary.json", "fleet/experiments/trial-1/checkpoints"])
def test_what_a_crash_or_an_older_release_left_is_a_run_too(tmp_path: Path, left: str) -> None:
    (tmp_path / "trial" / left).mkdir(parents=True)

    with pytest.raises(Conflict, match="holds an earlier run already"):
        RunDirectory(tmp_path, "trial").take()


def test_what_never_became_a_run_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "trial" / "fleet" / "logs").mkdir(parents=True)
    directory = RunDirectory(tmp_path, "trial")

    path = directory.take()

    assert [entry.name for entry in path.iterdir()] == ["lock"]
    directory.release()


def test_a_run_under_way_is_left_alone(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path, "trial"), RunDirectory(tmp_path, "trial")
    first.take()

    with pytest.raises(Conflict, match="in use by another run"):
        second.take()
    with pytest.raises(Conflict, match="in use: another process"):
        second.reopen()
    assert second.take_fresh().name == "trial-2"

    first.release()
    second.release()


def test_two_that_go_on_with_a_run_are_one(earlier: Path) -> None:
    first, second = RunDirectory(earlier.parent, "trial"), RunDirectory(earlier.parent, "trial")
    first.reopen()

    with pytest.raises(Conflict, match="in use"):
        second.reopen()

    first.release()
    assert second.reopen() == earlier
    second.release()


def test_there_is_nothing_to_go_on_with_where_no_run_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="leave --continue out"):
        RunDirectory(tmp_path, "trial").reopen()

    assert not (tmp_path / "trial").exists()


def test_a_fresh_run_moves_the_earlier_one_aside(earlier: Path) -> None:
    (earlier / "summary.json").write_text("{}")
    directory = RunDirectory(earlier.parent, "trial")

    assert directory.take_fresh() == earlier
    directory.release()

    assert not directory.holds_run
    assert len(list((earlier.parent / "earlier").glob("trial-*/summary.json"))) == 1


@pytest.mark.parametrize("take", [RunDirectory.take, RunDirectory.take_fresh])
def test_files_that_are_no_runs_are_never_moved(tmp_path: Path, take: Callable[[RunDirectory], Path]) -> None:
    """Such as those of a directory that was meant for something else, or the one that holds them all."""
    place = tmp_path / "notes"
    place.mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (place / name).write_text("mine")

    with pytest.raises(Conflict, match=r"no run's \(a.txt, b.txt, c.txt, ...\): give this run another directory"):
        take(RunDirectory(tmp_path, "notes"))

    assert sorted(entry.name for entry in place.iterdir()) == ["a.txt", "b.txt", "c.txt", "d.txt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]


def test_what_lies_beside_a_run_goes_with_it(earlier: Path) -> None:
    (earlier / "remarks.txt").write_text("mine")
    directory = RunDirectory(earlier.parent, "trial")

    directory.take_fresh()
    directory.release()

    assert len(list((earlier.parent / "earlier").glob("trial-*/remarks.txt"))) == 1
