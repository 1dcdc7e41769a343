"""The uids of slots."""

import os
from pathlib import Path

from flotilla.services.sandbox.slots import lock_uid


def test_a_uid_is_locked_once(tmp_path: Path) -> None:
    first = lock_uid(61000, tmp_path / "locks")
    second = lock_uid(61000, tmp_path / "locks")
    assert first is not None
    os.close(first)
    third = lock_uid(61000, tmp_path / "locks")
    assert third is not None
    os.close(third)

    assert second is None
