"""The uploaders of all experiments: made when one begins to work, finished when it comes to rest.

Keeps at a URL what an experiment has on the disk: the checkpoints that are whole there, newest first.

It looks at both again and again, so nothing on the way of a checkpoint knows of it, and a restarted gateway continues
where it was. An experiment that has ended comes to rest when its last checkpoint is there, or when that was given up.
What was found is in the database, where whoever lists checkpoints reads it.
"""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import PutWindow
from flotilla.services.gateway.uploads.remote import FIELD, RemoteCheckpoints, WatchedCalls
from flotilla.shared.checkpoints.folders import CHECKPOINTS, STATE_FILE, StoredCheckpoint, complete
from flotilla.shared.clock import Clock, pause_after, rfc3339
from flotilla.shared.errors import FlotillaError, NotFound, Unavailable
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.experiment import UploadCheck, UploadedCheckpoint, UploadRecord

log = logging.getLogger(__name__)

WINDOW = "uploads"
"""Name of the record in the database."""
PERIOD_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0
CHECK_SECONDS = 600.0
"""How often the sizes of all files at the URL are compared with those on the disk."""
FINISH_SECONDS = 600.0
"""Without success for so long, an experiment that has ended comes to rest without its last upload."""


@dataclass(frozen=True)
class Comparison:
    """The disk beside the URL, newest first.

    Attributes:
        states: digest of the ``state.json`` of each checkpoint on the disk, by step.
        whole: those that are whole at the URL.
        missing: those that are not.
    """

    states: Mapping[int, str]
    whole: Sequence[StoredCheckpoint]
    missing: Sequence[StoredCheckpoint]


class Uploader:
    """Copies the checkpoints of one experiment.

    Args:
        experiment_id: whose they are.
        directory: the experiment's.
        url: of the folder that gets a folder of each step.
        store, clock: where, and when, it is recorded what is there.
        events: told of each checkpoint that is there, and why one is not.
        check: raises where the operator does not allow the URL.
    """

    def __init__(
        self,
        experiment_id: str,
        directory: Path,
        url: str,
        store: Store,
        clock: Clock,
        events: EventLog,
        check: Callable[[], None],
    ) -> None:
        self._id, self._directory, self.url = experiment_id, directory / CHECKPOINTS, url
        self._below = directory.parent
        self._store, self._clock, self._events, self._check = store, clock, events, check
        self._record: UploadRecord | None = None
        self._whole: dict[int, str] = {}
        self._compared_at = -CHECK_SECONDS
        self._num_failures = 0
        self._is_hopeless = False
        self._calls = WatchedCalls(url)

    async def run(self) -> None:
        """Copy what is new every two seconds until cancelled; a failure is an event, and tried again later."""
        while True:
            await self._attempt()
            await asyncio.sleep(self._pause_seconds)

    async def finish(self) -> None:
        """Copy all that is left; given up when it cannot succeed, or did not for some minutes."""
        end = asyncio.get_running_loop().time() + FINISH_SECONDS
        while not await self._attempt() and not self._is_hopeless and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 (no store tells)
            await asyncio.sleep(self._pause_seconds)

    @property
    def _pause_seconds(self) -> float:
        return pause_after(self._num_failures + 1, PERIOD_SECONDS, LONGEST_PAUSE_SECONDS)

    async def _attempt(self) -> bool:
        try:
            await self._mirror()
        except Exception as error:  # each protocol's package raises errors of its own
            cause = error.detail if isinstance(error, FlotillaError) else f"{type(error).__name__}: {error}"
            log.warning("checkpoints cannot be uploaded", extra={"experiment_id": self._id, "error": cause})
            self._num_failures += 1
            self._is_hopeless = isinstance(error, FlotillaError) and not error.retryable
            self._whole = {}
            await self._tell_failure(cause)
            return False
        self._num_failures, self._is_hopeless = 0, False
        return True

    async def _mirror(self) -> None:
        """Copy what is missing, and remove what the disk keeps no more."""
        record = self._record
        if record is None:
            kept = await self._store.window(self._id, WINDOW)
            record = self._record = UploadRecord.model_validate(kept) if kept else UploadRecord(url=self.url)
        found = await self._calls.run(self._compare)
        if found is None:
            return
        whole = {str(each.step): found.states[each.step] for each in found.whole}
        known = {step: each for step, each in record.uploaded.items() if whole.get(step) == each.digest}
        await self._save(local=tuple(sorted(found.states)), uploaded=known, uploading=None, cause=None)
        for stored in found.whole:
            await self._tell_uploaded(stored.step, found.states[stored.step])
        for stored in found.missing:
            await self._save(uploading=stored.step)
            if await self._calls.run(partial(self._upload, stored)):
                self._whole[stored.step] = found.states[stored.step]
                await self._tell_uploaded(stored.step, found.states[stored.step])
        await self._save(uploading=None)
        await self._calls.run(partial(self._tidy, found))

    async def _tell_uploaded(self, step: int, digest: str) -> None:
        assert self._record is not None
        if str(step) in self._record.uploaded:
            return
        done = UploadedCheckpoint(at=rfc3339(self._clock.now()), digest=digest)
        event = ("checkpoint_uploaded", {"step": step})
        await self._save(uploaded={**self._record.uploaded, str(step): done}, event=event)
        log.info("checkpoint is uploaded", extra={"experiment_id": self._id, "step": step, "url": self.url})

    async def _tell_failure(self, cause: str) -> None:
        """Record why nothing can be copied; an event tells the first of several causes in a row."""
        event = ("upload_failed", {"cause": cause}) if self._num_failures == 1 else None
        try:
            await self._save(uploading=None, cause=cause, event=event)
        except FlotillaError as error:
            log.warning("a failed upload cannot be recorded", extra={"experiment_id": self._id, "error": error.detail})

    async def _save(self, *, event: tuple[str, Mapping[str, Any]] | None = None, **changes: Any) -> None:
        before = self._record or UploadRecord(url=self.url)
        after = before.model_copy(update={"url": self.url, **changes})
        if after == before and event is None:
            return
        async with self._store.transaction() as change:
            change.write(PutWindow(self._id, WINDOW, after.model_dump(mode="json")))
            if event is not None:
                self._events.stage(change, self._id, event[0], url=self.url, **event[1])
        self._record = after

    def _compare(self, stop: threading.Event, moved: Callable[[], None]) -> Comparison | None:
        """Compare both; None if nothing has changed since the last comparison, and none is due."""
        self._check()
        local, states = list[StoredCheckpoint](), dict[int, str]()
        for stored in complete(self._directory, self._below):
            with _unless_removed(stored), stored.open(STATE_FILE) as file:
                states[stored.step] = xxhash.xxh3_64(file.read()).hexdigest()
                local.append(stored)
        is_due = time.monotonic() - self._compared_at >= CHECK_SECONDS
        if not local or (states == self._whole and not is_due):
            return None
        remote = RemoteCheckpoints(self.url, moved)
        was_whole = {} if is_due else self._whole
        self._whole = {}
        missing = []
        for stored in local:
            with _unless_removed(stored):
                if was_whole.get(stored.step) == states[stored.step] or remote.holds(stored):
                    self._whole[stored.step] = states[stored.step]
                else:
                    missing.append(stored)
            moved()
        if is_due:
            self._compared_at = time.monotonic()
        return Comparison(states, [each for each in local if each.step in self._whole], missing)

    def _upload(self, stored: StoredCheckpoint, stop: threading.Event, moved: Callable[[], None]) -> bool:
        with _unless_removed(stored):
            return RemoteCheckpoints(self.url, moved).upload(stored, stop)
        return False

    def _tidy(self, found: Comparison, stop: threading.Event, moved: Callable[[], None]) -> None:
        """Remove what is neither on the disk nor newer than all there, whole or half; once the newest is there."""
        newest = max(found.states)
        if newest not in self._whole:
            return
        remote = RemoteCheckpoints(self.url, moved)
        for step in remote.folders():
            # Later ones are of a lineage that was given up; they stay until this one comes to them.
            if step < newest and step not in found.states and not stop.is_set():
                remote.remove(step)
                moved()


