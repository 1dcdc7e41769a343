"""``runs/<name>``: what ``flotilla run`` keeps of one run, and to whom it belongs.

A directory belongs to one process at a time, which holds its lock. One that holds a run already is never taken for
another silently: the user chooses to continue with it, or to move it aside.
"""

import fcntl
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from flotilla.shared.checkpoints.folders import CHECKPOINTS, complete
from flotilla.shared.errors import Conflict, NotFound

LOCK_FILE = "lock"
RUN_FILE = "run.json"
FLEET = "fleet"
LEFT = frozenset({LOCK_FILE, FLEET, f"{RUN_FILE}.tmp", "plot.png", "summary.tmp"})
"""What a run that ended before its experiment was created may have left."""
MAX_NAMED = 3


class RunDirectory:
    """The directory of one run.

    Args:
        root: of all runs.
        name: the directory's; ``fresh`` may take ``<name>-2`` and so on while another run uses that.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._lock: IO[str] | None = None
        self.path = root / name

    def take(self) -> Path:
        """Take the directory for a new run.

        Raises:
            Conflict: another process uses it, it holds a run already, or files that are no run's.
        """
        if not self._try_lock(self.path):
            raise Conflict(f"{self.path} is in use by another run: give this one a name of its own with --name")
        if self.holds_run:
            found = self.experiment_id
            what = f"the run {found}" if found else "an earlier run"
            self.release()
            raise Conflict(
                f"{self.path} holds {what} already: add --continue to go on with it, --fresh to move it to "
                f"{self._root / 'earlier'} and begin again, or --name NAME to begin another beside it"
            )
        self._refuse_others_files()
        self._move_aside()
        return self.path

    def take_fresh(self) -> Path:
        """Take the first directory that no other process uses, for a new run; an earlier run is moved aside.

        Raises:
            Conflict: all of them are in use, or one holds files that are no run's.
        """
        for number in range(1, 1000):
            path = self._root / (self._name if number == 1 else f"{self._name}-{number}")
            if self._try_lock(path):
                self.path = path
                self._refuse_others_files()
                self._move_aside()
                return path
        raise Conflict(f"every directory from {self._root / self._name} to -999 is in use")

    def reopen(self) -> Path:
        """Take the directory to continue with the run that it holds.

        Raises:
            NotFound: there is no such directory.
            Conflict: another process uses it.
        """
        if not self.path.is_dir():
            raise NotFound(f"there is no run in {self.path}: leave --continue out to begin one")
        if not self._try_lock(self.path):
            raise Conflict(f"{self.path} is in use: another process runs it, or goes on with it, now")
        return self.path

    @property
    def holds_run(self) -> bool:
        """Whether an experiment was created here, or may have been when a crash came."""
        experiments = self.path / FLEET / "experiments"
        has_experiment = experiments.is_dir() and any(experiments.iterdir())
        return has_experiment or (self.path / RUN_FILE).exists() or (self.path / "summary.json").exists()

    @property
    def experiment_id(self) -> str | None:
        """The run's experiment; None if it was not recorded."""
        try:
            found = json.loads((self.path / RUN_FILE).read_text(encoding="utf-8"))["experiment_id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return str(found)

    def record(self, experiment_id: str) -> None:
        """Remember which experiment is the run's."""
        temporary = self.path / f"{RUN_FILE}.tmp"
        temporary.write_text(json.dumps({"experiment_id": experiment_id}) + "\n", encoding="utf-8")
        temporary.replace(self.path / RUN_FILE)

    def durable_step(self) -> int:
        """Find the step of the newest complete checkpoint; 0 without one."""
        directory = self.path / FLEET / "experiments" / (self.experiment_id or "-") / CHECKPOINTS
        newest = next(complete(directory), None)
        return 0 if newest is None else newest.step

    def release(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try_lock(self, path: Path) -> bool:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / LOCK_FILE).open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        return True

    def _refuse_others_files(self) -> None:
        """A directory that is no run's belongs to the user: nothing in it is moved."""
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in LEFT)
        if self.holds_run or not others:
            return
        self.release()
        lock = self.path / LOCK_FILE
        if lock.stat().st_size == 0:  # it was made to look
            lock.unlink()
        more = ", ..." if len(others) > MAX_NAMED else ""
        raise Conflict(
            f"{self.path} holds files that are no run's ({', '.join(others[:MAX_NAMED])}{more}): give this run another "
            "directory with --name NAME or --runs DIRECTORY"
        )

    def _move_aside(self) -> None:
        earlier = [entry for entry in self.path.iterdir() if entry.name != LOCK_FILE]
        if not earlier:
            return
        made = datetime.fromtimestamp(max(entry.stat().st_mtime for entry in earlier), tz=UTC)
        aside = self._root / "earlier" / f"{self.path.name}-{made:%Y%m%d-%H%M%S-%f}"
        aside.mkdir(parents=True)
        for entry in earlier:
            entry.rename(aside / entry.name)
