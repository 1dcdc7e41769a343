"""Writes samples on a thread of its own with a bounded queue, without blocking the work.

What does not fit into the queue, or cannot be written, is left out and counted, and the condition is named until a
file can be written again. A process that is killed loses what is in the queue.
"""

import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from flotilla.shared.config.sections.tracking import SamplesConfig
from flotilla.shared.samples.folder import SampleFolder, ended_name
from flotilla.shared.samples.table import newest_version
from flotilla.shared.schemas.sample_kinds import KeptGroup, SampleFile, SampleKind
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.intervals import IntervalSet

log = logging.getLogger(__name__)

MOST_WAITING = 8
"""Files that wait to be written: each keeps a step's samples in memory."""
BATCH_SECONDS = 2.0
"""Groups that end one by one are written together, at least this often."""
BATCH_GROUPS = 16
CLOSE_SECONDS = 5.0

Make = Callable[[], SampleFile]


class KeepsEnded(Protocol):
    """Receiver of groups that end without being trained."""

    def ended(self, group: Group, kind: SampleKind, reason: str) -> None:
        """Keep a group, or do not; never blocks."""
        ...


class NothingKept:
    """Keeps nothing."""

    def ended(self, group: Group, kind: SampleKind, reason: str) -> None:
        """Do not keep it."""


class SampleRecorder:
    """Keeps samples of one experiment.

    Args:
        directory: of the experiment.
        config: what is kept.
        writer: names this process among those that write here.
        on_problem: called with why samples cannot be written, and with None when they can again, on the writer's
            thread.
    """

    def __init__(
        self,
        directory: Path,
        config: SamplesConfig,
        *,
        writer: str,
        on_problem: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._folder = SampleFolder(directory, config)
        # A process that comes back never writes over what it wrote before.
        self._writer = f"{writer}-{secrets.token_hex(4)}"
        self._on_problem = on_problem
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._ended: list[KeptGroup] = []
        self._ended_since = 0.0
        self._counts: Counter[tuple[int, str]] = Counter()
        self._number = 0
        self.written_bytes = 0
        self.lost_files = 0

    def start(self) -> "SampleRecorder":
        """Start the thread."""
        self._thread.start()
        return self

    def keep(self, make: Make) -> bool:
        """Write a file soon, or leave it out where too much waits: False.

        Args:
            make: makes it, on the writer's thread.
        """
        try:
            self._jobs.put_nowait(lambda: self._write(make))
        except queue.Full:
            self._lose("samples come faster than they can be written")
            return False
        return True

    def ended(self, group: Group, kind: SampleKind, reason: str) -> None:
        """Keep a group that ends without being trained, unless enough of its version and reason are kept."""
        kept = KeptGroup(group, kind, reason)
        key = newest_version([kept]), reason
        with self._lock:
            if self._counts[key] >= self.config.ended_per_version:
                return
            self._counts[key] += 1
            if len(self._counts) > 1000:
                # Of versions long gone.
                self._counts = Counter({each: count for each, count in self._counts.items() if each[0] >= key[0] - 8})
            if not self._ended:
                self._ended_since = time.monotonic()
            self._ended.append(kept)

    def forget(self, *, after_step: int, lost: IntervalSet) -> None:
        """Remove what an abandoned lineage wrote, before anything else is written."""

        def forgotten() -> None:
            if count := self._folder.forget(after_step=after_step, lost=lost):
                log.info("samples of a lost lineage are removed", extra={"files": count})

        self._jobs.put(forgotten)

    def keep_spec(self, document: str) -> None:
        """Keep the spec, in JSON, beside the samples."""
        self._jobs.put(lambda: self._folder.write_spec(document))

    def flush(self, wait_seconds: float) -> bool:
        """Wait until all that was given is written; False if that was not so in time."""
        is_done = threading.Event()

        def done() -> None:
            self._write_ended()
            is_done.set()

        try:
            self._jobs.put(done, timeout=wait_seconds)
        except queue.Full:
            return False
        return is_done.wait(wait_seconds)

    def close(self, wait_seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, as far as the time goes, and end."""
        if self._thread.is_alive() and self.flush(wait_seconds):
            self._jobs.put(None)
            self._thread.join(wait_seconds)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=BATCH_SECONDS)
            except queue.Empty:
                job = self._write_ended
            if job is None:
                return
            try:
                job()
                if self._is_batch_due():
                    self._write_ended()
            except OSError as error:
                self._lose(f"samples cannot be written: {error.strerror or error}")
            except Exception:
                # Whatever it is, samples are for looking at: neither training nor grading fails for them.
                log.exception("samples could not be written")
                self._lose("samples cannot be written: see the log")

    def _is_batch_due(self) -> bool:
        with self._lock:
            is_old = time.monotonic() - self._ended_since > BATCH_SECONDS
            return bool(self._ended) and (is_old or len(self._ended) >= BATCH_GROUPS)

    def _write_ended(self) -> None:
        with self._lock:
            groups, self._ended = self._ended, []
        if not groups:
            return
        self._number += 1
        version = newest_version(groups)
        name = ended_name(version, self._writer, self._number)
        self._write(lambda: SampleFile(name, groups, None, version))

    def _write(self, make: Make) -> None:
        self.written_bytes += self._folder.write(make())
        if self._problem is not None:
            self._problem = None
            log.info("samples can be written again")
            self._on_problem(None)

    def _lose(self, problem: str) -> None:
        self.lost_files += 1
        if problem != self._problem:
            self._problem = problem
            log.warning("samples are left out", extra={"reason": problem})
            self._on_problem(problem)
