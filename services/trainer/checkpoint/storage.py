"""Where checkpoints lie: one directory each, whole or not there at all.

A checkpoint is written beside its place under a name that no reader accepts, every file is flushed to the disk, and
then the directory is renamed. What a crash leaves behind is removed at the next start.
"""

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from services.trainer.checkpoint.state import CheckpointState
from shared.errors import Unavailable
from shared.faults.armed import armed
from shared.faults.sites import Site

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
_COMPLETE = re.compile(r"step-(\d{8})")
_PARTIAL = re.compile(r"\.step-\d{8}\..+")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: CheckpointState


class CheckpointStorage:
    """The checkpoints of one experiment.

    Args:
        directory: of all of them; made when the first one is written.
        keep: newest checkpoints that stay.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = directory
        self._keep = keep

    def write(
        self, step: int, fill: Callable[[Path], None], describe: Callable[[dict[str, int]], CheckpointState]
    ) -> Path:
        """Write a checkpoint; when this returns, it survives a power cut.

        Args:
            step: its number.
            fill: writes the files into the directory that it is given.
            describe: makes the state from the sizes of those files.

        Raises:
            Unavailable: the disk is full or not writable; nothing of the checkpoint remains.
        """
        final = self.directory / f"step-{step:08d}"
        partial = self.directory / f".{final.name}.{secrets.token_hex(4)}"
        try:
            partial.mkdir(parents=True)
            fill(partial)
            if (faults := armed()) is not None:
                faults.hit(Site.CHECKPOINT_WRITE)
            state = describe(_sizes(partial))
            (partial / STATE_FILE).write_text(state.model_dump_json(indent=1), encoding="utf-8")
            _flush(partial)
            self._move(partial, final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise Unavailable(
                f"checkpoint of step {step} could not be written: {_cause(error, self.directory)}"
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune()
        return final

    def newest(self) -> StoredCheckpoint | None:
        """Find the newest complete checkpoint; incomplete ones are named in the log and passed over."""
        for step, path in sorted(self._steps(), reverse=True):
            state = _read_state(path)
            if state is not None and state.step == step:
                return StoredCheckpoint(step, path, state)
            log.warning("checkpoint is not complete, it is passed over", extra={"path": str(path)})
        return None

    def sweep(self) -> None:
        """Remove what interrupted writes left behind."""
        if self.directory.is_dir():
            for path in self.directory.iterdir():
                if _PARTIAL.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _steps(self) -> list[tuple[int, Path]]:
        if not self.directory.is_dir():
            return []
        matches = [(path, _COMPLETE.fullmatch(path.name)) for path in self.directory.iterdir()]
        return [(int(match.group(1)), path) for path, match in matches if match]

    def _move(self, partial: Path, final: Path) -> None:
        replaced = None
        if final.exists():
            # A checkpoint of this step was passed over, or an older one was chosen to go on from.
            replaced = final.rename(self.directory / f".{final.name}.{secrets.token_hex(4)}")
        partial.rename(final)
        _flush_entry(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        for _, path in sorted(self._steps())[: -self._keep]:
            # Renamed first: a removal that is interrupted must not leave something that looks complete.
            try:
                doomed = path.rename(self.directory / f".{path.name}.{secrets.token_hex(4)}")
            except OSError as error:
                log.warning("old checkpoint could not be removed", extra={"path": str(path), "error": repr(error)})
                continue
            shutil.rmtree(doomed, ignore_errors=True)


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _read_state(path: Path) -> CheckpointState | None:
    try:
        state = CheckpointState.model_validate_json((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    found = _sizes(path)
    return state if all(found.get(name) == size for name, size in state.files.items()) else None


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        _flush_entry(path)
    _flush_entry(directory)


def _flush_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: OSError, directory: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk of {directory} is full"
    return f"{error.filename or directory}: {error.strerror or error}"
