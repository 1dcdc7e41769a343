"""A backup that somebody else made reaches nothing but its own experiments, and one that fails leaves nothing."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla.backup import keys, parts
from flotilla.backup.files import copy_experiment, restore_experiment
from flotilla.backup.keys import StoredKey, dump_keys, restore_keys
from flotilla.backup.parts import Stores, restore_backup
from flotilla.backup.rows import experiments_of
from flotilla.shared.errors import InvalidRequest, Unavailable
from tests.unit.cli.test_backup import a_backup


@pytest.mark.parametrize("name", ["x/../../../victim", "..", "/etc", "a{b}", "a:b", "", "a\n"])
def test_an_experiment_whose_id_no_gateway_makes_is_refused(tmp_path: Path, name: str) -> None:
    row = {"id": name, "state": "running", "step": 1, "policy_version": 1, "started_at": 1.0, "directory": "/x"}
    (tmp_path / "experiments.jsonl").write_text(json.dumps(row) + "\n")

    with pytest.raises(InvalidRequest, match="damaged"):
        experiments_of(tmp_path)


@pytest.mark.parametrize(
    "put",
    [
        lambda at: at.symlink_to("/etc/passwd"),
        lambda at: at.symlink_to("/etc"),
        lambda at: os.mkfifo(at),
    ],
    ids=["link to a file", "link to a folder", "pipe"],
)
def test_a_restore_refuses_links_and_what_is_no_file(tmp_path: Path, put: Callable[[Path], None]) -> None:
    folder = tmp_path / "backup" / "experiments" / "a"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "file").write_text("x")
    restore_experiment(tmp_path / "backup", "experiments/a", tmp_path / "good")
    put(folder / "below" / "other")

    with pytest.raises(InvalidRequest, match="below/other"):
        restore_experiment(tmp_path / "backup", "experiments/a", tmp_path / "target")

    assert (tmp_path / "good" / "below" / "file").read_text() == "x"
    assert not (tmp_path / "target" / "below" / "other").exists()


def test_a_backup_waits_for_no_pipe_and_follows_no_folder_that_became_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below" / "passwd").write_text("own")
    (source / "file").write_text("x")

    def replaced(folder: Path, _: Path | None) -> list[Path]:
        (source / "below" / "passwd").unlink()
        (source / "below").rmdir()
        (source / "below").symlink_to("/etc")
        (source / "file").unlink()
        os.mkfifo(source / "file")
        return [source / "below" / "passwd", source / "file"]

    monkeypatch.setattr("flotilla.backup.files._files", replaced)

    assert copy_experiment(source, tmp_path / "copy") == 0
    assert list((tmp_path / "copy").iterdir()) == []


@pytest.mark.parametrize("name", ["anything", "{exp:other}:state", "{exp::gateway}:leader", "{exp:tiny-1}x"])
def test_a_key_of_another_experiment_is_refused(tmp_path: Path, name: str) -> None:
    lines = ['{"committed": 0, "plans": []}', StoredKey(key=name, ttl=0, dump="").model_dump_json()]
    (tmp_path / "tiny-1.jsonl").write_text("\n".join(lines) + "\n")

    with pytest.raises(InvalidRequest, match="no key of this experiment"):
        list(keys._keys(tmp_path / "tiny-1.jsonl"))


async def test_a_redis_that_does_not_answer_ends_backup_and_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "ANSWER_SECONDS", 0.2)
    ended = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        with pytest.raises(Unavailable, match="did not answer"):
            await dump_keys(url, ["a"], tmp_path)
        with pytest.raises(Unavailable, match="did not answer"):
            await restore_keys(url, ["a"], tmp_path)
    finally:
        ended.set()
        server.close()


async def test_a_restore_that_fails_halfway_leaves_neither_files_nor_keys_and_no_rights_come_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_backup(tmp_path / "backup")
    removed: list[str] = []

    async def nothing(*_: object) -> None:
        pass

    async def remove(_: str, ids: list[str]) -> None:
        removed.extend(ids)

    def fails(*_: object, with_rights: bool) -> None:
        assert (data / "experiments" / "tiny-1").is_dir()
        assert (data / "token").exists() == with_rights
        raise Unavailable("the database is gone")

    monkeypatch.setattr(parts, "restore_keys", nothing)
    monkeypatch.setattr(parts, "remove_keys", remove)
    monkeypatch.setattr(parts, "restore_rows", fails)
    data = tmp_path / "data"
    stores = Stores(data, "sqlite://", "redis://nowhere")

    for with_rights in (False, True):
        with pytest.raises(Unavailable, match="is gone"):
            await restore_backup(tmp_path / "backup", stores, lambda _: None, with_rights=with_rights)

    assert removed == ["tiny-1", "tiny-1"]
    assert [path.name for path in data.rglob("*")] == ["experiments"]
