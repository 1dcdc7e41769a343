"""The decoder protocol: a model with a KV cache of rows, which the engine's batch drives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from flotilla.services.rollout.engines.base import PromptImage
from flotilla.services.rollout.engines.decoders.adapted import BaseWeights, RowAdapters
from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.shared.errors import DataError, InvalidRequest
from flotilla.shared.schemas.routing import RoutingSizes

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KeptRow:
    """A copy of the beginning of a row.

    Attributes:
        keys, values: [layers, Hkv, T, D], as the decoder keeps them.
    """

    keys: Tensor
    values: Tensor

    @property
    def num_bytes(self) -> int:
        """Count what it takes."""
        return self.keys.nbytes + self.values.nbytes


class Decoder(Protocol):
    """Computes logits for rows whose KV cache it keeps.

    A row is a place in the batch. The engine owns the assignment of samples to rows and passes the number of cached
    tokens of each row; the decoder owns the cache and the weights.
    """

    vocab_size: int
    max_positions: int
    description: str
    is_batch_invariant: bool
    """Whether a token's logits are the same to the last bit whatever is computed along with it or before it."""
    gains_by_threads: bool
    """Whether torch's threads make a token of every row faster, and change no bit of it."""
    base: BaseWeights
    """What it began with, to which images of adapters alone are added."""

    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences and store the KV of sequence i in each of ``rows[i]``.

        Args:
            sequences: at least one token each.
            rows: at least one for each.
            kept: of each what ``keep`` returned, and how many of its first tokens the sequence begins with, at least
                one and not all; None: nothing. Empty: of none.

        Returns:
            [len(sequences), V] logits after the last token of each.
        """

    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first B rows.

        Args:
            token_ids: [B] int64, on the device.
            lengths: [B] int64 on the host, cached tokens of each row before this one; 0 for rows without a sample.
            longest: the largest of ``lengths``.

        Returns:
            [B, V] logits after the token.
        """

    def keep(self, row: int, num_tokens: int) -> KeptRow | None:
        """Copy the KV of the first tokens of a row; None where there is none that could be used again."""

    def kept_bytes(self, num_tokens: int) -> int:
        """Count the bytes of what ``keep`` returns; 0 where it is None."""

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy the KV of rows to other rows, of which none is a source."""

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Make the KV of rows finite again: masked values have no effect only if finite."""

    def stage(self, image: Path, arrival: Arrival | None = None) -> None:
        """Read a weight image into the spare weights; what serves is not touched.

        Args:
            image: a safetensors file.
            arrival: of an image that is being received, which is read as it arrives; None: it is complete.

        Raises:
            WeightTransferFailed: names, shapes or dtypes do not fit.
        """

    def switch(self) -> None:
        """Make the staged weights serve."""

    def digests(self) -> Iterator[tuple[str, int]]:
        """Digest the weights that serve, as they are in memory now, by their names in images; see ``digests``.

        A name comes twice where two copies of one weight serve.
        """

    def discard(self) -> None:
        """Give the weights up, and keep their memory: the next ones that are staged, or restored, may take it.

        Nothing is computed until ``restore``, or ``stage`` and ``switch``.
        """

    def release(self) -> None:
        """Free weights, spare weights and cache; nothing is computed until ``restore``, or ``stage`` and ``switch``."""

    def restore(self) -> None:
        """Read the initial weights again.

        Raises:
            WeightTransferFailed: the model's files are not what they were.
        """


@runtime_checkable
class IllustratedDecoder(Protocol):
    """A ``Decoder`` whose sequences may contain images, beside what ``Decoder`` has."""

    def check_images(self, images: Sequence[PromptImage]) -> None:
        """Process images ahead of ``prefill_illustrated``.

        Raises:
            DataError: one cannot be read, or has another number of tokens.
        """

    def prefill_illustrated(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        images: Sequence[Sequence[PromptImage]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Do what ``prefill`` does, with the images of each sequence; none for some."""


def check_images(decoder: Decoder, images: Sequence[PromptImage]) -> None:
    """Process a request's images, so that none fails the batch that it is in.

    Raises:
        InvalidRequest: the model takes none, or one of them is not what the prompt has tokens for.
    """
    if not isinstance(decoder, IllustratedDecoder):
        raise InvalidRequest(f"the model takes no images here: it is computed as {decoder.description}")
    try:
        decoder.check_images(images)
    except DataError as error:
        raise InvalidRequest(error.detail) from error


@runtime_checkable
class AdaptingDecoder(Protocol):
    """A ``Decoder`` whose rows may have adapters of their own, beside what ``Decoder`` has.

    ``move_rows`` assigns a row's adapter to the row that it is moved to.
    """

    @property
    def row_adapters(self) -> RowAdapters | None:
        """Which row has which; None where rows cannot have any on this machine."""


@runtime_checkable
class RoutedDecoder(Protocol):
    """A ``Decoder`` that records which experts its model's routers choose, beside what ``Decoder`` has."""

    routing: RoutingSizes
    """What they choose among."""

    def routed(self) -> Tensor:
        """Return what the last pass chose, once: [rows, W, layers, top_k] int16; a row's tokens are its last ones."""


class KeepsNothing:
    """Defaults for a ``Decoder`` that promises neither reuse of KV nor batch-independent bits."""

    is_batch_invariant = False
    gains_by_threads = False

    def keep(self, row: int, num_tokens: int) -> None:
        """Keep nothing; see ``Decoder.keep``."""

    def kept_bytes(self, num_tokens: int) -> int:
        """Count nothing; see ``Decoder.kept_bytes``."""
        return 0
