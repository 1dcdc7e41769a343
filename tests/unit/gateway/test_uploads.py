"""Checkpoints at a URL: whole or not there, as those on the disk, and another experiment's beginning."""

import asyncio
import errno
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.gateway.uploads import remote, uploads
from flotilla.services.gateway.uploads.fetching import fetch
from flotilla.services.gateway.uploads.remote import UPLOADING, RemoteCheckpoints, check_protocol
from flotilla.services.gateway.uploads.uploads import WINDOW, Uploader
from flotilla.shared.checkpoints.folders import STATE_FILE, StoredCheckpoint, complete
from flotilla.shared.clock import ManualClock
from flotilla.shared.errors import InvalidSpec, ModelError, Unavailable
from flotilla.shared.schemas.experiment import UploadRecord, UploadView
from tests.unit.gateway.builders import a_spec
from tests.unit.gateway.stored import store_checkpoint

SPEC = a_spec().model_dump(mode="json")


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for checkpoints, empty."""
    return f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}/remote"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An experiment with checkpoints of steps 2 and 4."""
    for step in (2, 4):
        store_checkpoint(tmp_path / "mine", step, SPEC)
    return tmp_path / "mine"


def newest(directory: Path) -> StoredCheckpoint:
    return next(complete(directory / "checkpoints"))


def upload(url: str, directory: Path) -> bool:
    return RemoteCheckpoints(url).upload(newest(directory), threading.Event())


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}


def counted(monkeypatch: pytest.MonkeyPatch, url: str, *, fails_at: int = 99) -> list[str]:
    """Note the files that are sent to a store, and let it go away at one of them."""
    system = type(fsspec.core.url_to_fs(url)[0])
    put, sent = system.put_file, list[str]()

    def put_file(self: Any, local: str, remote: str, **options: Any) -> None:
        if len(sent) + 1 == fails_at:
            raise ConnectionError("the store is away")
        sent.append(Path(remote).name)
        put(self, local, remote, **options)

    monkeypatch.setattr(system, "put_file", put_file)
    return sent


def test_what_was_uploaded_comes_back_as_it_was(url: str, directory: Path, tmp_path: Path) -> None:
    assert RemoteCheckpoints(url).steps() == []
    assert upload(url, directory)

    stored = fetch(url, None, tmp_path / "fetched")

    assert RemoteCheckpoints(url).steps() == [4]
    assert stored.step == 4
    assert files_of(stored.path) == files_of(newest(directory).path)


