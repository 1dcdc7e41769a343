"""verl's images: where rows have some, and what of the model computes them."""

import re
from dataclasses import replace
from typing import Any, Final

from flotilla.importers.parameter import Parameter, ignored, translated
from flotilla.importers.source import Source
from flotilla.importers.spelling import OF_A_MODEL, OF_ROWS, VIDEOS, low_rank, not_seen
from flotilla.importers.values import flag, text
from flotilla.importers.verl.actor import ACTOR, LOW_RANK, MODEL
from flotilla.importers.verl.data import NO_SOUND, NO_VIDEOS

Fields = dict[str, Any]

KEY: Final = "data.image_key"
FROZEN: Final = f"{ACTOR}.freeze_vision_tower"
TOWER = re.compile(r"(?:\.\*)?\.?visual\.?(?:\.\*)?")
"""The tower's layers as a pattern of names."""
WHOLE: Final = 250
"""Parameters of a whole configuration, such as Hydra writes beside a run; no launch file writes so many by hand."""
PICTURES = {f"{MODEL}.path": "owner/a-VL-model"}

ROWS: tuple[Parameter, ...] = (
    translated(KEY, "data.images.column", text, "column with images; where it is silent, images, if the name of the "
               "model or of the files says that there are some", example="pictures", default="images",
               context=PICTURES),
    translated(FROZEN, "model.vision_tower", flag, "what computes images: frozen, or trained with the rest",
               example=True, default=False, context=PICTURES),
    *ignored("the model's own processor says how images are cut", "data.image_patch_size"),
    *ignored("what the model reads of an image is made when it is computed", "data.return_multi_modal_inputs"),
)  # fmt: skip


def has_images(source: Source) -> bool:
    """Whether prompts have images: verl reads a column ``images`` wherever the model has a processor of them."""
    if KEY in source.given and not _is_silent(source, KEY, "images"):
        return source.value(KEY) is not None
    files = [str(each) for each in source.value("data.train_files") or []]
    model = str(source.value(f"{MODEL}.path") or "")
    return OF_A_MODEL.search(model) is not None or any(OF_ROWS.search(file) for file in files)


def _is_silent(source: Source, name: str, usual: str) -> bool:
    """Whether a whole configuration holds it, with the value that verl has by itself: then nobody asked for it."""
    return len(source.given) >= WHOLE and source.given[name].value == usual


def images(source: Source) -> Fields:
    """Make the images of prompts."""
    for name, usual, why in (("data.video_key", "videos", NO_VIDEOS), ("data.audio_key", "audios", NO_SOUND)):
        if name in source.given and not _is_silent(source, name, usual) and source.value(name) is not None:
            source.refuse(name, why)
    if not has_images(source):
        return {}
    if any(VIDEOS.search(str(file)) for file in source.value("data.train_files") or []):
        source.lack("data.images: the files are of videos by their name, and images alone are offered")
    if (unseen := not_seen(str(source.value(f"{MODEL}.path") or ""))) is not None:
        source.lack(unseen)
    return {
        "data.images.column": source.required(KEY),
        "model.vision_tower": "frozen" if source.value(FROZEN) or _excludes_tower(source) else "trained",
    }


def adapters(source: Source) -> Fields:
    """Make the adapters; those of a model's tower are left out by freezing it."""
    names = replace(LOW_RANK, exclude=None) if has_images(source) and _excludes_tower(source) else LOW_RANK
    return low_rank(source, names)


def _excludes_tower(source: Source) -> bool:
    found = source.value(f"{MODEL}.exclude_modules") or []
    return bool(source.value(f"{MODEL}.lora_rank") and found) and all(TOWER.fullmatch(each) for each in found)