@contextlib.contextmanager
def _unless_removed(stored: StoredCheckpoint) -> Iterator[None]:
    """Leave the block where a newer checkpoint took the place of this one on the disk meanwhile."""
    try:
        yield
    except FileNotFoundError:
        if stored.path.is_dir():
            raise


COMPARE_SECONDS = 25.0
"""What a store has for its answer to who asks whether a copy is whole."""


class Uploads:
    """Makes the uploader of each experiment that wants one."""

    def __init__(self, store: Store, clock: Clock, events: EventLog, places: Places) -> None:
        self._store, self._clock, self._events, self._places = store, clock, events, places

    async def run(self, experiment: Experiment) -> None:
        """Upload until cancelled; returns at once where no URL is named."""
        if (uploader := self._of(experiment)) is not None:
            await uploader.run()

    async def finish(self, experiment: Experiment) -> None:
        """Upload what is left."""
        if (uploader := self._of(experiment)) is not None:
            await uploader.finish()

    def _of(self, experiment: Experiment) -> Uploader | None:
        url = url_of(experiment)
        if url is None:
            return None
        named = experiment.spec.checkpoint.upload_to or ""
        check = functools.partial(self._places.check_checkpoint_url, named, FIELD)
        directory = Path(experiment.record.directory)
        return Uploader(experiment.id, directory, url, self._store, self._clock, self._events, check)


def url_of(experiment: Experiment) -> str | None:
    """Return the URL of the folder with an experiment's checkpoints; None where its spec names none."""
    url = experiment.spec.checkpoint.upload_to
    return None if url is None else f"{url.rstrip('/')}/{experiment.id}"


async def compare(experiment: Experiment, stored: StoredCheckpoint, places: Places) -> UploadCheck:
    """Hold a checkpoint on the disk against its copy, as it is there now.

    Raises:
        NotFound: the spec names no URL.
        InvalidSpec: the operator does not allow it any more.
        Unavailable: the store does not answer, or refuses.
    """
    url = url_of(experiment)
    if url is None:
        raise NotFound(f"{experiment.id} keeps no copies of its checkpoints: set {FIELD}", experiment_id=experiment.id)
    places.check_checkpoint_url(experiment.spec.checkpoint.upload_to or "", FIELD)
    try:
        missing = await WatchedCalls(url, COMPARE_SECONDS).run(
            lambda _, moved: RemoteCheckpoints(url, moved).lacking(stored)
        )
    except FlotillaError:
        raise
    except Exception as error:  # each protocol's package raises errors of its own
        raise Unavailable(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    folder = f"{url}/step-{stored.step:08d}"
    return UploadCheck(step=stored.step, url=folder, is_whole=not missing, missing=tuple(missing))


async def record_of(store: Store, experiment: Experiment) -> UploadRecord | None:
    """Read how far the copies of an experiment's checkpoints are; None where its spec names no URL."""
    url = url_of(experiment)
    if url is None:
        return None
    kept = await store.window(experiment.id, WINDOW)
    return UploadRecord.model_validate(kept) if kept else UploadRecord(url=url)
