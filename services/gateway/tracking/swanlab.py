"""SwanLab as a tracker: a run with the experiment's id, in a child process, since the library allows one to a process.

A training step is the library's step, of which it keeps the first value of each name, here and in its service. So
records may come again. Offline, how far the run came is a file beside it, written after each batch that is in the
library's own file: after a restart it continues there, in a directory of its own with the same id. Online, a run that
was not closed is sent again from its beginning, for what the library had written and not sent yet is nowhere else; what
the service holds is left out.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, BinaryIO, Final

from flotilla.services.gateway.tracking.base import Record, TrackedRun, open_own
from flotilla.shared.children.calls import CallProcess
from flotilla.shared.children.processes import python_module, unheard
from flotilla.shared.config.sections.tracking import SwanlabTrackerConfig

MODULE: Final = "flotilla.services.gateway.tracking.swanlab_worker"
FOLDER: Final = "swanlab"
START_SECONDS: Final = 90.0
WRITE_SECONDS: Final = 90.0
FINISH_SECONDS: Final = 15.0
CURSOR_BYTES: Final = 20
"""Digits of the cursor in its file."""


class SwanlabTracker:
    """Hands records to the library's process, in batches that are in its file when ``write`` returns."""

    def __init__(self, config: SwanlabTrackerConfig, run: TrackedRun) -> None:
        self._tracked, self._is_online = run, config.mode == "online"
        folder = run.directory / FOLDER
        if folder.is_symlink():
            raise OSError(f"{folder} is a link: a tracker follows none that a trainer may have made")
        folder.mkdir(parents=True, exist_ok=True)
        with self._open() as file:
            self._cursor = int(file.read(CURSOR_BYTES) or b"0")
        options = {
            name: value
            for name, value in (
                ("mode", config.mode),
                ("project", config.project),
                ("workspace", config.workspace),
                ("group", config.group),
            )
            if value is not None
        }
        opening: dict[str, Any] = {
            "run": run.id,
            "name": run.name,
            "folder": str(folder),
            "spec": dict(run.spec),
            "options": options,
        }
        # A loop of the tracker's own thread, which runs during calls alone: nothing is left to be joined by a gateway
        # that ends, and the process dies with it.
        self._loop = asyncio.Runner()
        self._process = CallProcess(
            python_module(MODULE),
            opening,
            "SwanLab's client",
            start_seconds=START_SECONDS,
            on_line=unheard,
            blames_opening=False,
        )
        try:
            self._loop.run(self._process.start())
        except BaseException:
            self._loop.close()
            raise

    def cursor(self) -> int:
        """Return the cursor of the last record that the library's file has."""
        return self._cursor

    def write(self, records: Sequence[Record]) -> None:
        """Have the records written.

        Raises:
            FlotillaError: the process ended, or did not write them in time.
        """
        content = [[record.step, record.version, dict(record.values)] for record in records]
        self._loop.run(self._process.call({"records": content}, seconds=WRITE_SECONDS))
        self._cursor = records[-1].cursor
        if not self._is_online:
            self._keep(self._cursor)

    def close(self) -> None:
        """Mark the run as finished, which sends what an online run still has, and end the process."""
        try:
            self._loop.run(self._process.call({"finish": True}, seconds=FINISH_SECONDS))
            self._keep(self._cursor)
        finally:
            self._loop.run(self._process.aclose())
            self._loop.close()

    def _keep(self, cursor: int) -> None:
        # Of one length, so that one write is all: nothing of the one before is left behind it.
        with self._open() as file:
            file.write(f"{cursor:0{CURSOR_BYTES}}".encode("ascii"))

    def _open(self) -> BinaryIO:
        return open_own(None, self._tracked, f"{FOLDER}/cursor")
