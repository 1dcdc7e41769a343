"""Secrets in files."""

import stat
from pathlib import Path

from flotilla.shared.net.authorisation.tokens import write_secret


def test_who_reads_a_secret_sees_the_old_one_or_the_new_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_secret(path, "old")

    with path.open() as opened:
        write_secret(path, "new")

        assert opened.read() == "old\n"
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
