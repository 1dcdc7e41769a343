"""``flotilla restore --dry-run`` says what would be lost, and writes nothing."""

import argparse
import json
from pathlib import Path

import pytest

from flotilla.backup.parts import FORMAT, About
from flotilla.cli.commands.backup import restore
from flotilla.shared.errors import InvalidRequest
from tests.unit.gateway.stored import store_checkpoint


def a_backup(folder: Path) -> None:
    for name in ("database", "redis", "experiments"):
        (folder / name).mkdir(parents=True)
    row = {
        "id": "tiny-1",
        "state": "running",
        "step": 7,
        "policy_version": 7,
        "started_at": 1.0,
        "directory": "/nowhere/tiny-1",
    }
    (folder / "database" / "experiments.jsonl").write_text(json.dumps(row) + "\n")
    token = {"name": "admin", "scope": "operator", "experiment_id": None}
    (folder / "database" / "tokens.jsonl").write_text(json.dumps(token) + "\n")
    (folder / "token").write_text("SeCrEt")
    (folder / "redis" / "tiny-1.jsonl").write_text(json.dumps({"committed": 4, "plans": [5]}) + "\n")
    store_checkpoint(folder / "experiments" / "tiny-1", 4, {})
    about = About(format=FORMAT, revision="0012", at="2030-01-01T00:00:00Z", has_token=False)
    (folder / "backup.json").write_text(about.model_dump_json())


async def test_a_dry_run_says_what_would_be_lost_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_backup(tmp_path / "backup")
    data = tmp_path / "data"

    await restore(argparse.Namespace(folder=str(tmp_path / "backup"), data=str(data), dry_run=True, with_rights=False))

    said = " ".join(capsys.readouterr().out.split())
    assert "tiny-1: running; database step 7; Redis committed step 4, 1 plans; checkpoint 4" in said
    assert "steps 6 to 7 are trained again, from the checkpoint of step 4" in said
    assert "token 'admin': operator (left out without --with-rights)" in said
    assert "the operator's token (left out without --with-rights)" in said and "SeCrEt" not in said
    assert not data.exists()


async def test_a_folder_without_its_last_file_is_no_backup(tmp_path: Path) -> None:
    a_backup(tmp_path / "backup")
    (tmp_path / "backup" / "backup.json").unlink()

    with pytest.raises(InvalidRequest, match="no complete backup"):
        await restore(
            argparse.Namespace(folder=str(tmp_path / "backup"), data=str(tmp_path), dry_run=True, with_rights=False)
        )
