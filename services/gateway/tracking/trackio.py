"""Trackio as a tracker: a run with the experiment's id, in the gateway's own store of Trackio or in a Space.

A record's cursor is the library's step, and the last one that is stored comes with a run that is resumed: so it
continues right after it. The cursor is also in a file beside the experiment, for a Space that does not say it: there
the last batch before a gateway was killed may be missing.
"""

from collections.abc import Sequence
from typing import BinaryIO

from flotilla.services.gateway.tracking.base import Record, TrackedRun, open_own
from flotilla.shared.config.sections.tracking import TrackioTrackerConfig

STEP = "train_step"
"""The training step, among the values: `step` is the library's."""
CURSOR_BYTES = 20
"""Digits of the cursor in its file."""


class TrackioTracker:
    """Logs each record with its training step as a value, so that a training step may come again."""

    def __init__(self, config: TrackioTrackerConfig, run: TrackedRun) -> None:
        import trackio  # an optional package, imported where it is used

        (run.directory / "trackio").mkdir(parents=True, exist_ok=True)
        self._tracked = run
        with self._open() as file:
            sent = int(file.read(CURSOR_BYTES) or b"0")
        self._run = trackio.init(
            project=config.project,
            name=run.id,
            group=config.group,
            space_id=config.space,
            private=None if config.space is None else True,
            config=dict(run.spec),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Of no public name; tests/contract/gateway/test_trackers.py holds the package to it.
        stored: int | None = self._run._initial_last_step
        self._cursor = sent if stored is None else stored

    def cursor(self) -> int:
        """Return the cursor of the last record that is stored."""
        return self._cursor

    def write(self, records: Sequence[Record]) -> None:
        """Hand the records to the library, which stores or sends them on a thread."""
        for record in records:
            self._run.log({**record.values, STEP: record.step, "version": record.version}, step=record.cursor)
        self._cursor = records[-1].cursor
        # Of one length, so that one write is all: nothing of the one before is left behind it.
        with self._open() as file:
            file.write(f"{self._cursor:0{CURSOR_BYTES}}".encode("ascii"))

    def close(self) -> None:
        """Wait until all is stored."""
        self._run.finish()

    def _open(self) -> BinaryIO:
        return open_own(None, self._tracked, "trackio/cursor")
