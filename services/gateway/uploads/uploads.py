"""The uploaders of all experiments: made when one begins to work, finished when it comes to rest."""

import functools
from pathlib import Path

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.uploads.remote import FIELD, RemoteCheckpoints
from flotilla.services.gateway.uploads.uploader import WINDOW, Uploader
from flotilla.services.gateway.uploads.watched import WatchedCalls
from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.clock import Clock
from flotilla.shared.errors import FlotillaError, NotFound, Unavailable
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.experiment import UploadCheck, UploadRecord

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
