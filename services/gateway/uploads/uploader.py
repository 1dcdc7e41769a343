"""Keeps at a URL what an experiment has on the disk: the checkpoints that are whole there, newest first.

It looks at both again and again, so nothing on the way of a checkpoint knows of it, and a restarted gateway goes on
where it was. An experiment that has ended comes to rest when its last checkpoint is there, or when that was given up.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from services.gateway.events.log import EventLog
from services.gateway.uploads.remote import RemoteCheckpoints
from shared.checkpoints import CHECKPOINTS, StoredCheckpoint, complete
from shared.errors import FlotillaError

log = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0
FINISH_SECONDS = 600.0
"""Without success for so long, an experiment that has ended comes to rest without its last upload."""


class Uploader:
    """Copies the checkpoints of one experiment.

    Args:
        experiment_id: its name below the URL.
        directory: the experiment's.
        url: ``checkpoint.upload_to``.
        events: told of each checkpoint that is there, and why one is not.
        check: raises where the operator does not allow the URL.
    """

    def __init__(
        self, experiment_id: str, directory: Path, url: str, events: EventLog, check: Callable[[], None]
    ) -> None:
        self._id, self._directory, self._events, self._check = experiment_id, directory / CHECKPOINTS, events, check
        self.url = f"{url.rstrip('/')}/{experiment_id}"
        self._num_failures = 0

    async def run(self) -> None:
        """Copy what is new every two seconds until cancelled; a failure is an event, and tried again later."""
        while True:
            await self._attempt()
            await asyncio.sleep(self._pause_seconds)

    async def finish(self) -> None:
        """Copy all that is left; given up when that did not succeed for some minutes."""
        end = asyncio.get_running_loop().time() + FINISH_SECONDS
        while not await self._attempt() and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 (no store tells)
            await asyncio.sleep(self._pause_seconds)

    @property
    def _pause_seconds(self) -> float:
        return min(PERIOD_SECONDS * 2.0**self._num_failures, LONGEST_PAUSE_SECONDS)

    async def _attempt(self) -> bool:
        stop = threading.Event()
        working = asyncio.create_task(asyncio.to_thread(self._mirror, stop), name="upload")
        try:
            uploaded = await asyncio.shield(working)
        except asyncio.CancelledError:
            # A thread cannot be interrupted: it ends with the file that it is at.
            stop.set()
            await asyncio.wait({working})
            raise
        except Exception as error:  # each protocol's package raises errors of its own
            cause = error.detail if isinstance(error, FlotillaError) else f"{type(error).__name__}: {error}"
            log.warning("checkpoints cannot be uploaded", extra={"experiment_id": self._id, "error": cause})
            self._num_failures += 1
            if self._num_failures == 1:
                await self._events.append(self._id, "upload_failed", url=self.url, cause=cause)
            return False
        self._num_failures = 0
        for step in uploaded:
            log.info("checkpoint is uploaded", extra={"experiment_id": self._id, "step": step, "url": self.url})
            await self._events.append(self._id, "checkpoint_uploaded", step=step, url=self.url)
        return True

    def _mirror(self, stop: threading.Event) -> list[int]:
        """Copy what is missing, remove what the disk keeps no more, and return the steps that are new there."""
        self._check()
        local = list(complete(self._directory))
        if not local:
            return []
        remote = RemoteCheckpoints(self.url)
        uploaded = [stored.step for stored in local if self._is_uploaded(remote, stored, stop)]
        kept = {stored.step for stored in local}
        if not stop.is_set() and remote.holds(local[0]):
            for step in remote.steps():
                # Later ones are of a lineage that was given up; they stay until this one comes to them.
                if step < local[0].step and step not in kept:
                    remote.remove(step)
        return uploaded

    def _is_uploaded(self, remote: RemoteCheckpoints, stored: StoredCheckpoint, stop: threading.Event) -> bool:
        try:
            return not stop.is_set() and not remote.holds(stored) and remote.upload(stored, stop)
        except FileNotFoundError:
            if stored.path.is_dir():
                raise
            # A newer one took its place on the disk meanwhile.
            return False
