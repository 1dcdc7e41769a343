"""A trial that is interrupted says what is left of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flotilla.cli.commands import run as commands
from flotilla.cli.commands.trial import try_out
from flotilla.cli.run_directory import RunDirectory
from flotilla.trial_run.scaling import scale_down
from tests.unit.importers.sources import BASES, import_flat


async def _interrupted(*arguments: Any, **options: Any) -> int:
    raise asyncio.CancelledError


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_interrupted_trial_offers_to_go_on_only_where_its_folder_stays(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunDirectory, "experiment_id", "experiment-1")
    monkeypatch.setattr(RunDirectory, "durable_step", lambda directory: 0)
    monkeypatch.setattr(commands, "run_on_own_fleet", _interrupted)
    found = import_flat("verl", BASES["verl"])
    assert found.spec is not None
    trial = scale_down(found.spec, found.files, tmp_path)
    keep = tmp_path / "kept" if is_kept else None

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(try_out(found.spec, trial, keep=keep, agent=None, plain=True))

    said = capsys.readouterr().out
    assert ("--continue" in said) == is_kept
    assert ("nothing of it is left" in said) != is_kept
