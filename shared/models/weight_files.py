"""The files of a model's weights: which they are, what they hold, and a checksum of all of them."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import xxhash

from flotilla.shared.errors import ModelError
from flotilla.shared.net.absence import absent_or
from flotilla.shared.weights.image.layout import read_layout

CHUNK_BYTES = 1 << 22


def safetensors_files(directory: Path) -> list[Path]:
    """List the files that hold the weights, sharded or not.

    Raises:
        ModelError: there are none, or a shard that the index names is missing.
    """
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"model directory {directory} has neither model.safetensors nor model.safetensors.index.json")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [directory / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise absent_or(error, ModelError(f"{index} cannot be read: {error!r}")) from error
    for file in files:
        if not file.is_file():
            raise ModelError(f"shard {file.name} of {directory} is missing")
    return files


def shapes_in(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors by name.

    Raises:
        WeightTransferFailed: a file is missing, or no safetensors file.
    """
    return {spec.name: spec.shape for file in files for spec in read_layout(file).tensors}


def checksum_of(files: Sequence[Path]) -> str:
    """Compute xxh3-64 of the contents of all files in their order; those that have not changed are read once.

    Raises:
        ModelError: one cannot be read.
    """
    try:
        stats = [file.stat() for file in files]
        return _checksum(tuple((str(f), s.st_size, s.st_mtime_ns) for f, s in zip(files, stats, strict=True)))
    except OSError as error:
        raise absent_or(error, ModelError(f"the model's files cannot be read: {error}")) from error


@functools.lru_cache(maxsize=8)
def _checksum(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = xxhash.xxh3_64()
    chunk = bytearray(CHUNK_BYTES)
    view = memoryview(chunk)
    for path, _, _ in files:
        with Path(path).open("rb", buffering=0) as file:
            while count := file.readinto(chunk):
                digest.update(view[:count])
    return digest.hexdigest()
