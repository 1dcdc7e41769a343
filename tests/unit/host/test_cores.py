"""Cores are divided among those who compute, in proportion to how much they do; nobody waits for a dead process."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import Unavailable
from flotilla.shared.host.cores import LATELY_SECONDS, LOOK_SECONDS, CoreSeat, divided


class Seats:
    """Seats in one directory, on a clock that is moved by hand."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.clock = directory, ManualClock()
        self._taken: list[CoreSeat] = []

    def take(self, cores: int = 8, most: float = 64.0, threads: int | None = None) -> CoreSeat:
        taken = CoreSeat(
            self.directory,
            threads=threads,
            cores=lambda: frozenset(range(cores)),
            most=lambda: most,
            now=self.clock.monotonic,
        )
        self._taken.append(taken)
        return taken

    def close(self) -> None:
        for seat in self._taken:
            seat.close()


@pytest.fixture
def seats(tmp_path: Path) -> Iterator[Seats]:
    with contextlib.closing(Seats(tmp_path)) as found:
        yield found


@pytest.mark.parametrize(
    ("cores", "shares", "expected"),
    [
        (2, [1.0], [2]),
        (2, [1.0, 1.0], [1, 1]),
        (3, [1.0, 1.0], [2, 1]),
        (16, [1.0, 0.5], [11, 5]),
        (2, [1.0, 0.05], [1, 1]),
        (2, [0.5, 0.5, 0.5], [1, 1, 1]),
        (8, [0.05, 1.0], [1, 7]),
    ],
)
def test_cores_are_divided_in_proportion_and_nobody_gets_none(
    cores: int, shares: list[float], expected: list[int]
) -> None:
    assert divided(cores, shares) == expected


def test_who_computes_alone_has_all_cores_and_gives_some_up_when_another_begins(seats: Seats) -> None:
    trainer, engine = seats.take(), seats.take()

    assert trainer.begin() == 8
    assert engine.begin() == 4
    assert trainer.threads() == 4
    engine.end()
    assert trainer.threads() == 8


def test_what_computes_most_of_the_time_gets_most_of_the_cores(seats: Seats) -> None:
    trainer, engine = seats.take(), seats.take()
    trainer.begin()
    for _ in range(20):
        engine.begin()
        seats.clock.advance(LATELY_SECONDS / 20)
        engine.end()
        seats.clock.advance(3 * LATELY_SECONDS / 20)

    assert engine.begin() == 2
    assert trainer.threads() == 6


def test_what_takes_a_fixed_number_leaves_the_rest_to_others(seats: Seats) -> None:
    trainer, engine = seats.take(), seats.take(threads=1)

    assert trainer.begin() == 8
    assert engine.begin() == 1
    assert trainer.threads() == 7
    engine.end()
    assert trainer.threads() == 8


def test_what_finds_that_it_needs_one_core_leaves_the_others(seats: Seats) -> None:
    trainer, engine = seats.take(), seats.take()
    trainer.begin()

    assert engine.begin() == 4
    engine.fix(1)

    assert engine.threads() == 1
    assert trainer.threads() == 7


def test_a_control_group_s_quota_bounds_what_a_process_takes(seats: Seats) -> None:
    seat = seats.take(most=2.5)

    assert seat.begin() == 2
    seat.end()
    assert seats.take(most=0.5).begin() == 1


def test_processes_that_may_not_run_on_the_same_cores_share_none(seats: Seats) -> None:
    one, other = seats.take(cores=8), seats.take(cores=4)

    assert (one.begin(), other.begin()) == (8, 4)
    assert one.threads() == 8


def test_a_killed_process_leaves_its_cores_to_others(seats: Seats) -> None:
    code = "import sys; from flotilla.shared.host.cores import CoreSeat; from pathlib import Path;"
    code += " seat = CoreSeat(Path(sys.argv[1]),"
    code += " cores=lambda: frozenset(range(8))); seat.begin(); print('computing', flush=True); sys.stdin.read()"
    seat = seats.take()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(seats.directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"computing\n"
        assert seat.begin() < 8

        other.kill()
    seats.clock.advance(LOOK_SECONDS)

    assert seat.threads() == 8
    assert len(list(seats.directory.iterdir())) == 1


def test_a_directory_that_is_not_there_is_made_for_this_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "cores"

    CoreSeat(directory).close()

    assert (directory.stat().st_mode & 0o7777, directory.stat().st_uid) == (0o700, os.getuid())
    CoreSeat(directory).close()  # and taken by the next one


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_in_place_of_the_directory_is_refused_and_not_followed(tmp_path: Path, is_dangling: bool) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "cores"
    if not is_dangling:
        elsewhere.mkdir(mode=0o700)
    link.symlink_to(elsewhere)

    with pytest.raises(Unavailable, match=r"cores, .* is a symbolic link; it has to be a directory of uid"):
        CoreSeat(link)

    assert not elsewhere.exists() if is_dangling else not list(elsewhere.iterdir())


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cores").write_text("")

    with pytest.raises(Unavailable, match="is no directory"):
        CoreSeat(tmp_path / "cores")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o750])
def test_a_directory_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "cores"
    directory.mkdir()
    directory.chmod(mode)

    with pytest.raises(Unavailable, match=f"other users may use \\(mode {mode:04o}\\)"):
        CoreSeat(directory)

    assert not list(directory.iterdir())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's directory")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "cores"
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)

    with pytest.raises(Unavailable, match="is a directory of the user with uid 65534"):
        CoreSeat(directory)

    assert not list(directory.iterdir())
