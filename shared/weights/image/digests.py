"""Digests of weights by their values, whatever their layout in memory: what was published against what is served.

A tensor is rows, and a row is words of 64 bits. The digest is the sum, modulo 2^64, of all words, each multiplied by an
odd number of its place in the row and one of its row. A product loses the upper bits of a word, so its upper half is
mixed into the lower one first. Then one changed bit always changes it, rows or elements in another order do, and a
matrix whose rows lie elsewhere (fused, interleaved) is digested by the sums of its rows, in place. It finds faults, no
forgeries.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]

WORD_BYTES = 8
MIXED_BITS = 29
"""Not half a word: the signs of two elements would cancel each other."""
AT_ONCE_BYTES = 1 << 20
"""What is copied at a time, so that it stays in the caches."""
ON_DEVICE_BYTES = 64 << 20
_ROWS_BEGIN = 1 << 32
"""The multipliers of rows begin here, those of places in a row at 0."""


@lru_cache(maxsize=64)
def multipliers(first: int, count: int) -> Words:
    """Make odd numbers of places ``first`` and on: [count].

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(first + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Words = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    found.flags.writeable = False
    return found


def as_rows(tensor: Tensor) -> Tensor:
    """View a tensor as the rows that it is digested by: [rows, elements]; one of one dimension is rows of one."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def row_sums(rows: Tensor) -> Words:
    """Sum the words of each row, the last one filled up with zeros: [rows].

    Args:
        rows: [rows, elements], on any device; each row contiguous is fastest.
    """
    if rows.device.type != "cpu":
        return _read(_device_sums(rows))
    num, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    if not num or not row_bytes:
        return np.zeros(num, np.uint64)
    places = multipliers(0, -(-row_bytes // WORD_BYTES))
    step = max(1, AT_ONCE_BYTES // row_bytes)
    return np.concatenate([_sums_here(_filled(rows[at : at + step]), places) for at in range(0, num, step)])


def sums_of_all(parts: Sequence[Tensor]) -> list[Words]:
    """Sum the rows of several tensors [rows, elements]; a device computes them all before one is read from it."""
    if all(each.device.type == "cpu" for each in parts):
        return [row_sums(each) for each in parts]
    return _device_sums_of_all(parts)


def _device_sums_of_all(parts: Sequence[Tensor]) -> list[Words]:
    """Compute on the device; rows of one element, which are many small tensors, as one tensor."""
    alike: dict[object, list[int]] = defaultdict(list)
    for number, each in enumerate(parts):
        alike[each.dtype if each.shape[1] == 1 else number].append(number)
    sums = [
        _device_sums(parts[which[0]] if len(which) == 1 else torch.cat([parts[each] for each in which]))
        for which in alike.values()
    ]
    order = [number for which in alike.values() for number in which]
    ends = np.cumsum([parts[number].shape[0] for number in order])
    found = np.split(_read(torch.cat(sums)), ends[:-1])
    return [each for _, each in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _filled(rows: Tensor) -> Tensor:
    """View or copy rows as bytes, each filled up to whole words."""
    flat = rows.detach().contiguous().view(torch.uint8)
    missing = -flat.shape[1] % WORD_BYTES
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _sums_here(filled: Tensor, places: Words) -> Words:
    words: Words = filled.numpy().view(np.uint64)
    mixed = words >> np.uint64(MIXED_BITS)
    mixed ^= words
    # Of whole numbers einsum is faster than a matrix product.
    found: Words = np.einsum("rk,k->r", mixed, places)
    return found


def _device_sums(rows: Tensor) -> Tensor:
    """Sum the words of each row by torch, modulo 2^64 as numbers with a sign: [rows] int64, on the rows' device."""
    num, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    if not num or not row_bytes:
        return torch.zeros(num, dtype=torch.int64, device=rows.device)
    places = _places_on(rows.device, -(-row_bytes // WORD_BYTES))
    step, found = max(1, ON_DEVICE_BYTES // row_bytes), []
    for at in range(0, num, step):
        words = _filled(rows[at : at + step]).view(torch.int64)
        mixed = words >> MIXED_BITS
        # The shift of a number with a sign fills up with it.
        mixed.bitwise_and_((1 << (64 - MIXED_BITS)) - 1).bitwise_xor_(words).mul_(places)
        found.append(mixed.sum(1))
    return found[0] if len(found) == 1 else torch.cat(found)


@lru_cache(maxsize=64)
def _places_on(device: torch.device, count: int) -> Tensor:
    return torch.from_numpy(multipliers(0, count).view(np.int64).copy()).to(device)


def _read(sums: Tensor) -> Words:
    found: Words = sums.cpu().numpy().view(np.uint64)
    return found


def of_sums(sums: Words) -> int:
    """Make a tensor's digest of the sums of its rows, in the tensor's order."""
    return int(sums @ multipliers(_ROWS_BEGIN, sums.shape[0])) if sums.size else 0


def of_tensor(tensor: Tensor) -> int:
    """Digest a tensor."""
    return of_sums(row_sums(as_rows(tensor)))


def combined(digests: Mapping[str, int]) -> str:
    """Make one digest, 32 hexadecimal digits, of those of all tensors by name."""
    lines = "".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests))
    return sha256(lines.encode()).hexdigest()[:32]


def in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor as an engine that computes in ``dtype`` holds it; None: as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.dtype.is_floating_point else tensor


def of_image(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> str:
    """Make the digest that an engine reports which serves these weights.

    Args:
        tensors: of an image, by name.
        dtype: that the engine computes in; None: that of the image.
    """
    return combined({name: of_tensor(in_dtype(tensor, dtype)) for name, tensor in tensors.items()})
