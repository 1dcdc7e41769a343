"""Two services on one machine use no uid both."""

import os
from pathlib import Path

import pytest

from flotilla.services.sandbox.slots import folder_of_locks, lock_uid
from flotilla.shared.errors import Unavailable


def test_a_uid_is_locked_once(tmp_path: Path) -> None:
    first = lock_uid(61000, tmp_path)
    second = lock_uid(61000, tmp_path)
    assert first is not None
    os.close(first)
    third = lock_uid(61000, tmp_path)
    assert third is not None
    os.close(third)

    assert second is None


def test_locks_are_in_the_first_folder_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    never = tmp_path / "file" / "locks"

    assert folder_of_locks([never, tmp_path / "locks"]) == folder_of_locks([tmp_path / "locks"]) == tmp_path / "locks"
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700
    with pytest.raises(Unavailable, match=r"no folder can be made for the locks of uids: .*Not a directory"):
        folder_of_locks([never])
