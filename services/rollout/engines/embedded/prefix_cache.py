"""What was computed of earlier turns, so that a next turn computes only what is new; pure but for what it holds.

An entry is the KV of the tokens that a finished sample saw, all under the version that serves: new weights empty the
cache. A prompt takes what it has in common with the entry that begins most like it, token for token, be it a part of
that entry. Entries that were used longest ago make room.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.decoders.base import Decoder, KeptRow
from flotilla.services.rollout.engines.embedded.batch import Batch, Rows

BLOCK_TOKENS = 16
"""Beginnings are looked up at multiples of this; less in common than one of them is not worth a copy."""

Kept = TypeVar("Kept")
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[Kept]):
    """KV of a sequence.

    Attributes:
        token_ids: [N] int64.
        kept: the KV of them all.
        num_bytes: what it takes.
    """

    token_ids: TokenIds
    kept: Kept
    num_bytes: int


class PrefixCache(Generic[Kept]):
    """Entries, at most ``max_bytes`` of them together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[int, Entry[Kept]] = OrderedDict()
        self._beginnings: dict[int, int] = {}
        """The newest entry that begins with some whole blocks, by their hash."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all entries."""
        return self._num_bytes

    def has_room_for(self, num_bytes: int) -> bool:
        """Return whether an entry of this size can be kept, if others make room."""
        return 0 < num_bytes <= self._max_bytes

    def add(self, entry: Entry[Kept]) -> None:
        """Keep an entry; one that it continues is not needed any more."""
        if not self.has_room_for(entry.num_bytes):
            return
        found = self._find(entry.token_ids)
        if found is not None:
            number, common = found
            if common == entry.token_ids.size:  # Another entry begins with it.
                self._entries.move_to_end(number)
                return
            if common == self._entries[number].token_ids.size:
                self._drop(number)
        while self._num_bytes + entry.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
        number, self._next = self._next, self._next + 1
        self._entries[number] = entry
        self._num_bytes += entry.num_bytes
        for _, beginning in _beginnings(entry.token_ids):
            self._beginnings[beginning] = number

    def find(self, token_ids: TokenIds) -> tuple[Kept, int] | None:
        """Find what was computed of the beginning of a sequence, but never of its last token.

        Returns:
            KV, and how many of its first tokens are those of the sequence.
        """
        found = self._find(token_ids[:-1]) if self._entries else None
        if found is None:
            return None
        self._entries.move_to_end(found[0])
        return self._entries[found[0]].kept, found[1]

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._beginnings.clear()
        self._num_bytes = 0

    def _find(self, token_ids: TokenIds) -> tuple[int, int] | None:
        for _, beginning in reversed(list(_beginnings(token_ids))):
            number = self._beginnings.get(beginning)
            if number is not None:
                common = _common(self._entries[number].token_ids, token_ids)
                if common >= BLOCK_TOKENS:  # Less: another beginning with the same hash.
                    return number, common
        return None

    def _drop(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._num_bytes -= entry.num_bytes
        for _, beginning in _beginnings(entry.token_ids):
            if self._beginnings.get(beginning) == number:
                del self._beginnings[beginning]


def _beginnings(token_ids: TokenIds) -> Iterator[tuple[int, int]]:
    """Hash the first block, the first two, and so on: (tokens, hash)."""
    told = 0
    for end in range(BLOCK_TOKENS, token_ids.size + 1, BLOCK_TOKENS):
        told = hash((told, token_ids[end - BLOCK_TOKENS : end].tobytes()))
        yield end, told


def _common(one: TokenIds, other: TokenIds) -> int:
    """Count the tokens that two sequences begin with alike."""
    num = min(one.size, other.size)
    differing = np.flatnonzero(one[:num] != other[:num])
    return int(differing[0]) if differing.size else num


def names_of(tokens: Rows, images: Sequence[PromptImage]) -> TokenIds:
    """Map tokens to keys: those of an image by its content and their place in it, below all ids."""
    if not images:
        return tokens
    named = tokens.copy()
    for image in images:
        content = int.from_bytes(hashlib.blake2b(image.data, digest_size=8).digest(), "big") >> 2
        named[image.start : image.end] = -1 - content - np.arange(image.num_tokens)
    return named


class KeptTurns:
    """What is kept of finished turns, and how much was saved by it.

    Args:
        decoder: whose rows they were.
        max_bytes: the most that is kept.
    """

    def __init__(self, decoder: Decoder, max_bytes: int) -> None:
        self._decoder = decoder
        self._cache = PrefixCache[KeptRow](max_bytes)
        self.reused_tokens = 0
        """Prompt tokens that were not computed again."""
        self.reuses = 0
        """Prompts that began with such."""

    @property
    def num_bytes(self) -> int:
        """Count the bytes of what is kept."""
        return self._cache.num_bytes

    def clear(self) -> None:
        """Forget all of it: other weights serve, or none."""
        self._cache.clear()

    def kept_of(self, tokens: Rows) -> tuple[KeptRow, int] | None:
        """Find what was computed of the beginning of a prompt; see ``PrefixCache.find``."""
        found = self._cache.find(tokens)
        if found is not None:
            self.reused_tokens += found[1]
            self.reuses += 1
        return found

    def keep(self, batch: Batch, rows: Rows, version: int) -> None:
        """Keep the KV of samples that have ended and may continue in a next turn, if ``version`` computed all of it."""
        for row in rows[batch.kv_versions[rows] == version].tolist():
            sample = batch.samples[row]
            assert sample is not None
            if not sample.owner.request.is_turn or sample.owner.request.adapter is not None:
                continue
            tokens = batch.cached_tokens(row)
            num_bytes = self._decoder.kept_bytes(tokens.size)
            if not self._cache.has_room_for(num_bytes):
                continue
            kept = self._decoder.keep(row, tokens.size)
            if kept is not None:
                self._cache.add(Entry(names_of(tokens, batch.images_of(row)), kept, num_bytes))