def test_one_that_is_cut_off_is_no_checkpoint_and_goes_on_where_it_was(
    url: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        counted(patched, url, fails_at=2)
        with pytest.raises(ConnectionError):
            upload(url, directory)
    assert RemoteCheckpoints(url).steps() == []
    with pytest.raises(ModelError, match=r"no checkpoint at .*; steps that are there: none"):
        fetch(url, None, tmp_path / "fetched")

    sent = counted(monkeypatch, url)
    assert upload(url, directory)

    assert len(sent) == len(newest(directory).state.files) - 1
    assert files_of(fetch(url, 4, tmp_path / "fetched").path) == files_of(newest(directory).path)


def test_one_of_another_lineage_is_replaced_and_never_mixed(
    url: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(url, directory)
    shutil.rmtree(newest(directory).path)
    other = store_checkpoint(directory, 4, SPEC | {"seed": 9})
    with monkeypatch.context() as patched:
        counted(patched, url, fails_at=2)
        with pytest.raises(ConnectionError):
            upload(url, directory)
    assert RemoteCheckpoints(url).steps() == [], "half of it is of each"

    assert upload(url, directory)

    assert files_of(fetch(url, 4, tmp_path / "fetched").path) == files_of(other)
    assert RemoteCheckpoints(url).holds(newest(directory))


def test_told_to_stop_it_ends_between_two_files(url: str, directory: Path) -> None:
    stop = threading.Event()
    stop.set()

    assert not RemoteCheckpoints(url).upload(newest(directory), stop)

    assert RemoteCheckpoints(url).steps() == []


def test_a_checkpoints_own_url_and_a_step_name_it(url: str, directory: Path, tmp_path: Path) -> None:
    for stored in complete(directory / "checkpoints"):
        RemoteCheckpoints(url).upload(stored, threading.Event())

    assert fetch(f"{url}/step-00000002", None, tmp_path / "a").step == 2
    assert fetch(url, 2, tmp_path / "b").step == 2
    with pytest.raises(ModelError, match=r"step 3 at .* that are there: 2, 4"):
        fetch(url, 3, tmp_path / "c")
    with pytest.raises(ModelError, match="is not the folder of step 4"):
        fetch(f"{url}/step-00000002", 4, tmp_path / "d")


def test_a_damaged_one_is_refused_and_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    upload(url, directory)
    (tmp_path / "remote/step-00000004/optimizer.safetensors").write_text("moments of step 5")

    with pytest.raises(ModelError, match=r"is damaged: optimizer\.safetensors"):
        fetch(url, None, tmp_path / "fetched")

    assert not (tmp_path / "fetched").exists()


def test_no_file_is_written_outside_of_the_checkpoint(directory: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    upload(url, directory)
    state = tmp_path / "remote/step-00000004" / STATE_FILE
    state.write_text(state.read_text().replace('"optimizer.safetensors":', '"../../../evil":', 1))

    with pytest.raises(ModelError, match="no plain name"):
        fetch(url, None, tmp_path / "fetched")

    assert not (tmp_path / "evil").exists()


class Uploading:
    """An uploader and what it told."""

    def __init__(self, directory: Path, url: str, check: Any = lambda: None) -> None:
        self._store, clock = MemoryStore(), ManualClock()
        about = self._store, clock, EventLog(self._store, clock)
        self.uploader = Uploader("mine", directory, f"{url}/mine", *about, check)
        self._told = 0

    async def views(self, *steps: int) -> list[str]:
        """Say how far the copies of some steps are, as whoever lists checkpoints is told."""
        record = UploadRecord.model_validate(await self._store.window("mine", WINDOW))
        return [record.view_of(step).state for step in steps]

    async def view(self, step: int) -> UploadView:
        return UploadRecord.model_validate(await self._store.window("mine", WINDOW)).view_of(step)

    async def attempt(self) -> list[tuple[str, Any]]:
        """Look once; returns the events."""
        await self.uploader._attempt()
        events = await self._store.events("mine", after=0, limit=100)
        new, self._told = events[self._told :], len(events)
        return [(each.type, each.data.get("step")) for each in new]


async def test_the_folder_at_the_url_follows_the_one_on_the_disk(url: str, directory: Path) -> None:
    uploading, remote = Uploading(directory, url), RemoteCheckpoints(f"{url}/mine")

    assert await uploading.attempt() == [("checkpoint_uploaded", 4), ("checkpoint_uploaded", 2)]
    assert await uploading.attempt() == []
    shutil.rmtree(directory / "checkpoints" / "step-00000002")
    store_checkpoint(directory, 6, SPEC)
    assert await uploading.attempt() == [("checkpoint_uploaded", 6)]
    assert remote.steps() == [4, 6]
    # The disk came back older: what only the store has is kept until training comes to it.
    shutil.rmtree(directory / "checkpoints" / "step-00000006")
    assert await uploading.attempt() == []
    assert remote.steps() == [4, 6]


async def test_a_store_that_is_unavailable_is_named_once_and_tried_again(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading = Uploading(directory, url)
    with monkeypatch.context() as patched:
        counted(patched, url, fails_at=1)
        assert await uploading.attempt() == [("upload_failed", None)]
        assert await uploading.attempt() == []

    assert await uploading.attempt() == [("checkpoint_uploaded", 4), ("checkpoint_uploaded", 2)]


async def test_what_is_copied_pending_failed_and_gone_is_told(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading = Uploading(directory, url)
    seen = list[list[str]]()
    put = type(fsspec.core.url_to_fs(url)[0]).put_file

    with monkeypatch.context() as patched:
        counted(patched, url, fails_at=3)
        await uploading.attempt()
    assert await uploading.views(4, 2) == ["uploaded", "failed"], "one has two files"
    failed = await uploading.view(2)
    assert (failed.url, failed.cause) == (f"{url}/mine/step-00000002", "ConnectionError: the store is away")

    loop = asyncio.get_running_loop()

    def put_file(self: Any, *names: str, **options: Any) -> None:
        seen.append(asyncio.run_coroutine_threadsafe(uploading.views(4, 2), loop).result(5))
        put(self, *names, **options)

    monkeypatch.setattr(type(fsspec.core.url_to_fs(url)[0]), "put_file", put_file)
    await uploading.attempt()

    assert seen == [["uploaded", "uploading"]] * 2
    assert await uploading.views(6, 4, 2) == ["pending", "uploaded", "uploaded"]
    assert (await uploading.view(4)).at == "1970-01-12T13:46:40.000Z"
    shutil.rmtree(directory / "checkpoints" / "step-00000002")
    await uploading.attempt()
    assert await uploading.views(4, 2) == ["uploaded", "removed"]


async def test_a_later_gateway_knows_what_is_there_and_tells_it_no_second_time(url: str, directory: Path) -> None:
    uploading = Uploading(directory, url)
    await uploading.attempt()
    before = uploading.uploader
    after = Uploader("mine", directory, before.url, before._store, before._clock, before._events, before._check)
    uploading.uploader = after

    assert await uploading.attempt() == []
    assert await uploading.views(4, 2) == ["uploaded", "uploaded"]


async def test_a_file_that_was_lost_at_the_url_is_noticed_and_sent_again(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading, remote = Uploading(directory, url), RemoteCheckpoints(f"{url}/mine")
    await uploading.attempt()
    system, root = fsspec.core.url_to_fs(f"{url}/mine")
    system.rm_file(f"{root}/step-00000004/optimizer.safetensors")
    assert not remote.holds(newest(directory))
    sent = counted(monkeypatch, url)
    assert await uploading.attempt() == [], "sizes are compared every ten minutes"
    monkeypatch.setattr(uploads, "CHECK_SECONDS", 0.0)

    assert await uploading.attempt() == [("checkpoint_uploaded", 4)]

    assert len(sent) == 1
    assert remote.holds(newest(directory))
    assert await uploading.views(4) == ["uploaded"]


async def test_one_that_the_disk_loses_while_it_is_looked_at_is_no_failure(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading, holds = Uploading(directory, url), RemoteCheckpoints.holds

    def vanishing(self: RemoteCheckpoints, stored: StoredCheckpoint) -> bool:
        if stored.step == 2:
            shutil.rmtree(stored.path)
        return holds(self, stored)

    monkeypatch.setattr(RemoteCheckpoints, "holds", vanishing)

    assert await uploading.attempt() == [("checkpoint_uploaded", 4)]


def test_a_step_that_is_made_again_while_it_is_copied_is_not_called_whole(
    url: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = type(fsspec.core.url_to_fs(url)[0])
    put = system.put_file

    def put_file(self: Any, *names: str, **options: Any) -> None:
        put(self, *names, **options)
        shutil.rmtree(newest(directory).path)
        store_checkpoint(directory, 4, SPEC | {"seed": 9})

    with monkeypatch.context() as patched:
        patched.setattr(system, "put_file", put_file)
        assert not upload(url, directory)

    assert RemoteCheckpoints(url).steps() == []
    assert upload(url, directory)
    assert files_of(fetch(url, 4, tmp_path / "fetched").path) == files_of(newest(directory).path)


async def test_half_of_a_checkpoint_that_the_disk_keeps_no_more_is_removed(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading = Uploading(directory, url)
    with monkeypatch.context() as patched:
        counted(patched, url, fails_at=2)
        await uploading.attempt()
    system, root = fsspec.core.url_to_fs(f"{url}/mine")
    assert system.exists(f"{root}/step-00000004")
    shutil.rmtree(directory / "checkpoints" / "step-00000004")
    store_checkpoint(directory, 6, SPEC)

    await uploading.attempt()

    assert sorted(Path(each).name for each in system.ls(root, detail=False)) == ["step-00000002", "step-00000006"]


async def test_an_experiment_that_ends_does_not_wait_for_a_url_that_is_not_allowed(url: str, directory: Path) -> None:
    def refuse() -> None:
        raise InvalidSpec("no longer")

    uploading = Uploading(directory, url, refuse)

    await asyncio.wait_for(uploading.uploader.finish(), 5)

    assert (await uploading.view(4)).cause == "no longer"


async def test_a_store_that_hangs_is_named_and_keeps_nothing_from_ending(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploading, answers = Uploading(directory, url), threading.Event()
    monkeypatch.setattr(remote, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(remote, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(remote, "LEAVE_SECONDS", 0.1)
    system = type(fsspec.core.url_to_fs(url)[0])
    with monkeypatch.context() as patched:
        patched.setattr(system, "put_file", lambda *_, **__: answers.wait(30))

        assert await asyncio.wait_for(uploading.attempt(), 5) == [("upload_failed", None)]
        assert "does not answer: nothing moved for 0.2 s" in str((await uploading.view(4)).cause)
        assert await asyncio.wait_for(uploading.attempt(), 5) == []
        assert "a call that was given up has not ended" in str((await uploading.view(4)).cause)
        monkeypatch.setattr(remote, "SILENT_SECONDS", 60.0)
        other = Uploading(directory, url)
        running = asyncio.create_task(other.uploader.run())
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 5)
        answers.set()


def test_every_file_is_on_the_disk_of_a_file_system_before_the_state_is(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "remote/step-00000004"
    flushed = list[tuple[str, bool]]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), (folder / STATE_FILE).exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    upload(f"file://{tmp_path}/remote", directory)

    early = [Path(path) for path, is_whole in flushed if not is_whole and path.endswith(".part")]
    written = {str(each.relative_to(folder).with_suffix("").with_suffix("")) for each in early}
    assert written >= set(newest(directory).state.files)
    assert str(folder) in {path for path, _ in flushed} and str(folder.parent) in {path for path, _ in flushed}


def test_a_file_that_was_cut_off_has_no_name_and_is_removed_with_the_next_upload(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "remote/step-00000004"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: raise_killed())
        patched.setattr(Path, "unlink", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            upload(f"file://{tmp_path}/remote", directory)
    assert [each.suffix for each in folder.iterdir()] == [".part"]

    assert upload(f"file://{tmp_path}/remote", directory)

    assert files_of(folder).keys() == newest(directory).state.files.keys() | {STATE_FILE}


def raise_killed() -> None:
    raise KeyboardInterrupt


def test_what_is_downloaded_is_flushed_since_an_experiment_links_to_it(
    url: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(url, directory)
    flushed = set[str]()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    stored = fetch(url, None, tmp_path / "fetched")

    assert {str(stored.path / name) for name in stored.state.files} <= flushed


def test_a_full_disk_is_not_called_a_store_that_cannot_be_read(
    url: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(url, directory)

    def get_file(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(fsspec.core.url_to_fs(url)[0]), "get_file", get_file)

    with pytest.raises(Unavailable, match=r"checkpoint\.resume_from: the disk of .* is full"):
        fetch(url, None, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


async def test_a_url_that_the_operator_allows_no_more_is_left_alone(url: str, directory: Path) -> None:
    def refuse() -> None:
        raise InvalidSpec("no longer")

    assert await Uploading(directory, url, refuse).attempt() == [("upload_failed", None)]
    assert RemoteCheckpoints(f"{url}/mine").steps() == []


def test_what_nothing_reaches_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="flotilla\\[data\\]"):
        RemoteCheckpoints("nowhere://bucket/x")


def test_the_mark_of_an_upload_goes_with_its_end(directory: Path, tmp_path: Path) -> None:
    upload(f"file://{tmp_path}/remote", directory)

    assert not (tmp_path / "remote/step-00000004" / UPLOADING).exists()


@pytest.mark.parametrize("url", ["s4://bucket/runs", "gs://bucket/runs"])
def test_what_nothing_here_reaches_is_refused_before_anything_is_trained(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first checkpoint says so, hours later."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)

    with pytest.raises(InvalidSpec, match=f"checkpoint.upload_to: {url} cannot be reached: .*; install flotilla"):
        check_protocol(a_spec(checkpoint={"upload_to": url}))


@pytest.mark.parametrize("url", [None, "file:///tmp/runs", "memory://runs"])
def test_what_is_installed_here_is_accepted(url: str | None) -> None:
    check_protocol(a_spec(checkpoint={"upload_to": url}))


@pytest.mark.parametrize("url", ["nowhere", "/a/path", "s3://bucket?x=1", "s3://host:9000/bucket"])
def test_what_is_no_url_of_a_folder_is_refused_in_words(url: str) -> None:
    with pytest.raises(InvalidSpec, match="must be the URL of a folder, such as s3://bucket/checkpoints, without port"):
        a_spec(checkpoint={"upload_to": url})
