"""Images of the sequences of a batch: where each is, and what is shown with it in a row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.vision.files import digest_of
from flotilla.shared.vision.processor import ImageProcessor
from flotilla.shared.vision.spans import ImageSpan, grid_positions
from flotilla.shared.vision.tower import PlacedImages


@dataclass(frozen=True, eq=False)
class Illustration:
    """The images of a sequence.

    Attributes:
        images: encoded, in order; members of a group share the bytes.
        spans: the tokens of each.
        positions: [3, L] int64, of all tokens of the sequence.
    """

    images: tuple[bytes, ...]
    spans: tuple[ImageSpan, ...]
    positions: npt.NDArray[np.int64]

    @property
    def name(self) -> bytes:
        """What tells the images from others with as many tokens."""
        return "".join(digest_of(image) for image in self.images).encode()


def illustration_of(group: Group, trajectory: Trajectory, processor: ImageProcessor | None) -> Illustration | None:
    """Find the images in a trajectory of a group; None if it has none.

    Raises:
        DataError: its tokens are not those of its images, or nothing here can process them.
    """
    images = group.task.images
    if not images or processor is None:
        return None
    # The prompt's alone: what a tool or an environment writes later may have the text of such a token.
    sampled = np.flatnonzero(trajectory.loss_mask)
    prompt = trajectory.token_ids[: sampled[0]] if sampled.size else trajectory.token_ids
    spans = processor.spans(prompt, images)
    return Illustration(images, spans, grid_positions(len(trajectory.token_ids), spans))


class PlacedRows:
    """Collects where the images of some rows are, each distinct one once."""

    def __init__(self) -> None:
        self._starts: dict[bytes, int] = {}
        self._num_features = 0
        self._places: list[npt.NDArray[np.int64]] = []
        self._sources: list[npt.NDArray[np.int64]] = []

    def add(self, illustration: Illustration, first: int, prefix: int) -> npt.NDArray[np.int64]:
        """Add a sequence.

        Args:
            illustration: its images.
            first: flat position where its token ``prefix`` stands.
            prefix: tokens that stand elsewhere, with the images among them.

        Returns:
            [3, L - prefix] positions of the others.
        """
        for image, span in zip(illustration.images, illustration.spans, strict=True):
            if span.start < prefix:
                continue
            if image not in self._starts:
                self._starts[image] = self._num_features
                self._num_features += span.num_tokens
            tokens = np.arange(span.num_tokens)
            self._places.append(first + span.start - prefix + tokens)
            self._sources.append(self._starts[image] + tokens)
        return illustration.positions[:, prefix:]

    def placed(self) -> PlacedImages | None:
        """Return what was added; None if that was nothing."""
        if not self._places:
            return None
        places, sources = np.concatenate(self._places), np.concatenate(self._sources)
        return PlacedImages(tuple(self._starts), torch.from_numpy(places), torch.from_numpy(sources))
