"""Checkpoints at a URL: one folder for each step, whole when its ``state.json`` is there, which comes last.

URL/step-00000040/
    uploading.json     the state of the checkpoint whose files are being written; gone when it is whole
    model/...          and all other files, as they are on the disk
    state.json

What was interrupted continues where it stopped: files that have their size are not sent again, if they are of the same
checkpoint. A store's own upload of one file is whole or not there; in a file system each file is flushed before it gets
its name, and all of them before the ``state.json``.
"""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import ValidationError

from flotilla.shared.checkpoints.folders import STATE_FILE, CheckpointState, StoredCheckpoint, step_of
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, ModelError, Unavailable
from flotilla.shared.files.beneath import same_file
from flotilla.shared.files.durable import flush

SILENT_SECONDS = 600.0
"""A store that takes or gives no byte, and ends no call, for so long does not answer."""
LOOK_SECONDS = 1.0
LEAVE_SECONDS = 5.0
"""What a call in progress returns when it is no longer awaited."""

Answer = TypeVar("Answer")
Work = Callable[[threading.Event, Callable[[], None]], Answer]
"""What is done: it ends early when the event is set, and calls the function whenever something moved."""


class WatchedCalls:
    """Calls of one store, one at a time.

    Args:
        url: names it.
        silent_seconds: without anything that moves, after which a call is given up; None: ``SILENT_SECONDS``.
    """

    def __init__(self, url: str, silent_seconds: float | None = None) -> None:
        self._url, self._silent_seconds = url, silent_seconds
        self._left: asyncio.Future[Any] | None = None

    async def run(self, work: Work[Answer]) -> Answer:
        """Do it on a thread.

        Raises:
            Unavailable: the store does not answer, or a call that was given up before has not ended yet.
        """
        if self._left is not None and not self._left.done():
            raise Unavailable(f"{self._url} does not answer: a call that was given up has not ended")
        silent_seconds = SILENT_SECONDS if self._silent_seconds is None else self._silent_seconds
        stop, moved_at = threading.Event(), time.monotonic()

        def moved() -> None:
            nonlocal moved_at
            moved_at = time.monotonic()

        working = on_daemon_thread(lambda: work(stop, moved), "store")
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=LOOK_SECONDS)
                if not working.done() and time.monotonic() - moved_at > silent_seconds:
                    self._leave(working, stop)
                    raise Unavailable(f"{self._url} does not answer: nothing moved for {silent_seconds:g} s")
        except asyncio.CancelledError:
            # A call cannot be interrupted: it ends with the file that it is at.
            self._leave(working, stop)
            await asyncio.wait({working}, timeout=LEAVE_SECONDS)
            raise
        return working.result()

    def _leave(self, working: "asyncio.Future[Any]", stop: threading.Event) -> None:
        stop.set()
        self._left = working
        working.add_done_callback(lambda done: done.cancelled() or done.exception())


UPLOADING = "uploading.json"
FIELD = "checkpoint.upload_to"


def check_protocol(spec: ExperimentSpec) -> None:
    """Check that what is installed here can upload where the spec says; nothing is asked of the store.

    Raises:
        InvalidSpec: fsspec or the protocol's package is missing, or there is no such protocol.
    """
    url = spec.checkpoint.upload_to
    if url is None:
        return
    try:
        import fsspec

        fsspec.get_filesystem_class(url.partition("://")[0])
    except (ImportError, ValueError) as error:
        entry = {"path": FIELD, "value": url, "allowed": f"{error}; install flotilla[data] and its protocol's package"}
        raise InvalidSpec(f"{FIELD}: {url} cannot be reached: {entry['allowed']}", errors=[entry]) from None


def _state_bytes(stored: StoredCheckpoint) -> bytes:
    with stored.open(STATE_FILE) as file:
        return file.read()


