"""Images of the sequences of a batch: where each is, and what is shown with it in a row."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from flotilla.shared.errors import DataError
from flotilla.shared.schemas.prompt_image import PromptImage
from flotilla.shared.schemas.trajectory import Group, Trajectory
from flotilla.shared.vision.files import digest_of
from flotilla.shared.vision.processor import ImageProcessor
from flotilla.shared.vision.spans import ImageSpan
from flotilla.shared.vision.tower import PlacedImages


@dataclass(frozen=True, eq=False)
class Illustration:
    """The images of a sequence.

    Attributes:
        images: encoded, in order; members of a group share the bytes.
        spans: the tokens of each.
        positions: [3, L] int64, of all tokens of the sequence; [L] of a model whose positions have no axes.
    """

    images: tuple[bytes, ...]
    spans: tuple[ImageSpan, ...]
    positions: npt.NDArray[np.int64]

    def name(self, num_tokens: int) -> bytes:
        """A key that distinguishes the images of the first tokens from others with as many tokens."""
        shown = [image for image, span in zip(self.images, self.spans, strict=True) if span.start < num_tokens]
        return "".join(map(digest_of, shown)).encode()


def with_images(group: Group, trajectory: Trajectory, processor: ImageProcessor | None) -> Trajectory:
    """Let a trajectory list all images that it was shown, of which the task's may appear in its prompt unlisted.

    Raises:
        DataError: the prompt's tokens are not those of the images.
    """
    # An agent may have shown none of the task's.
    if trajectory.images or trajectory.episode is not None or not group.task.images or processor is None:
        return trajectory
    # The prompt's alone: what a tool or an environment writes later may have the text of such a token.
    sampled = np.flatnonzero(trajectory.loss_mask)
    prompt = trajectory.token_ids[: sampled[0]] if sampled.size else trajectory.token_ids
    spans = processor.spans(prompt, group.task.images)
    shown = zip(spans, group.task.images, strict=True)
    return replace(trajectory, images=tuple(PromptImage(span.start, span.num_tokens, image) for span, image in shown))


def illustration_of(trajectory: Trajectory, processor: ImageProcessor | None) -> Illustration | None:
    """Place the images that a sequence lists; None if it lists none.

    Raises:
        DataError: its tokens are not those of its images, or nothing here can process them.
    """
    if not trajectory.images:
        return None
    if processor is None:
        raise DataError("a trajectory was shown images, and data.images is not set")
    images = tuple(each.data for each in trajectory.images)
    spans = tuple(ImageSpan(each.start, *processor.grid_of(each.data)) for each in trajectory.images)
    for each, span in zip(trajectory.images, spans, strict=True):
        tokens = slice(span.start, span.end)
        is_whole = each.num_tokens == span.num_tokens and (trajectory.token_ids[tokens] == processor.token_id).all()
        if not is_whole or trajectory.loss_mask[tokens].any():
            raise DataError(
                f"an image at token {each.start} was shown as {each.num_tokens} tokens, and makes {span.num_tokens}: "
                "its bounds on pixels are not those that it was shown with"
            )
    return Illustration(images, spans, processor.positions(len(trajectory.token_ids), spans))


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
            [3, L - prefix] or [L - prefix] positions of the others.
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
        return illustration.positions[..., prefix:]

    def placed(self) -> PlacedImages | None:
        """Return what was added; None if that was nothing."""
        if not self._places:
            return None
        places, sources = np.concatenate(self._places), np.concatenate(self._sources)
        return PlacedImages(tuple(self._starts), torch.from_numpy(places), torch.from_numpy(sources))
