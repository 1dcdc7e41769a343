"""Which pages of a key/value cache each row holds: fixed numbers of tokens, lent from one pool.

So memory follows the tokens that are held, rows of one prompt share what they have in common, and a row moves without a
copy. Page 0 is nobody's: what is computed for rows without a sample is written there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Pages that must be copied: ``sources[i]`` to ``targets[i]``."""

    sources: list[int]
    targets: list[int]


class PageTable:
    """Assigns pages to rows.

    Args:
        num_rows: rows.
        row_pages: the most pages of a row.
        page_tokens: tokens of a page.

    Attributes:
        table: [num_rows, row_pages] int32, the pages of each row in order, 0 beyond.
        version: grows whenever the table changes.
    """

    def __init__(self, num_rows: int, row_pages: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.table = np.zeros((num_rows, row_pages), dtype=np.int32)
        self._held = np.zeros(num_rows, dtype=np.int64)
        self._uses = np.ones(1, dtype=np.int64)
        self._free: list[int] = []
        self.version = 0

    @property
    def num_pages(self) -> int:
        """Count the pages of the pool, page 0 included."""
        return self._uses.size

    @property
    def num_free(self) -> int:
        """Count the pages that no row holds."""
        return len(self._free)

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool."""
        more = range(self.num_pages, num_pages)
        self._uses = np.concatenate([self._uses, np.zeros(len(more), dtype=np.int64)])
        self._free.extend(reversed(more))

    def pages_of(self, lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
        """Count the pages that ``start`` takes at most, for each of several sequences."""
        full = sum(-(-length // self._page_tokens) for length in lengths)
        return full + sum(len(group) - 1 for group in rows)

    def start(self, rows: Sequence[int], length: int) -> Copies:
        """Let rows begin with the same tokens; they share all pages that these fill.

        Returns:
            The last page of the first row, which the others have copies of, once it is written.
        """
        for row in rows:
            self.release(row)
        filled, rest = divmod(length, self._page_tokens)
        pages = [self._take() for _ in range(filled + bool(rest))]
        self._hold(rows[0], pages)
        copies = Copies([], [])
        for row in rows[1:]:
            shared = pages[:filled]
            self._uses[shared] += 1
            own = [self._take()] if rest else []
            self._hold(row, shared + own)
            copies.sources.extend(pages[filled:])
            copies.targets.extend(own)
        return copies

    def missing_for(self, lengths: Lengths) -> npt.NDArray[np.int64]:
        """List the first rows that need another page for their next token; rows of length 0 hold none."""
        for row in np.flatnonzero((lengths == 0) & (self._held[: lengths.size] > 0)).tolist():
            self.release(row)
        held: npt.NDArray[np.int64] = self._held[: lengths.size] * self._page_tokens
        return np.flatnonzero((lengths > 0) & (lengths >= held)).astype(np.int64)

    def extend(self, rows: npt.NDArray[np.int64]) -> None:
        """Give each of the rows one more page."""
        for row in rows.tolist():
            self.table[row, self._held[row]] = self._take()
            self._held[row] += 1
        self.version += int(rows.size > 0)

    def places(self, lengths: Lengths) -> npt.NDArray[np.int64]:
        """Find where the next token of each of the first rows goes, counted in tokens from the pool's start."""
        rows = np.arange(lengths.size)
        pages = self.table[rows, np.minimum(lengths // self._page_tokens, self.table.shape[1] - 1)].astype(np.int64)
        places: npt.NDArray[np.int64] = np.where(
            lengths > 0, pages * self._page_tokens + lengths % self._page_tokens, 0
        )
        return places

    def places_of(self, row: int, length: int) -> npt.NDArray[np.int64]:
        """Find where the first tokens of a row are, likewise."""
        tokens = np.arange(length)
        pages: npt.NDArray[np.int64] = self.table[row, tokens // self._page_tokens].astype(np.int64)
        return pages * self._page_tokens + tokens % self._page_tokens

    def move(self, source: int, target: int) -> None:
        """Give one row's pages to another."""
        self.release(target)
        self.table[target], self._held[target] = self.table[source], self._held[source]
        self.table[source], self._held[source] = 0, 0
        self.version += 1

    def release(self, row: int) -> None:
        """Take a row's pages from it."""
        held = self.table[row, : self._held[row]]
        if held.size:
            self._uses[held] -= 1
            self._free.extend(int(page) for page in held if not self._uses[page])
            self.table[row], self._held[row] = 0, 0
            self.version += 1

    def _hold(self, row: int, pages: list[int]) -> None:
        self.table[row, : len(pages)], self._held[row] = pages, len(pages)
        self.version += 1

    def _take(self) -> int:
        page = self._free.pop()
        self._uses[page] = 1
        return page
