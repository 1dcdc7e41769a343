"""Which ranges of an image are still missing, and which are on their way: bookkeeping without a byte of them."""

from collections import deque

RANGE_BYTES = 64 << 20
"""What one connection fetches at a time: as much as a source that breaks off or lies about its speed can hold up."""
ALONE = 8
"""As many such ranges at once come from a source beside which there is no other, and which can so hold up none: asking
for one takes the processor time in which 20 MB arrive on loopback."""


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
        if size > RANGE_BYTES:
            self._open.append(range(RANGE_BYTES, size))

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

    def take(self, *, is_alone: bool = False) -> range | None:
        """Take a range to fetch; None if all that is missing is on its way, or the size is not known yet.

        Args:
            is_alone: whether there is no other source.
        """
        if not self._open:
            return None
        span = self._open.popleft()
        if rest := span[RANGE_BYTES * (ALONE if is_alone else 1) :]:
            self._open.appendleft(rest)
        self._taken.append(taken := range(span.start, rest.start if rest else span.stop))
        return taken

    def settle(self, taken: range, num_bytes: int) -> None:
        """Give a range back, of which so many bytes are there."""
        self._taken.remove(taken)
        stop = taken.stop if self.size is None else min(taken.stop, self.size)
        if taken.start + num_bytes < stop:
            self._open.appendleft(range(taken.start + num_bytes, stop))
