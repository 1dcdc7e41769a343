"""Where checkpoints lie: one directory each, whole or not there at all.

A checkpoint is written beside its place under a name that no reader accepts, every file is flushed to the disk, and
then the directory is renamed. What a crash leaves behind is removed at the next start; a checkpoint that another one of
its step was about to replace gets its place back.
"""

import contextlib
import errno
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from flotilla.shared.checkpoints.folders import (
    STATE_FILE,
    CheckpointState,
    StoredCheckpoint,
    checksum,
    complete,
    folders,
    sizes,
    state_of,
)
from flotilla.shared.config.sections.checkpoint import BestCheckpointsConfig
from flotilla.shared.errors import ModelError, Unavailable
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.files.durable import flush

log = logging.getLogger(__name__)

_PARTIAL = re.compile(r"\.(step-\d{8})\.(.+)")
_REPLACED = "replaced-"


class CheckpointStorage:
    """The checkpoints of one experiment.

    Args:
        directory: of all of them; made when the first one is written.
        keep: newest checkpoints that stay.
        best: which others stay; None for none.
    """

    def __init__(self, directory: Path, *, keep: int, best: BestCheckpointsConfig | None = None) -> None:
        self.directory = directory
        self._keep, self._best = keep, best

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
        partial = self._hidden(final)
        try:
            partial.mkdir(parents=True)
            fill(partial)
            if (faults := armed()) is not None:
                faults.hit(Site.CHECKPOINT_WRITE)
            files = sizes(partial)
            checksums = {name: checksum(partial / name) for name in files}
            state = describe(files).model_copy(update={"checksums": checksums})
            (partial / STATE_FILE).write_text(state.to_text(), encoding="utf-8")
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

    def complete(self) -> Iterator[StoredCheckpoint]:
        """Go through the complete checkpoints, newest first; errors as of ``folders.complete``."""
        return complete(self.directory)

    def set_aside(self, after_step: int) -> None:
        """Rename the checkpoints after a step, which cannot be used: they count as kept no more, and stay."""
        for step, path in folders(self.directory):
            if step > after_step:
                aside = path.rename(self.directory / f"{path.name}.damaged-{secrets.token_hex(4)}")
                log.warning("a checkpoint cannot be used, it is set aside", extra={"path": str(aside)})

    def sweep(self) -> None:
        """Remove what interrupted writes left behind, and give back what one was about to replace."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            match = _PARTIAL.fullmatch(path.name)
            if match is None:
                continue
            final = self.directory / match.group(1)
            if match.group(2).startswith(_REPLACED) and not final.exists():
                path.rename(final)
                log.warning("a checkpoint that was to be replaced is back", extra={"path": str(final)})
                continue
            # Renamed first: a trainer taken for dead may still be writing into it. Its next file has no
            # place then, where half a folder that is removed beside it could become a checkpoint without its weights.
            try:
                doomed = path.rename(self._hidden(final))
            except FileNotFoundError:
                continue  # it has just become whole
            shutil.rmtree(doomed, ignore_errors=True)

    def _hidden(self, final: Path, kind: str = "") -> Path:
        return self.directory / f".{final.name}.{kind}{secrets.token_hex(4)}"

    def _move(self, partial: Path, final: Path) -> None:
        replaced = None
        if final.exists():
            # A checkpoint of this step was passed over, or an older one was chosen to continue from.
            replaced = final.rename(self._hidden(final, _REPLACED))
        try:
            partial.rename(final)
        except OSError:
            if replaced is not None:
                replaced.rename(final)
            raise
        flush(self.directory)
        # The folder of all of them, and the experiment's, may be as new as this one.
        with contextlib.suppress(PermissionError):
            for folder in list(self.directory.parents)[:2]:
                flush(folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _best_of(self, paths: Sequence[Path]) -> set[Path]:
        if self._best is None:
            return set()
        figures = ((path, _figure_of(path)) for path in paths)
        return best_of({path: figure for path, figure in figures if figure is not None}, self._best)

    def _prune(self) -> None:
        older = folders(self.directory)[: -self._keep]
        for path in {path for _, path in older} - self._best_of([path for _, path in older]):
            # Renamed first: a removal that is interrupted must not leave something that looks complete.
            try:
                doomed = path.rename(self._hidden(path))
            except OSError as error:
                log.warning("old checkpoint could not be removed", extra={"path": str(path), "error": repr(error)})
                continue
            shutil.rmtree(doomed, ignore_errors=True)


def _figure_of(path: Path) -> float | None:
    try:
        state = state_of(path)
    except ModelError:
        return None  # a newer release wrote it: it is kept as long as the newest are
    return None if state is None else state.figure


def best_of(figures: Mapping[Path, float], config: BestCheckpointsConfig) -> set[Path]:
    """Choose the checkpoints that are best by their figures; of equal ones the newer."""
    sign = 1 if config.mode == "max" else -1
    ordered = sorted(figures, key=lambda path: (sign * figures[path], path.name), reverse=True)
    return set(ordered[: config.keep])


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        flush(path)
    flush(directory)


def _cause(error: OSError, directory: Path) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk of {directory} is full"
    return f"{error.filename or directory}: {error.strerror or error}"