class RemoteCheckpoints:
    """The checkpoints below a URL; every call blocks, and raises whatever the store's package raises.

    Args:
        url: that fsspec knows.
        moved: called whenever a store has taken some bytes.

    Raises:
        InvalidSpec: nothing that is installed reaches it.
    """

    def __init__(self, url: str, moved: Callable[[], None] = lambda: None) -> None:
        try:
            import fsspec

            self._system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidSpec(
                f"{url} cannot be reached: {error}; install flotilla[data] and its protocol's package"
            ) from None
        self._root, self._url, self._moved = str(root).rstrip("/"), url, moved

    def steps(self) -> list[int]:
        """List the steps whose checkpoint is whole, in ascending order."""
        return [step for step in self.folders() if self._system.exists(f"{self._folder(step)}/{STATE_FILE}")]

    def folders(self) -> list[int]:
        """List the steps that have a folder, whole or not, in ascending order."""
        self._system.invalidate_cache()
        if not self._system.exists(self._root):
            return []
        names = [PurePosixPath(str(name)).name for name in self._system.ls(self._root, detail=False)]
        return sorted(step for name in names if (step := step_of(name)) is not None)

    def holds(self, stored: StoredCheckpoint) -> bool:
        """Return whether a complete copy of this checkpoint exists."""
        return not self.lacking(stored)

    def lacking(self, stored: StoredCheckpoint) -> list[str]:
        """Name what is not there of this very checkpoint: its state alone, or files without their size."""
        folder = self._folder(stored.step)
        if self._read(f"{folder}/{STATE_FILE}") != _state_bytes(stored):
            return [STATE_FILE]
        self._system.invalidate_cache()
        there = self._sizes(folder)
        return [name for name, size in stored.state.files.items() if there.get(name) != size]

    def upload(self, stored: StoredCheckpoint, stop: threading.Event) -> bool:
        """Copy a checkpoint there; False if it was told to stop before it was whole, or another one took its place.

        Raises:
            FileNotFoundError: it was removed from the disk meanwhile.
        """
        folder, state = self._folder(stored.step), _state_bytes(stored)
        self._system.invalidate_cache()
        there = self._sizes(folder)
        if STATE_FILE in there:
            if self._read(f"{folder}/{STATE_FILE}") == state:
                # Files of it were lost: what is still there stays.
                self._write(f"{folder}/{UPLOADING}", state)
            # Else of the same step, and another lineage. From here on it is no checkpoint.
            self._system.rm_file(f"{folder}/{STATE_FILE}")
        if self._read(f"{folder}/{UPLOADING}") != state:
            if there:
                self._system.rm(folder, recursive=True)
            there = {}
            self._write(f"{folder}/{UPLOADING}", state)
        for name, size in stored.state.files.items():
            if stop.is_set():
                return False
            if there.get(name) != size:
                with stored.open(name) as file:
                    self._put(same_file(file.fileno()), f"{folder}/{name}")
            self._moved()
        for name in there.keys() - stored.state.files.keys() - {STATE_FILE, UPLOADING}:
            # What a file system had of a file when its writer died.
            self._system.rm_file(f"{folder}/{name}")
        if stop.is_set() or _state_bytes(stored) != state:
            # A trainer that continued from an older one made this step again meanwhile: some files are of either.
            return False
        self._write(f"{folder}/{STATE_FILE}", state)
        self._system.rm_file(f"{folder}/{UPLOADING}")
        return True

    def remove(self, step: int) -> None:
        """Remove a step's checkpoint: first what makes it one."""
        folder = self._folder(step)
        if self._system.exists(f"{folder}/{STATE_FILE}"):
            self._system.rm_file(f"{folder}/{STATE_FILE}")
        self._system.rm(folder, recursive=True)

    def download(self, step: int, directory: Path) -> StoredCheckpoint:
        """Copy a step's checkpoint into a new folder of a directory; its checksums are not looked at.

        Raises:
            ModelError: it is not there, or no checkpoint of ours.
        """
        folder, path = self._folder(step), directory / f"step-{step:08d}"
        encoded = self._read(f"{folder}/{STATE_FILE}")
        if encoded is None:
            raise ModelError(f"there is no whole checkpoint of step {step} at {self._url}")
        try:
            state = CheckpointState.model_validate_json(encoded)
        except ValidationError as error:
            raise ModelError(
                f"{self._url} has no checkpoint of ours at step {step}: {error.errors()[0]['msg']}"
            ) from None
        for name in state.files:
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self._system.get_file(f"{folder}/{name}", str(target), callback=self._callback())
            self._moved()
            # An experiment that begins from it gets a second name of the file, no copy.
            flush(target)
        (path / STATE_FILE).write_bytes(encoded)
        return StoredCheckpoint(step, path, state)

    def _folder(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _sizes(self, folder: str) -> dict[str, int]:
        if not self._system.exists(folder):
            return {}
        found: dict[str, Any] = self._system.find(folder, detail=True)
        start = len(str(self._system._strip_protocol(folder)).rstrip("/")) + 1
        return {str(self._system._strip_protocol(name))[start:]: int(about["size"]) for name, about in found.items()}

    def _read(self, path: str) -> bytes | None:
        try:
            content: bytes = self._system.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    @property
    def _is_file_system(self) -> bool:
        protocol = self._system.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def _put(self, source: str, path: str) -> None:
        watched = self._callback()
        self._store(path, lambda there: self._system.put_file(source, there, callback=watched))

    def _callback(self) -> Any:
        from fsspec.callbacks import Callback

        return Callback(hooks={"moved": lambda *_, **__: self._moved()})

    def _write(self, path: str, content: bytes) -> None:
        self._store(path, lambda there: self._system.pipe_file(there, content))

    def _store(self, path: str, write: Callable[[str], None]) -> None:
        """Write a file that is whole or not there."""
        if not self._is_file_system:
            write(path)
            return
        # Stores of objects have no folders, and name an object when they have all of it.
        folder = Path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        partial = f"{path}.{secrets.token_hex(4)}.part"
        try:
            write(partial)
            flush(Path(partial))
            Path(partial).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(partial).unlink()
            raise
        for each in (folder, folder.parent, folder.parent.parent):
            flush(each)
