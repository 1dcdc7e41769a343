"""The KV of finished turns, between the decoder that computed it and the cache that finds it again."""

from flotilla.services.rollout.engines.decoders.base import Decoder, KeptRow
from flotilla.services.rollout.engines.embedded.batch import Batch, Rows
from flotilla.services.rollout.engines.embedded.prefix_cache import Entry, PrefixCache


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
        """Keep the KV of samples that have ended and may go on in a next turn, if ``version`` computed all of it."""
        for row in rows[batch.kv_versions[rows] == version].tolist():
            sample = batch.samples[row]
            assert sample is not None
            if not sample.owner.request.is_turn:
                continue
            tokens = batch.cached_tokens(row)
            num_bytes = self._decoder.kept_bytes(tokens.size)
            if not self._cache.has_room_for(num_bytes):
                continue
            kept = self._decoder.keep(row, tokens.size)
            if kept is not None:
                self._cache.add(Entry(tokens, kept, num_bytes))
