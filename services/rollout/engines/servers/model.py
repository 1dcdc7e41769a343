"""The model that a server runs, as its directory describes it; and whether an image fits it.

Names and shapes are compared before an image is loaded, since a tensor of a wrong shape ends the server.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.decoders.checkpoint import (
    TensorHeader,
    check_headers,
    read_config,
    read_headers,
)
from flotilla.services.rollout.engines.servers import leftovers
from flotilla.services.rollout.engines.servers.routed_experts import ServedRouters
from flotilla.shared.config.sections.images import ImagesConfig
from flotilla.shared.errors import DataError, InvalidRequest, ModelError, Unavailable, WeightTransferFailed
from flotilla.shared.models.prompts import USING_TRANSFORMERS
from flotilla.shared.models.weight_files import safetensors_files
from flotilla.shared.vision.processor import ImageProcessor, processor_of

PREFIX = "flotilla-engine-"
HEAD = frozenset({"lm_head.weight"})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts of a model directory.

    Attributes:
        vocab_size: token ids are below it.
        max_positions: longest context of the model; None if unknown.
        shapes: of the checkpoint's tensors by name.
        is_tied: whether the head is the embedding, so that a checkpoint or an image may leave it out.
        routers: of a mixture of experts whose routers are recorded.
        processor: of images; None where prompts have none.
    """

    vocab_size: int
    max_positions: int | None
    shapes: Mapping[str, tuple[int, ...]]
    is_tied: bool
    routers: ServedRouters | None = None
    processor: ImageProcessor | None = None

    def processor_for(self, images: Sequence[PromptImage]) -> ImageProcessor:
        """Return what processes the images of a prompt, and has processed these; takes a while.

        Raises:
            InvalidRequest: prompts have no images here, or one of these is not what the prompt has tokens for.
        """
        if self.processor is None:
            raise InvalidRequest("a prompt has images, and data.images is not set")
        try:
            for image in images:
                self.processor.check_tokens(image.data, image.num_tokens)
        except DataError as error:
            raise InvalidRequest(error.detail) from error
        return self.processor

    def check_fits(self, image: Path) -> None:
        """Check that an image holds the model's tensors.

        Raises:
            WeightTransferFailed: names, shapes or dtypes do not fit, or it cannot be read.
        """
        self.check_tensors(read_headers([image]))

    def check_tensors(self, tensors: Mapping[str, TensorHeader]) -> None:
        """Check that these are the model's tensors.

        Raises:
            WeightTransferFailed: names, shapes or dtypes do not fit.
        """
        check_headers(tensors, self.shapes, optional=HEAD if self.is_tied else frozenset())


def read_served_model(
    directory: Path, *, records_experts: bool = False, images: ImagesConfig | None = None
) -> ServedModel:
    """Read a model directory.

    Args:
        directory: of the model.
        records_experts: whether what its routers choose is recorded.
        images: that prompts have; its processor is loaded then, which takes seconds.

    Raises:
        ModelError: it is no model, its weights cannot be read, it has no routers that can be recorded, or it takes no
            images.
    """
    config = read_config(directory)
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        vocab_size = int(text["vocab_size"])
        headers = read_headers(safetensors_files(directory))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json of {directory} has no usable vocab_size: {error!r}") from error
    except WeightTransferFailed as error:
        raise ModelError(error.detail) from error
    return ServedModel(
        vocab_size=vocab_size,
        max_positions=text.get("max_position_embeddings"),
        shapes={name: header.shape for name, header in headers.items()},
        is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        routers=ServedRouters.of(text) if records_experts else None,
        processor=None if images is None else _processor(directory, images),
    )


def _processor(directory: Path, images: ImagesConfig) -> ImageProcessor:
    # The tokenizer is loaded on another thread meanwhile: transformers cannot be imported by two at once.
    with USING_TRANSFORMERS:
        return processor_of(directory, images)


def make_place() -> Path:
    """Make a directory for a server's files, private to this user."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def sweep_places() -> list[Path]:
    """Remove the directories that dead processes left behind, and what their servers left; name them.

    Call it when a service starts.
    """
    removed = []
    for place in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = place.name.removeprefix(PREFIX).partition("-")[0]
        # A restarted container gives the same number again.
        if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            leftovers.remove(place)
            shutil.rmtree(place, ignore_errors=True)
            removed.append(place)
    return removed


def stage_directory(place: Path, model: Path, image: Path) -> Path:
    """Make a directory that the server loads an image from: the model's small files, and a link to the image.

    Each call makes another one: what an abandoned call still does must not reach what the next one loads.

    Args:
        place: where it is made.
        model: directory of the model that the server runs.
        image: a safetensors file.

    Raises:
        Unavailable: it cannot be made now: the disk is full, or the place was removed.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix="weights-", dir=place))
        for file in model.iterdir():
            if file.is_file() and file.suffix == ".json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, made / file.name)
        (made / "model.safetensors").symlink_to(image.resolve())
    except OSError as error:
        raise Unavailable(f"no directory can be made to load weights from, in {place}: {error}") from error
    return made
