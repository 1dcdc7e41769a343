"""What changed between two versions: the blocks that differ, and which they are, in one patch of few bytes.

    uint64 number of changed blocks | bitmap, one bit per block | the changed blocks, the last one maybe shorter

A patch is made by exact comparison of two images and applied to a copy of the first, so the result is the second one
bit by bit; its checksum is that of the whole new image, and nothing is served unless it is right.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from flotilla.shared.errors import WeightTransferFailed

_COUNT_BYTES = 8
_CHUNK_BLOCKS = 64
"""Blocks that are compared or copied at once: few enough to stay in the processor's cache."""

Bytes = npt.NDArray[np.uint8]
Buffer = memoryview | bytes | bytearray


def changed_blocks(base: Buffer, image: Buffer, block_bytes: int) -> npt.NDArray[np.bool_]:
    """Compare two images block by block: [ceil(N / block_bytes)] bool, True where they differ.

    Args:
        base, image: of the same size N.
        block_bytes: a multiple of 8.

    Raises:
        ValueError: the sizes differ.
    """
    if len(base) != len(image):
        raise ValueError(f"images of {len(base)} and {len(image)} bytes are not versions of each other")
    num_whole = len(image) // block_bytes
    changed = np.zeros(-(-len(image) // block_bytes), dtype=np.bool_)
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(image, np.uint8)
    for start in range(0, num_whole, _CHUNK_BLOCKS):
        stop = min(start + _CHUNK_BLOCKS, num_whole)
        span = slice(start * block_bytes, stop * block_bytes)
        differs = old[span].view(np.uint64) != new[span].view(np.uint64)
        changed[start:stop] = differs.reshape(stop - start, -1).any(axis=1)
    if num_whole < changed.size:
        changed[-1] = bool((old[num_whole * block_bytes :] != new[num_whole * block_bytes :]).any())
    return changed


def patch_bytes(changed: npt.NDArray[np.bool_], image_bytes: int, block_bytes: int) -> int:
    """Count the bytes of a patch."""
    last = image_bytes - (changed.size - 1) * block_bytes
    missing = block_bytes - last if changed[-1] else 0
    return _COUNT_BYTES + -(-changed.size // 8) + int(changed.sum()) * block_bytes - missing


def write_patch(patch: memoryview, image: Buffer, changed: npt.NDArray[np.bool_], block_bytes: int) -> None:
    """Write the patch that makes ``image`` of its base; ``patch`` has the size that ``patch_bytes`` says."""
    bitmap = np.packbits(changed).tobytes()
    patch[:_COUNT_BYTES] = int(changed.sum()).to_bytes(_COUNT_BYTES, "little")
    start = _COUNT_BYTES + len(bitmap)
    patch[_COUNT_BYTES:start] = bitmap
    blocks, new = np.frombuffer(patch, np.uint8)[start:], np.frombuffer(image, np.uint8)
    offset = 0
    for first, stop in _runs(changed):
        piece = new[first * block_bytes : stop * block_bytes]
        blocks[offset : offset + piece.size] = piece
        offset += piece.size


def apply_patch(patch: Buffer, base: Buffer, image: memoryview, block_bytes: int) -> str:
    """Make the new image of its base and the patch, in one pass.

    Args:
        patch: as ``write_patch`` wrote it.
        base: the image that the patch was made against.
        image: of the same size; written to.
        block_bytes: as it was written with.

    Returns:
        xxh3-64 of the new image, to hold against the manifest.

    Raises:
        WeightTransferFailed: the patch is not one for an image of this size.
    """
    num_blocks = -(-len(image) // block_bytes)
    start = _COUNT_BYTES + -(-num_blocks // 8)
    count = int.from_bytes(patch[:_COUNT_BYTES], "little")
    bitmap = np.frombuffer(patch, np.uint8)[_COUNT_BYTES:start]
    changed = np.unpackbits(bitmap)[:num_blocks].astype(np.bool_)
    is_whole = changed.size == num_blocks and int(changed.sum()) == count
    if len(base) != len(image) or not is_whole or patch_bytes(changed, len(image), block_bytes) != len(patch):
        raise WeightTransferFailed(f"a patch of {len(patch)} bytes does not fit an image of {len(image)}")
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(image, np.uint8)
    blocks = np.frombuffer(patch, np.uint8)[start:]
    digest = xxhash.xxh3_64()
    offset = 0
    for first, stop, is_changed in _all_runs(changed):
        piece = new[first * block_bytes : stop * block_bytes]
        if is_changed:
            piece[:] = blocks[offset : offset + piece.size]
            offset += piece.size
        else:
            piece[:] = old[first * block_bytes : stop * block_bytes]
        digest.update(piece.data)
    return digest.hexdigest()


def _runs(changed: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    return ((first, stop) for first, stop, is_changed in _all_runs(changed) if is_changed)


def _all_runs(changed: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Cut the blocks into runs of the same kind, none longer than what stays in the cache."""
    edges = np.flatnonzero(np.diff(changed)) + 1
    bounds = [0, *edges.tolist(), changed.size]
    for begin, end in pairwise(bounds):
        for first in range(begin, end, _CHUNK_BLOCKS):
            yield first, min(first + _CHUNK_BLOCKS, end), bool(changed[begin])
