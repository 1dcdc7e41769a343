"""The image processor of a model's folder: pixels, their layout and token ids, the same wherever they are made.

It is transformers' own processor, on Pillow and NumPy: gateway and rollout count an image's tokens by it without torch,
the engine and the trainer compute its pixels. Transformers' ``AutoProcessor`` of these models also makes a processor
of videos, which needs torchvision; token ids here are those that it writes.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import DataError, ModelError
from flotilla.shared.net.absence import absent_or
from flotilla.shared.schemas.task import IMAGE_MARK, Message
from flotilla.shared.vision.files import digest_of, pixels_of
from flotilla.shared.vision.kinds import IMAGE_MODELS, NOT_COMPUTED, kind_of, marks_of
from flotilla.shared.vision.layouts import ImageLayout, ProcessedImage, layout_of
from flotilla.shared.vision.spans import ImageSpan, find_spans

MOST_KEPT_BYTES = 256 * 1024 * 1024
"""Bytes of processed images that are kept; one of the largest may have more, and is kept alone."""
MOST_GRIDS = 65_536
"""Images whose grids are kept."""
CUT: Final = "\U0010fffd\ue0f1"
"""Where a text is divided before it is made tokens, so that what it has on both sides is no special token together."""


class ImageProcessor:
    """Processes images for one model, under bounds on their pixels.

    Args:
        layout: how the model takes images.
        token: the special token that stands for a part of an image.
        token_id: its id.
        marks: other tokens by which the model finds images and videos, by their ids; see ``marks_of``.
    """

    def __init__(self, layout: ImageLayout, token: str, token_id: int, marks: Mapping[int, str] | None = None) -> None:
        self._layout = layout
        self.marks = frozenset(marks or ())
        around = (each for each in (layout.opening, layout.closing) if each)
        self._words = re.compile("|".join(map(re.escape, (token, *(marks or {}).values(), *around))))
        self.token, self.token_id = token, token_id
        self.positions = layout.positions
        # Members of a group, and passes over a batch, ask for the same few images one after the other. All is kept by
        # what an image contains: by its bytes, thousands of files would stay in memory.
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._kept_bytes = 0
        self._grids: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_directory(
        cls, path: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> "ImageProcessor":
        """Load the processor of a model directory; takes seconds.

        Args:
            path: of the directory.
            min_pixels, max_pixels: of an image as the model sees it; None: what the processor has.

        Raises:
            ModelError: the model takes no images, its processor cannot be loaded, or it cannot have these bounds.
        """
        directory = Path(path)
        kind, token_id = kind_of(directory)
        if kind is None or kind not in IMAGE_MODELS or token_id is None:
            why = f", {NOT_COMPUTED[kind]}" if kind is not None and kind in NOT_COMPUTED else ""
            taken = ", ".join(sorted(IMAGE_MODELS))
            raise ModelError(f"data.images: model.path {path} is a {kind}{why}, and images are taken by {taken}")
        try:
            from transformers import AutoImageProcessor, AutoTokenizer
            from transformers.utils import logging as transformers_logging

            # It warns that torchvision would be faster, which no part here needs.
            transformers_logging.set_verbosity_error()
            processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            marks = sorted(marks_of(directory))
            token, *words = map(str, tokenizer.convert_ids_to_tokens([token_id, *marks]))
            layout = layout_of(kind, directory, processor, tokenizer)
        except ImportError as error:
            raise ModelError(f"images need Pillow: install flotilla[images] ({error})") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise absent_or(error, ModelError(f"no image processor can be loaded from {path}: {error}")) from error
        layout.bound(min_pixels, max_pixels)
        return cls(layout, token, token_id, dict(zip(marks, words, strict=True)))

    def check_alike(self, other: "ImageProcessor", field: str) -> None:
        """Check that another model's processor gives every image the same tokens, in the same places.

        Args:
            other: that model's.
            field: the spec's, that names it.

        Raises:
            ModelError: it does not; the sentence has what differs.
        """
        ours, theirs = self._described(), other._described()
        apart = [
            f"{name} {theirs.get(name)} there and {own} here" for name, own in ours.items() if theirs.get(name) != own
        ]
        if apart:
            raise ModelError(
                f"{field}: its processor gives images other tokens than that of model.path ({', '.join(apart)}): set "
                "data.images.min_pixels and max_pixels where bounds on pixels differ, or name a model whose processor "
                "does the same"
            )

    def _described(self) -> dict[str, str | int]:
        return {**self._layout.described(), "image_token_id": self.token_id}

    def process(self, data: bytes) -> ProcessedImage:
        """Compute the pixels of an encoded image; threads may call it at once.

        Raises:
            DataError: it cannot be read, or is too narrow for the model.
        """
        name = digest_of(data)
        with self._lock:
            if (kept := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                return kept
        made = self._computed(data)
        with self._lock:
            if name not in self._kept:
                self._keep(name, made)
        return made

    def grid_of(self, data: bytes) -> tuple[int, int]:
        """Count rows and columns of an image's tokens; raises as ``process``."""
        grid = self._grids.get(digest_of(data))
        if grid is None:
            processed = self.process(data)
            grid = processed.rows, processed.columns
        return grid

    def check_tokens(self, data: bytes, num_tokens: int) -> None:
        """Check that an image has so many tokens; raises as ``process``, and where it has others."""
        rows, columns = self.grid_of(data)
        if rows * columns != num_tokens:
            raise DataError(f"an image has {num_tokens} tokens in the prompt, and {rows * columns} here")

    def _keep(self, name: str, made: ProcessedImage) -> None:
        while self._kept and self._kept_bytes + made.pixel_values.nbytes > MOST_KEPT_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].pixel_values.nbytes
        self._kept[name] = made
        self._kept_bytes += made.pixel_values.nbytes
        self._grids[name] = made.rows, made.columns
        if len(self._grids) > MOST_GRIDS:
            self._grids.popitem(last=False)

    def _computed(self, data: bytes) -> ProcessedImage:
        try:
            return self._layout.read(pixels_of(data))
        except ValueError as error:
            raise DataError(f"an image cannot be processed for the model: {error}") from error

    def as_text(self, message: Any) -> Any:
        """Write what somebody said so that none of its words is an image's place, or a token that a model looks for.

        Args:
            message: that a chat template takes, or a part of one.

        Returns:
            The same with a ``CUT`` in each such word, which ``token_ids_of`` takes out.
        """
        if isinstance(message, str):
            return self._words.sub(lambda found: found[0][0] + CUT + found[0][1:], message)
        if isinstance(message, Mapping):
            return {name: self.as_text(value) for name, value in message.items()}
        return [self.as_text(each) for each in message] if isinstance(message, list | tuple) else message

    def check_row(self, messages: Sequence[Message]) -> None:
        """Check that the texts of a row with images leave their places to its marks.

        Raises:
            DataError: one has an image's token as a word, by which whoever wrote it may have meant an image.
        """
        if any(self.token in each.content for each in messages):
            raise DataError(
                f"the row's text has {self.token}, and it has images: write {IMAGE_MARK} where each is to be shown"
            )

    def expand(self, text: str, images: Sequence[bytes]) -> str:
        """Write each image's token as often as the image has tokens, and what the model has around them.

        Raises:
            DataError: the text has another number of them than there are images.
        """
        parts = text.split(self.token)
        if len(parts) != len(images) + 1:
            raise DataError(
                f"the prompt has {len(parts) - 1} places for images ({self.token}), and {len(images)} images: the "
                "model's chat template must write one for each image"
            )
        grids = [self.grid_of(each) for each in images]
        opening, closing = self._layout.opening, self._layout.closing
        counted = [f"{opening}{self.token * (rows * columns)}{closing}" for rows, columns in grids]
        return "".join(part + image for part, image in zip(parts, [*counted, ""], strict=True))

    def spans(self, token_ids: npt.NDArray[np.integer], images: Sequence[bytes]) -> tuple[ImageSpan, ...]:
        """Find the images' tokens in a prompt.

        Raises:
            DataError: they are not those of the images.
        """
        return find_spans(token_ids == self.token_id, [self.grid_of(each) for each in images], what="a prompt")


def token_ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokenise a text that special tokens may be in, piece by piece where it has a ``CUT``."""
    pieces = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in text.split(CUT))
    return tuple(token for piece in pieces for token in piece)


def without_cuts(text: str) -> str:
    """Write a text for people."""
    return text.replace(CUT, "")


def processor_of(path: str | Path, images: ImagesConfig) -> ImageProcessor:
    """Load the processor of a model directory as a spec's section says; see ``ImageProcessor.from_directory``."""
    return ImageProcessor.from_directory(path, min_pixels=images.min_pixels, max_pixels=images.max_pixels)
