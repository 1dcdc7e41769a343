"""Downloads a checkpoint's model through the gateway: resumed where it broke off, checked by its checksums."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from flotilla.shared.checkpoints.folders import MODEL, CheckpointState, checksum, state_of
from flotilla.shared.errors import FlotillaError, ModelError, Unavailable
from flotilla.shared.schemas.experiment import CheckpointFile, CheckpointView

PART = ".part"
ABSENCE_SECONDS = 120.0
"""How long a gateway may be absent before a download fails."""
RETRY_SECONDS = 1.0

OpenFile = Callable[[str, int], AsyncGenerator[bytes, None]]
"""Reads a file from an offset in bytes on."""


def local_model(checkpoint: CheckpointView, experiment_id: str) -> Path | None:
    """Find the checkpoint's model on this machine; None where it is not, or is another one of the same path."""
    path = Path(checkpoint.path)
    try:
        state: CheckpointState | None = state_of(path)
    except ModelError:
        return None  # of a newer release, whose gateway can be asked for it
    if state is None or (state.experiment_id, state.step) != (experiment_id, checkpoint.step):
        return None
    return path / MODEL


async def download(files: list[CheckpointFile], directory: Path, open_file: OpenFile) -> Path:
    """Download the files below ``model/`` into a directory; what is there already and is right stays.

    Raises:
        NotFound: the checkpoint has been removed meanwhile.
        Unavailable: the gateway stayed away, or a file keeps coming with another checksum.
    """
    prefix = f"{MODEL}/"
    for file in files:
        if file.name.startswith(prefix):
            await _download(file, directory / file.name.removeprefix(prefix), open_file)
    return directory


async def _download(file: CheckpointFile, path: Path, open_file: OpenFile) -> None:
    if await asyncio.to_thread(_is_right, path, file):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + PART)
    for _ in range(2):
        await _fill(file, part, open_file)
        if await asyncio.to_thread(_is_right, part, file):
            part.replace(path)
            return
        # What an earlier download left may have been of another file.
        part.unlink(missing_ok=True)
    raise Unavailable(f"{file.name} came twice with another checksum than {file.checksum}: its disk may be damaged")


async def _fill(file: CheckpointFile, part: Path, open_file: OpenFile) -> None:
    """Append to what is there until all of it is."""
    last = time.monotonic()
    while (have := _begun(part)) < file.size_bytes:
        try:
            async with contextlib.aclosing(open_file(file.name, have)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(_append, part, chunk)
                    last = time.monotonic()
        except FlotillaError as error:
            if not error.retryable:
                raise
        if time.monotonic() - last > ABSENCE_SECONDS:
            raise Unavailable(f"{file.name}: nothing came for {ABSENCE_SECONDS:.0f} s; fetch it again to go on with it")
        if _begun(part) < file.size_bytes:
            await asyncio.sleep(RETRY_SECONDS)


def _begun(part: Path) -> int:
    """Make the file, if it is not there, and return its size in bytes."""
    part.touch()
    return part.stat().st_size


def _append(part: Path, chunk: bytes) -> None:
    with part.open("ab") as output:
        output.write(chunk)


def _is_right(path: Path, file: CheckpointFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    return not file.checksum or checksum(path) == file.checksum
