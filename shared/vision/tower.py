"""Images in a model's hidden states: the tower's features take the place of their tokens' embeddings.

Which tokens are images' is told by their places, never by their ids: a policy may sample the id of such a token, which
is then a token like any other. Engine and trainer compute by the same code.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from flotilla.shared.vision.files import digest_of
from flotilla.shared.vision.processor import ImageProcessor

MOST_KEPT_BYTES = 256 * 1024 * 1024
TOWER_PARTS: Final = ("visual", "vision_tower", "multi_modal_projector")
"""What transformers calls them: a tower with what fits it to the language model, or both by themselves."""


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """Images of some rows.

    Attributes:
        images: encoded, each once.
        places: [K] int64, flat positions in the rows, rising.
        sources: [K] int64, which feature of all images' features, one image after the other, belongs there.
    """

    images: tuple[bytes, ...]
    places: Tensor
    sources: Tensor

    def to(self, device: torch.device) -> "PlacedImages":
        """Move the tensors."""
        return PlacedImages(self.images, self.places.to(device), self.sources.to(device))

    def within(self, width: int, columns: slice) -> "PlacedImages":
        """Return the same images where they are in some columns of the rows, which alone are computed then.

        Args:
            width: of a row.
            columns: from a first one to a last one, which may be behind the row's end.
        """
        column = self.places % width
        is_there = (columns.start <= column) & (column < columns.stop)
        rows, column = (self.places // width)[is_there], column[is_there]
        places = rows * (columns.stop - columns.start) + column - columns.start
        return PlacedImages(self.images, places, self.sources[is_there])


@dataclass(frozen=True, eq=False)
class Features:
    """What a tower computes of images.

    Attributes:
        embeddings: [K, H].
        deep: [K, H] each, added to the hidden states after the first layers; empty for most models.
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.embeddings.nbytes + sum(each.nbytes for each in self.deep)


class Tower:
    """Computes images with a model.

    Args:
        body: a vision-language model of transformers, without its head.
        processor: of its folder.
        is_frozen: whether its weights never change, so that an image is computed once.
        most: returns the maximum over the ranks that share the weights; each computes that often.
            By itself, of one that has all of them.
    """

    def __init__(
        self, body: Any, processor: ImageProcessor, *, is_frozen: bool, most: Callable[[int], int] = int
    ) -> None:
        self._body, self.processor = body, processor
        self._is_frozen, self._most = is_frozen, most
        self._kept: dict[str, Features] = {}
        self._kept_bytes = 0

    def forget(self) -> None:
        """Forget what was computed: the weights are others."""
        self._kept, self._kept_bytes = {}, 0

    def arguments(self, token_ids: Tensor, placed: PlacedImages) -> Mapping[str, Tensor | list[Tensor] | None]:
        """Return what the body's language model is called with, beside positions and mask.

        Args:
            token_ids: [rows, width].
            placed: the rows' images.
        """
        features = self._features(placed.images)
        embedded = self._body.get_input_embeddings()(token_ids)
        flat = embedded.flatten(0, 1)
        chosen = features.embeddings.index_select(0, placed.sources).to(flat)
        shown = flat.index_put((placed.places,), chosen).view_as(embedded)
        if not features.deep:
            return {"inputs_embeds": shown, "input_ids": None}
        mask = torch.zeros(flat.shape[0], dtype=torch.bool, device=flat.device)
        mask[placed.places] = True
        deep = [each.index_select(0, placed.sources).to(flat.dtype) for each in features.deep]
        return {
            "inputs_embeds": shown,
            "input_ids": None,
            "visual_pos_masks": mask.view(token_ids.shape),
            "deepstack_visual_embeds": deep,
        }

    def _features(self, images: Sequence[bytes]) -> Features:
        if not self._is_frozen:
            return self._computed(images)
        names = [digest_of(image) for image in images]
        kept = {name: self._kept[name] for name in names if name in self._kept}
        missing = [(name, image) for name, image in zip(names, images, strict=True) if name not in kept]
        for number in range(self._most(len(missing))):
            # One that has nothing new computes something again, since the others wait for its part of the weights.
            name, image = missing[number] if number < len(missing) else (names[0], images[0])
            with torch.no_grad():
                kept[name] = self._computed([image])
            if name not in self._kept:
                self._keep(name, kept[name])
        found = [kept[name] for name in names]
        deep = [torch.cat([each.deep[layer] for each in found]) for layer in range(len(found[0].deep))]
        return Features(torch.cat([each.embeddings for each in found]), tuple(deep))

    def _keep(self, name: str, features: Features) -> None:
        while self._kept and self._kept_bytes + features.num_bytes > MOST_KEPT_BYTES:
            self._kept_bytes -= self._kept.pop(next(iter(self._kept))).num_bytes
        self._kept[name] = features
        self._kept_bytes += features.num_bytes

    def _computed(self, images: Sequence[bytes]) -> Features:
        device = self._body.get_input_embeddings().weight.device
        processed = [self.processor.process(image) for image in images]
        pixels = torch.cat([torch.from_numpy(each.pixel_values) for each in processed]).to(device)
        grids = [each.grid for each in processed if each.grid is not None]
        laid = (torch.tensor(grids, device=device),) if grids else ()
        found = self._body.get_image_features(pixels, *laid, return_dict=True)
        deep = getattr(found, "deepstack_features", None) or ()
        return Features(_joined(found.pooler_output), tuple(_joined(each) for each in deep))


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    # Of tiles, or of images, one after the other: [K, H].
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def tower_parts(body: Any) -> list[nn.Module]:
    """List the modules of a model, without its head, that compute images; none of one of text."""
    return [each for name in TOWER_PARTS if (each := getattr(body, name, None)) is not None]
