"""Two runs never share a directory; an earlier run's files are kept."""

from pathlib import Path

from flotilla.cli.commands.run import RunDirectory


def test_two_runs_at_once_get_two_directories(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path, "trial"), RunDirectory(tmp_path, "trial")

    assert [first.take().name, second.take().name] == ["trial", "trial-2"]

    first.release()
    second.release()


def test_a_later_run_moves_the_earlier_files_aside(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path, "trial")
    (first.take() / "summary.json").write_text("{}")
    first.release()

    second = RunDirectory(tmp_path, "trial")
    path = second.take()
    second.release()

    assert path == tmp_path / "trial"
    assert not (path / "summary.json").exists()
    assert len(list((tmp_path / "earlier").glob("trial-*/summary.json"))) == 1
