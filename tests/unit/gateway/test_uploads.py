"""Checkpoints at a URL: whole or not there, as those on the disk, and another experiment's beginning."""

import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from services.gateway.events.log import EventLog
from services.gateway.store.memory import MemoryStore
from services.gateway.uploads.fetching import fetch
from services.gateway.uploads.remote import UPLOADING, RemoteCheckpoints
from services.gateway.uploads.uploader import Uploader
from shared.checkpoints import STATE_FILE, StoredCheckpoint, complete
from shared.clock import ManualClock
from shared.errors import InvalidSpec, ModelError
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

    with pytest.raises(ModelError, match="outside"):
        fetch(url, None, tmp_path / "fetched")

    assert not (tmp_path / "evil").exists()


class Uploading:
    """An uploader and what it told."""

    def __init__(self, directory: Path, url: str, check: Any = lambda: None) -> None:
        self._store = MemoryStore()
        events = EventLog(self._store, ManualClock())
        self.uploader = Uploader(directory.name, directory, url, events, check)
        self._told = 0

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
