"""Images among the tokens of a sequence, and how they travel: the bytes of each distinct one once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flotilla.shared.schemas.routing import EncodedBytes


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image that the policy is shown.

    Attributes:
        start: position of its first token, in a prompt or in a trajectory.
        num_tokens: that stand for it.
        data: as it was encoded.
    """

    start: int
    num_tokens: int
    data: EncodedBytes

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.start + self.num_tokens


def moved(images: Sequence[PromptImage], by: int) -> tuple[PromptImage, ...]:
    """Place images by positions that count from elsewhere."""
    return tuple([replace(each, start=each.start + by) for each in images])


def within(images: Sequence[PromptImage], start: int, end: int) -> tuple[PromptImage, ...]:
    """Take the images between two positions, and place them by the first."""
    return moved([each for each in images if start <= each.start < end], -start)


def check_images(images: Sequence[PromptImage], num_tokens: int) -> None:
    """Check that images follow each other in a sequence.

    Raises:
        ValueError: they do not.
    """
    at = 0
    for each in images:
        if each.num_tokens < 1 or each.start < at or each.end > num_tokens:
            raise ValueError(f"an image at {each.start} of {each.num_tokens} tokens has no place in {num_tokens}")
        at = each.end


class ImageTable:
    """Numbers encoded images, each distinct one once.

    Args:
        images: that the reader has already.
    """

    def __init__(self, images: Sequence[bytes] = ()) -> None:
        self._numbers = {image: number for number, image in enumerate(dict.fromkeys(images))}

    def placed(self, images: Sequence[PromptImage]) -> tuple[list[list[int]], list[bytes]]:
        """Write images as start, tokens and number, and list the bytes of those that had no number yet."""
        known = len(self._numbers)
        places = [[e.start, e.num_tokens, self._numbers.setdefault(e.data, len(self._numbers))] for e in images]
        return places, list(self._numbers)[known:]


def read_images(places: Sequence[Sequence[int]], added: Sequence[bytes], known: list[bytes]) -> tuple[PromptImage, ...]:
    """Read what ``ImageTable.placed`` wrote; ``known`` has the bytes by their number, and is added to."""
    known += added
    return tuple([PromptImage(start, num_tokens, known[number]) for start, num_tokens, number in places])
