"""A checkpoint at a URL, brought to the disk and checked, for an experiment that begins from it."""

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from flotilla.services.gateway.uploads.remote import RemoteCheckpoints
from flotilla.shared.checkpoints.folders import StoredCheckpoint, check_files, step_of
from flotilla.shared.errors import FlotillaError, ModelError, Unavailable
from flotilla.shared.net.absence import absent_or

FIELD = "checkpoint.resume_from"


def fetch(url: str, step: int | None, directory: Path, moved: Callable[[], None] = lambda: None) -> StoredCheckpoint:
    """Download the checkpoint of a step, or the newest one; blocks.

    Args:
        url: of a folder of checkpoints, or of one checkpoint.
        step: None for the newest.
        directory: to be made; removed where this fails.
        moved: called whenever some bytes came.

    Raises:
        InvalidSpec: nothing that is installed reaches the URL.
        ModelError: there is none, it cannot be read, or it is damaged.
        Unavailable: the disk is full.
    """
    root, _, last = url.rstrip("/").rpartition("/")
    own = step_of(last)
    if own is not None:
        if step not in {None, own}:
            raise ModelError(f"{FIELD}: {url} is not the folder of step {step}")
        url, step = root, own
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        try:
            remote = RemoteCheckpoints(url, moved)
            steps = remote.steps()
            if not steps or (step is not None and step not in steps):
                there = ", ".join(map(str, steps)) or "none"
                wanted = "checkpoint" if step is None else f"whole checkpoint of step {step}"
                raise ModelError(f"{FIELD}: there is no {wanted} at {url}; steps that are there: {there}")
            stored = remote.download(steps[-1] if step is None else step, directory)
        except FlotillaError:
            raise
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise Unavailable(
                    f"{FIELD}: the disk of {directory.parent} is full, so the checkpoint at {url} could not be taken"
                ) from error
            raise _unread(url, error) from error
        except Exception as error:  # each protocol's package raises errors of its own
            raise _unread(url, error) from error
        check_files(stored, moved)
        stack.pop_all()
    return stored


def _unread(url: str, error: Exception) -> FlotillaError:
    return absent_or(error, ModelError(f"{FIELD}: {url} cannot be read: {type(error).__name__}: {error}"))
