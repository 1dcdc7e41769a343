"""ROLL's images: its pipeline for vision-language models reads rows as verl has them, whatever columns are named."""

from typing import Any, Final

from flotilla.importers.parameter import Inherit, Parameter, applied, ignored, refused, translated
from flotilla.importers.roll.launch import MODULE, TEXT, VISION
from flotilla.importers.roll.rows import TRAIN
from flotilla.importers.source import Source
from flotilla.importers.spelling import OF_A_MODEL, not_seen
from flotilla.importers.values import count, text

Fields = dict[str, Any]

DATA: Final = f"{TRAIN}.data_args"
FROZEN: Final = f"{TRAIN}.model_args.freeze_module_prefix"
TOWER: Final = "vision_model"
"""How ROLL calls what computes images."""
WITHOUT_CRITIC = {"adv_estimator": "grpo"}
PICTURES = {**WITHOUT_CRITIC, "pretrain": "owner/a-VL-model"}
VIDEO: Final = "videos and sound are not offered: leave it out"
SHORT: Final = "rows whose prompt is text, and no messages, get a sentence on how to answer from ROLL, and none here"
OF_VIDEOS: Final = ("max_pixels", "min_pixels", "total_pixels", "fps", "max_frames", "resize_chunk_frames")

ROWS: tuple[Parameter, ...] = (
    translated(MODULE, "data.images", text, f"{VISION} reads rows with images, in verl's format", example=VISION,
               context=WITHOUT_CRITIC,
               default=TEXT),
    applied(f"{DATA}.image_max_pixels", "data.images.max_pixels", count, "larger images are reduced to so many pixels",
            example=1_048_576, default=4096 * 4096, context=PICTURES),
    applied(f"{DATA}.image_min_pixels", "data.images.min_pixels", count, "smaller images are enlarged to so many",
            example=1024, default=4 * 28 * 28, context=PICTURES),
    *(refused(f"validation.data_args.{name}", "held-out images are bounded as those of training: give both the same",
              default=Inherit(f"{DATA}.{name}"))
      for name in ("image_max_pixels", "image_min_pixels")),
    applied(f"{DATA}.image_folder", "data.images.folder", text, "of relative paths", example="pictures", default=None,
            context=PICTURES),
    *ignored("held-out images lie where those of training do", "validation.data_args.image_folder"),
    *(refused(f"{role}.data_args.{name}", VIDEO, default=None)
      for role in (TRAIN, "validation") for name in ("video_folder", "audio_folder", "custom_data_kwargs_func")),
    *ignored("read of videos alone, which are refused by their folder",
             *(f"{role}.data_args.video_{name}" for role in (TRAIN, "validation") for name in OF_VIDEOS)),
)  # fmt: skip


def has_images(source: Source) -> bool:
    """Whether it is the pipeline for vision-language models: by its program, else by the model's name."""
    if source.trees.get("env_manager"):
        return False  # environments have images of their own, by their managers
    if MODULE in source.given:
        return str(source.value(MODULE)) == VISION
    model = str(source.value("pretrain") or "")
    is_said = any(name in source.given for name in (f"{DATA}.image_max_pixels", f"{DATA}.image_min_pixels"))
    return is_said or OF_A_MODEL.search(model) is not None


def images(source: Source) -> Fields:
    """Make images, and rows in verl's format, which this pipeline of ROLL's reads whatever columns are named."""
    if not has_images(source):
        return {}
    if (why := not_seen(str(source.value("pretrain") or ""))) is not None:
        source.lack(why)
    source.note(SHORT)
    section: Fields = {"column": "images"}
    for name in ("max_pixels", "min_pixels"):
        section[name] = source.value(f"{DATA}.image_{name}")
    if (folder := source.value(f"{DATA}.image_folder")) is not None:
        section["folder"] = folder
    frozen = source.value(FROZEN) or []
    return {"data.images": section, "model.vision_tower": "frozen" if TOWER in frozen else "trained"}


def weights_frozen(source: Source) -> list[str]:
    """Return the beginnings of frozen weights' names; the tower is frozen by its own key where there are images."""
    found = source.value(FROZEN) or []
    if not has_images(source):
        return list(found)
    for each in found:
        if each.startswith(f"{TOWER}."):
            source.refuse(FROZEN, f"the tower is frozen or trained as a whole: write {TOWER}, or leave it out")
    return [each for each in found if each.partition(".")[0] != TOWER]
