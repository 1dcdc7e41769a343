"""Which models take images; no torch, and no Pillow, here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

GRID_MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Kinds of models whose images are grids of patches with positions of three axes."""
TILE_MODELS: Final = frozenset({"internvl"})
"""Kinds of models whose images are tiles of one size, in a text of plain positions."""
IMAGE_MODELS: Final = GRID_MODELS | TILE_MODELS
NOT_COMPUTED: Final[Mapping[str, str]] = {
    "gemma3": "whose tokens of an image attend to each other in both directions, which packed rows, shared prompts and "
    "kept turns have no mask for",
}
"""Kinds that take images elsewhere, and why not here."""


def kind_of(directory: Path) -> tuple[str | None, int | None]:
    """Read a model's kind and the id of the token that stands for a part of an image.

    What is wrong with the directory is said where it is loaded: then both are None.
    """
    try:
        described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return described.get("model_type"), described.get("image_token_id")
    except (OSError, ValueError, AttributeError):
        return None, None


def marks_of(directory: Path) -> frozenset[int]:
    """Read the ids of the other tokens by which a model finds images and videos in a sequence: before one, for one."""
    try:
        described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        found = (described.get(f"{name}_token_id") for name in ("vision_start", "video"))
        return frozenset(each for each in found if isinstance(each, int))
    except (OSError, ValueError, AttributeError):
        return frozenset()


def takes_images(directory: Path) -> bool:
    """Whether a model directory has a vision-language model."""
    return kind_of(directory)[0] in IMAGE_MODELS
