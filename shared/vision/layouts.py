"""What differs between families of models that take images: how an image becomes tokens, and where these are.

A grid: an image keeps its shape and is cut into patches, of which a few make a token; positions have three axes.
Tiles: an image is resized to the nearest of some shapes and cut into squares of one size, each of as many tokens as any
other, with a small view of the whole behind them; positions count tokens on, as in text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from flotilla.shared.errors import ModelError
from flotilla.shared.vision.kinds import TILE_MODELS
from flotilla.shared.vision.spans import ImageSpan, grid_positions


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """An image as a model reads it.

    Attributes:
        pixel_values: float32, [patches, values] of a grid, [tiles, channels, height, width] of tiles.
        grid: patches in time (1), height and width; None of tiles.
        rows, columns: of its tokens; a row is a tile.
    """

    pixel_values: npt.NDArray[np.float32]
    grid: tuple[int, int, int] | None
    rows: int
    columns: int


class ImageLayout(Protocol):
    """How a family of models takes images.

    Attributes:
        opening, closing: tokens around those of an image, which the family's processor writes and its template does
            not.
    """

    opening: str
    closing: str

    def bound(self, min_pixels: int | None, max_pixels: int | None) -> None:
        """Set bounds on the pixels of an image as the model sees it, None to keep its own.

        Raises:
            ModelError: it cannot have these.
        """

    def read(self, image: Any) -> ProcessedImage:
        """Process a Pillow image; ValueError where it cannot be."""

    def described(self) -> Mapping[str, str | int]:
        """Name what decides how many tokens an image has."""

    def positions(self, num_tokens: int, spans: Sequence[ImageSpan]) -> npt.NDArray[np.int64]:
        """Compute the positions of a sequence: [3, num_tokens] where they have axes, else [num_tokens]."""


class GridLayout:
    """An ``ImageLayout`` of grids.

    Args:
        processor: transformers' image processor.
        merge: patches of each side that make one token.
    """

    opening = closing = ""

    def __init__(self, processor: Any, merge: int) -> None:
        self._processor, self._merge = processor, merge

    def bound(self, min_pixels: int | None, max_pixels: int | None) -> None:
        """See ``ImageLayout.bound``."""
        size = self._processor.size
        for name, bound in (("shortest_edge", min_pixels), ("longest_edge", max_pixels)):
            if bound is not None:
                setattr(size, name, bound)
        if size.shortest_edge > size.longest_edge:
            raise ModelError(
                f"data.images: min_pixels {size.shortest_edge} is above max_pixels "
                f"{size.longest_edge}, of the model's own processor where data.images has none"
            )

    def read(self, image: Any) -> ProcessedImage:
        """See ``ImageLayout.read``."""
        found = self._processor(images=[image], return_tensors="np")
        time, height, width = (int(each) for each in found.image_grid_thw[0])
        pixels = np.ascontiguousarray(found.pixel_values, dtype=np.float32)
        return ProcessedImage(pixels, (time, height, width), height // self._merge, width // self._merge)

    def described(self) -> Mapping[str, str | int]:
        """See ``ImageLayout.described``."""
        size = self._processor.size
        return {
            "a processor": type(self._processor).__name__,
            "pixels of a token's side": self._processor.patch_size * self._merge,
            "min_pixels": size.shortest_edge,
            "max_pixels": size.longest_edge,
        }

    def positions(self, num_tokens: int, spans: Sequence[ImageSpan]) -> npt.NDArray[np.int64]:
        """See ``ImageLayout.positions``."""
        return grid_positions(num_tokens, spans)


CROPS: Final = {"crop_to_patches": True}
"""What transformers' processor of these models asks of its image processor, whatever that has by itself."""


class TileLayout:
    """An ``ImageLayout`` of tiles.

    Args:
        processor: transformers' image processor.
        tokens: of a tile.
        opening, closing: tokens around an image.
    """

    def __init__(self, processor: Any, tokens: int, opening: str, closing: str) -> None:
        self._processor, self._tokens = processor, tokens
        self.opening, self.closing = opening, closing

    def bound(self, min_pixels: int | None, max_pixels: int | None) -> None:
        """See ``ImageLayout.bound``: they bound the tiles, the view of the whole apart, of which there is one more."""
        made, tile = self._processor, self._processor.size.height * self._processor.size.width
        if max_pixels is not None:
            if max_pixels < tile:
                raise ModelError(
                    f"data.images: max_pixels {max_pixels} is less than the {tile} pixels of a tile, of which this "
                    "model gives every image one at least"
                )
            # A tower was trained with so many tiles at most.
            made.max_patches = min(made.max_patches, max_pixels // tile)
        if min_pixels is not None:
            made.min_patches = max(made.min_patches, -(-min_pixels // tile))
        if made.min_patches > made.max_patches:
            raise ModelError(
                f"data.images: min_pixels make {made.min_patches} tiles of {tile} pixels, and max_pixels with the "
                f"model's own processor {made.max_patches} at most"
            )

    def read(self, image: Any) -> ProcessedImage:
        """See ``ImageLayout.read``."""
        found = self._processor(images=[image], return_tensors="np", **CROPS)
        pixels = np.ascontiguousarray(found.pixel_values, dtype=np.float32)
        return ProcessedImage(pixels, None, len(pixels), self._tokens)

    def described(self) -> Mapping[str, str | int]:
        """See ``ImageLayout.described``."""
        made = self._processor
        return {
            "a processor": type(made).__name__,
            "pixels of a tile's side": made.size.height,
            "tokens of a tile": self._tokens,
            "least tiles": made.min_patches,
            "most tiles": made.max_patches,
            "tokens around an image": f"{self.opening} {self.closing}",
        }

    def positions(self, num_tokens: int, spans: Sequence[ImageSpan]) -> npt.NDArray[np.int64]:
        """See ``ImageLayout.positions``."""
        return np.arange(num_tokens, dtype=np.int64)


def layout_of(kind: str, directory: Path, processor: Any, tokenizer: Any) -> ImageLayout:
    """Choose the layout of a model.

    Args:
        kind: of the model, which takes images.
        directory: of the model.
        processor: transformers' image processor of it.
        tokenizer: of it.

    Raises:
        ModelError: its tokens around images are not known, or its tiles make other tokens than it says.
    """
    if kind not in TILE_MODELS:
        return GridLayout(processor, int(processor.merge_size))
    opening, closing = (getattr(tokenizer, f"{end}_image_token", None) for end in ("start", "end"))
    if not isinstance(opening, str) or not isinstance(closing, str):
        raise ModelError(
            f"tokenizer_config.json of {directory} has no start_image_token and end_image_token, which {kind} has "
            "around images: take the model's -hf checkpoint"
        )
    return TileLayout(processor, _tokens_of_a_tile(directory, processor), opening, closing)


def _tokens_of_a_tile(directory: Path, processor: Any) -> int:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    patch = config.get("vision_config", {}).get("patch_size", 14)
    side = processor.size.height / (patch[0] if isinstance(patch, list) else patch)
    said = int(config.get("image_seq_length", 256))
    made = int(side * config.get("downsample_ratio", 0.5)) ** 2
    if made != said or processor.size.height != processor.size.width:
        raise ModelError(
            f"config.json of {directory} gives a tile {said} tokens (image_seq_length), and one of "
            f"{processor.size.height} x {processor.size.width} pixels, as its processor makes them, has {made}"
        )
    return said
