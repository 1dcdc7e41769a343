"""Which ranges of an image are still missing, and which are on their way: bookkeeping without a byte of them."""

from collections import deque

RANGE_BYTES = 64 << 20
"""What one connection fetches at a time: as much as a source that breaks off or lies about its speed can hold up."""


class MissingRanges:
    """Ranges to fetch, first ones first; what a source left of one comes before all others.

    Until the size is known only the beginning can be fetched, by one at a time.
    """

    def __init__(self) -> None:
        self._open = deque([range(RANGE_BYTES)])
        self._taken: list[range] = []
        self.size: int | None = None

    def learn(self, size: int) -> None:
        """Note how many bytes the image has; called once, while the beginning is being fetched."""
        self.size = size
        self._open.extend(
            range(start, min(start + RANGE_BYTES, size)) for start in range(RANGE_BYTES, size, RANGE_BYTES)
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing any more."""
        return self.size is not None and not self._open and not self._taken

    @property
    def num_first(self) -> int:
        """How many bytes from the beginning on are there: none of them is written again."""
        if self.size is None:
            return 0
        return min((span.start for span in (*self._open, *self._taken)), default=self.size)

    def take(self) -> range | None:
        """Take a range to fetch; None if all that is missing is on its way, or the size is not known yet."""
        if not self._open:
            return None
        self._taken.append(span := self._open.popleft())
        return span

    def settle(self, taken: range, num_bytes: int) -> None:
        """Give a range back, of which so many bytes are there."""
        self._taken.remove(taken)
        stop = taken.stop if self.size is None else min(taken.stop, self.size)
        if taken.start + num_bytes < stop:
            self._open.appendleft(range(taken.start + num_bytes, stop))
