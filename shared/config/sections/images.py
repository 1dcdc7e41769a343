"""Images in prompts and in later turns."""

from typing import Self

from pydantic import Field, model_validator

from flotilla.shared.config.base.model import Config


class ImagesConfig(Config):
    """Images that the prompts of rows contain, and that environments and tools show; see docs/images.md. Needs
    `flotilla[images]`."""

    column: str = Field("images", min_length=1)
    """Column with a row's images, or its one image: bytes, `{bytes, path}`, a path, or a `data:` URI. Each stands where
    the prompt has `<image>`; without such marks they come before the first user message. Rows without images may lack
    it."""
    folder: str | None = Field(None, min_length=1)
    """Folder of relative paths; null is the folder of each file of rows. No path leads out of it."""
    min_pixels: int | None = Field(None, ge=1)
    """Smaller images are enlarged to so many pixels; null is what the model's processor has. An image of
    InternVL is cut into so many tiles at least as they fill."""
    max_pixels: int | None = Field(None, ge=1)
    """Larger images are reduced to so many pixels, which bounds their tokens; null is what the model's processor
    has. An image of InternVL is cut into so many tiles at most as they fill, and never more than its processor has."""
    max_per_prompt: int = Field(16, ge=1)
    """Images of a row; one with more is refused. In episodes those that a turn sees: one that would see more is not
    asked, and the episode ends."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is above max_pixels {self.max_pixels}")
        return self
