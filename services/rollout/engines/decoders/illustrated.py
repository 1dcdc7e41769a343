"""Decoders of vision-language models: what ``CachedDecoder`` and ``RecomputingDecoder`` do, with images in prompts.

The tokens of an image may take fewer positions than there are of them, so the position of a sampled token is given by
the number of cached tokens and a difference that its row keeps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.decoders.base import KeptRow, Tokens
from flotilla.services.rollout.engines.decoders.generic import (
    CachedDecoder,
    ModelWeights,
    RecomputingDecoder,
    padded_left,
)
from flotilla.shared.vision.processor import ImageProcessor
from flotilla.shared.vision.spans import ImageSpan
from flotilla.shared.vision.tower import PlacedImages, Tower


class VisionDecoder(CachedDecoder):
    """An ``IllustratedDecoder``.

    Args:
        processor: of the model's folder.
        model: of transformers, with a tower.
        weights: the same model's.
        num_rows: rows of the cache.
    """

    def __init__(self, processor: ImageProcessor, model: nn.Module, weights: ModelWeights, num_rows: int) -> None:
        super().__init__(model, weights, num_rows)
        self.description = f"{self.description}, with images"
        self._model: Any = model
        self._tower = Tower(model.base_model, processor, is_frozen=True)
        self._processor = processor
        self._differences = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        self._move_cached = self.move_rows
        self.move_rows = self._move_rows
        self.switch, self.restore = (_and_then(each, self._tower.forget) for each in (self.switch, self.restore))

    def check_images(self, images: Sequence[PromptImage]) -> None:
        """Process images ahead of their prefill; see ``IllustratedDecoder.check_images``."""
        for image in images:
            self._processor.check_tokens(image.data, image.num_tokens)

    def keep(self, row: int, num_tokens: int) -> KeptRow | None:  # type: ignore[override]
        """Copy the beginning of a row; see ``Decoder.keep``. On a GPU a step ahead may have been appended to it."""
        return self._cache.keep(row, num_tokens) if self._device.type == "cpu" else None

    def kept_bytes(self, num_tokens: int) -> int:
        """Count the bytes of what ``keep`` returns; see ``Decoder.kept_bytes``."""
        return num_tokens * self._cache.token_bytes if self._device.type == "cpu" else 0

    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences of text; see ``Decoder.prefill``."""
        if any(kept):
            return self.prefill_illustrated(sequences, rows, [()] * len(sequences), kept)
        self._differences[[row for targets in rows for row in targets]] = 0
        return super().prefill(sequences, rows)

    @torch.inference_mode()
    def prefill_illustrated(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        images: Sequence[Sequence[PromptImage]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences with images; see ``IllustratedDecoder.prefill_illustrated``."""
        had = kept or [None] * len(sequences)
        fresh = [number for number, each in enumerate(had) if each is None]
        if len(fresh) == len(had):
            return self._padded(sequences, rows, images)
        found = [torch.empty(0)] * len(had)
        if fresh:
            whole = self._padded([sequences[n] for n in fresh], [rows[n] for n in fresh], [images[n] for n in fresh])
            for place, number in enumerate(fresh):
                found[number] = whole[place : place + 1]
        for number, each in enumerate(had):
            if each is not None:
                found[number] = self._behind(*each, sequences[number], rows[number], images[number])
        return torch.cat(found)

    def _behind(
        self, kept: KeptRow, num_kept: int, sequence: Tokens, rows: Sequence[int], images: Sequence[PromptImage]
    ) -> Tensor:
        """Compute the rest of one sequence: [1, V] logits."""
        length = sequence.shape[0]
        positions = torch.from_numpy(self._positions(length, rows, images)[..., num_kept:]).to(self._device)
        token_ids = torch.from_numpy(sequence[num_kept:]).to(self._device)[None]
        computed = DynamicCache()
        for layer, (keys, values) in enumerate(zip(kept.keys, kept.values, strict=True)):
            computed.update(keys[None, :, :num_kept], values[None, :, :num_kept], layer)
        found = self._model.base_model.language_model(
            **self._read(token_ids, _placed([images], [length], length - num_kept)),
            attention_mask=torch.ones((1, length), dtype=torch.int64, device=self._device),
            position_ids=positions.unsqueeze(-2),
            past_key_values=computed,
            use_cache=True,
        )
        self._cache.write(computed, [length], [rows])
        logits: Tensor = self._model.get_output_embeddings()(found.last_hidden_state[:, -1])
        return logits

    def _read(self, token_ids: Tensor, placed: PlacedImages) -> Mapping[str, Any]:
        """Return what the language model reads: tokens, or what an image is in their places."""
        return self._tower.arguments(token_ids, placed.to(self._device)) if placed.images else {"input_ids": token_ids}

    def _positions(self, length: int, rows: Sequence[int], images: Sequence[PromptImage]) -> npt.NDArray[np.int64]:
        """Compute the positions of a sequence, and note where its rows continue: [3, length], or [length]."""
        own = _positions(self._processor, length, images)
        self._differences[list(rows)] = int(own[..., -1].max()) + 1 - length
        return own

    def _padded(
        self, sequences: Sequence[Tokens], rows: Sequence[Sequence[int]], images: Sequence[Sequence[PromptImage]]
    ) -> Tensor:
        """Compute whole sequences, padded on the left."""
        lengths, padded = padded_left(sequences)
        width = padded.shape[1]
        own = [self._positions(*each) for each in zip(lengths, rows, images, strict=True)]
        positions = np.zeros((*own[0].shape[:-1], len(sequences), width), dtype=np.int64)
        for number, (length, places) in enumerate(zip(lengths, own, strict=True)):
            positions[..., number, width - length :] = places
        token_ids = torch.from_numpy(padded).to(self._device)
        columns = torch.arange(width, device=self._device)
        computed = DynamicCache()
        found = self._model.base_model.language_model(
            **self._read(token_ids, _placed(images, lengths, width)),
            attention_mask=(columns >= width - torch.tensor(lengths, device=self._device).unsqueeze(1)).long(),
            position_ids=torch.from_numpy(positions).to(self._device),
            past_key_values=computed,
            use_cache=True,
        )
        self._cache.write(computed, lengths, rows)
        logits: Tensor = self._model.get_output_embeddings()(found.last_hidden_state[:, -1])
        return logits

    def _next_positions(self, lengths: Tensor) -> Tensor:
        return lengths + self._differences[: lengths.shape[0]]

    def _move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        self._move_cached(sources, targets, longest)
        self._differences[list(targets)] = self._differences[list(sources)]

    def release(self) -> None:
        """Free weights, cache and what was computed of images; see ``Decoder.release``."""
        super().release()
        self._tower.forget()


class RecomputingVisionDecoder(RecomputingDecoder):
    """An ``IllustratedDecoder`` without a cache, as ``RecomputingDecoder``; what a tower computed of images is kept.

    Args:
        processor: of the model's folder.
        model: of transformers, with a tower.
        weights: the same model's.
        num_rows: rows.
    """

    def __init__(self, processor: ImageProcessor, model: nn.Module, weights: ModelWeights, num_rows: int) -> None:
        super().__init__(model, weights, num_rows)
        self.description = f"{self.description}, with images"
        self._model: Any = model
        self._tower = Tower(model.base_model, processor, is_frozen=True)
        self._processor = processor
        self._images: list[tuple[PromptImage, ...]] = [()] * num_rows
        forget = self._tower.forget
        self.switch, self.restore, self.release = (
            _and_then(each, forget) for each in (self.switch, self.restore, self.release)
        )

    def check_images(self, images: Sequence[PromptImage]) -> None:
        """Process images ahead of their prefill; see ``IllustratedDecoder.check_images``."""
        for image in images:
            self._processor.check_tokens(image.data, image.num_tokens)

    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Remember and compute sequences of text; see ``Decoder.prefill``."""
        return self.prefill_illustrated(sequences, rows, [()] * len(sequences))

    @torch.inference_mode()
    def prefill_illustrated(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        images: Sequence[Sequence[PromptImage]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Remember and compute sequences with images; see ``IllustratedDecoder.prefill_illustrated``."""
        for sequence, targets, had in zip(sequences, rows, images, strict=True):
            for row in targets:
                self._rows[row], self._images[row] = sequence.tolist(), tuple(had)
        return self._compute_rows([targets[0] for targets in rows])

    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows; see ``Decoder.decode``."""
        for row, length in enumerate(lengths.tolist()):
            if not length:  # Its sample has ended: what is computed for it is not read.
                self._images[row] = ()
        return super().decode(token_ids, lengths, longest)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy rows to other rows."""
        super().move_rows(sources, targets, longest)
        for source, target in zip(sources, targets, strict=True):
            self._images[target] = self._images[source]

    def _compute_rows(self, rows: Sequence[int]) -> Tensor:
        dtype = self._model.get_output_embeddings().weight.dtype
        logits = torch.empty((len(rows), self.vocab_size), dtype=dtype, device=self._device)
        plain = [place for place, row in enumerate(rows) if not self._images[row]]
        if plain:
            logits[plain] = super()._compute_rows([rows[place] for place in plain])
        for place, row in enumerate(rows):
            if self._images[row]:
                logits[place] = self._shown(self._rows[row], self._images[row])
        return logits

    def _shown(self, sequence: Sequence[int], images: Sequence[PromptImage]) -> Tensor:
        """Compute the logits behind a sequence with images: [V]."""
        token_ids = torch.tensor([sequence], device=self._device)
        positions = torch.from_numpy(_positions(self._processor, len(sequence), images)).unsqueeze(-2)
        found = self._model.base_model.language_model(
            **self._tower.arguments(token_ids, _placed([images], [len(sequence)], len(sequence)).to(self._device)),
            position_ids=positions.to(self._device),
            use_cache=False,
        )
        logits: Tensor = self._model.get_output_embeddings()(found.last_hidden_state[0, -1])
        return logits


def _and_then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _positions(processor: ImageProcessor, num_tokens: int, images: Sequence[PromptImage]) -> npt.NDArray[np.int64]:
    spans = [ImageSpan(image.start, *processor.grid_of(image.data)) for image in images]
    return processor.positions(num_tokens, spans)


def _placed(images: Sequence[Sequence[PromptImage]], lengths: Sequence[int], width: int) -> PlacedImages:
    """Place the images of rows that end together; each distinct one is computed once.

    Of a sequence that is longer than its row only the end is there, and so of its images.
    """
    distinct: dict[bytes, int] = {}
    num_features = 0
    places, sources = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for number, (had, length) in enumerate(zip(images, lengths, strict=True)):
        missing = max(0, length - width)
        for image in (each for each in had if each.end > missing):
            if image.data not in distinct:
                distinct[image.data] = num_features
                num_features += image.num_tokens
            tokens = np.arange(max(0, missing - image.start), image.num_tokens)
            places.append(number * width + width - length + image.start + tokens)
            sources.append(distinct[image.data] + tokens)
    return PlacedImages(
        tuple(distinct), torch.from_numpy(np.concatenate(places)), torch.from_numpy(np.concatenate(sources))
    )
