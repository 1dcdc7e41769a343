"""What the names of models and files say about images in prompts."""

import re
from typing import Final

OF_A_MODEL = re.compile(
    r"(?:^|[-_/.\d])(?:vl|vlm|vision|omni|llava|internvl|minicpm-?[ov])(?:$|[-_/.\d])", re.IGNORECASE
)
OF_ROWS = re.compile(r"geo3k|geometry3k|(?:^|[-_/.])(?:vl|vqa|visual|vision|images?)(?:$|[-_/.])", re.IGNORECASE)
VIDEOS = re.compile(r"videos?(?:$|[-_/.])", re.IGNORECASE)
TEXT_ONLY = re.compile(
    r"omni|llava|internvl|minicpm|gemma|pixtral|molmo|idefics|smolvlm|glm-?4|kimi-?vl|phi-?[34]|llama",
    re.IGNORECASE,
)
"""Models that take images elsewhere and of which only the text is computed here (docs/images.md)."""
WHOLE_ROWS: Final = (
    "ranks compute other sequences each where prompts have images, which changes speed, not what is computed"
)
NOT_SEEN: Final = (
    "data.images: {model} is none of the models whose images are computed here, which are Qwen2-VL, Qwen2.5-VL, "
    "Qwen3-VL and Qwen3.5: name one of them, or train on rows without images"
)


def not_seen(model: str) -> str | None:
    """Say why a model, by its name, cannot be shown images here; None where nothing is known against it."""
    last = model.rstrip("/").rpartition("/")[2]
    return NOT_SEEN.format(model=last) if TEXT_ONLY.search(last) else None
