"""The names of processes that play: found again when they have ended, however, and by one at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla.agents.holders import folder_of, held, left_by_ended

PLAYS = """
import sys
from pathlib import Path
from flotilla.agents.holders import held
with held(Path(sys.argv[1])) as name:
    print(name, flush=True)
    sys.stdin.read()
"""


def found(folder: Path) -> list[str]:
    with left_by_ended(folder) as left:
        return list(left)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_was_killed_is_found_and_one_that_lives_is_not(how: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLAYS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        while_it_lives = found(tmp_path)
        os.kill(process.pid, how)
        process.wait(10)
        with held(tmp_path), left_by_ended(tmp_path) as left, left_by_ended(tmp_path) as of_another:
            assert (left, of_another) == ([name], [])

        again = found(tmp_path)
        with left_by_ended(tmp_path) as left:
            left.remove(name)

    assert (while_it_lives, again, found(tmp_path), list(tmp_path.iterdir())) == ([], [name], [], [])


def test_one_that_ends_leaves_nothing(tmp_path: Path) -> None:
    with held(tmp_path) as first, held(tmp_path) as second:
        assert first != second
        assert found(tmp_path) == []

    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = folder_of("e-1")
    assert folder == folder_of("e-1") != folder_of("e-2")
    folder.parent.chmod(0o777)

    with pytest.raises(PermissionError, match="is not this user's alone"):
        folder_of("e-1")
