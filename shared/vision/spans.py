"""Where the images of a sequence are, and the positions that rotary embeddings give its tokens. Pure.

Positions of Qwen's vision-language models have three axes (time, height, width). Text counts all three on; the tokens
of an image lie on its grid, at the position where the image begins; text after it continues behind the longer side.

Source: Wang et al., Qwen2-VL, arXiv:2409.12191, section 2.1 (M-RoPE).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flotilla.shared.errors import DataError


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of an image in a sequence.

    Attributes:
        start: position of the first.
        rows, columns: of the grid that they make, row by row.
    """

    start: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the image."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.start + self.num_tokens


def find_spans(
    is_placeholder: npt.NDArray[np.bool_], grids: Sequence[tuple[int, int]], *, what: str
) -> tuple[ImageSpan, ...]:
    """Find the tokens of each image among the placeholders of a sequence.

    Args:
        is_placeholder: [T], true where a token stands for a part of an image and was not sampled.
        grids: rows and columns of the tokens of each image, in order.
        what: the sequence, for the message.

    Raises:
        DataError: the placeholders are not those of the images.
    """
    places = np.flatnonzero(is_placeholder)
    sizes = [rows * columns for rows, columns in grids]
    if len(places) == sum(sizes):
        spans, at = [], 0
        for (rows, columns), size in zip(grids, sizes, strict=True):
            start = int(places[at])
            if places[at + size - 1] - start + 1 != size:
                break
            spans.append(ImageSpan(start, rows, columns))
            at += size
        if len(spans) == len(grids):
            return tuple(spans)
    raise DataError(
        f"{what} has {len(places)} tokens that stand for images, and its {len(grids)} images make {sum(sizes)}: "
        "the images, or their bounds on pixels, are not those that it was written with"
    )


def grid_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> npt.NDArray[np.int64]:
    """Compute positions of three axes: [3, num_tokens].

    Args:
        num_tokens: of the sequence.
        spans: its images, in order.
    """
    found = np.empty((3, num_tokens), dtype=np.int64)
    token = position = 0
    for span in spans:
        num_before = span.start - token
        found[:, token : span.start] = np.arange(position, position + num_before)
        position += num_before
        places = np.arange(span.num_tokens)
        found[0, span.start : span.end] = position
        found[1, span.start : span.end] = position + places // span.columns
        found[2, span.start : span.end] = position + places % span.columns
        position += max(span.rows, span.columns)
        token = span.end
    found[:, token:] = np.arange(position, position + num_tokens - token)
    return found
