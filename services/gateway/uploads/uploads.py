"""The uploaders of all experiments: made when one begins to work, finished when it comes to rest."""

import functools
from pathlib import Path

from services.gateway.events.log import EventLog
from services.gateway.records.repository import Experiment
from services.gateway.uploads.uploader import Uploader
from shared.places import Places

FIELD = "checkpoint.upload_to"


class Uploads:
    """Keeps the uploader of each experiment that wants one."""

    def __init__(self, events: EventLog, places: Places) -> None:
        self._events, self._places = events, places

    async def run(self, experiment: Experiment) -> None:
        """Upload until cancelled; returns at once where no URL is named."""
        if (uploader := self._of(experiment)) is not None:
            await uploader.run()

    async def finish(self, experiment: Experiment) -> None:
        """Upload what is left."""
        if (uploader := self._of(experiment)) is not None:
            await uploader.finish()

    def _of(self, experiment: Experiment) -> Uploader | None:
        url, record = experiment.spec.checkpoint.upload_to, experiment.record
        if url is None:
            return None
        check = functools.partial(self._places.check_checkpoint_url, url, FIELD)
        return Uploader(experiment.id, Path(record.directory), url, self._events, check)
