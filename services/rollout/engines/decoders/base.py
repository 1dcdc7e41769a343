"""The decoder protocol: a model with a KV cache of rows, which the engine's batch drives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.rollout.engines.decoders.arrival import Arrival

Tokens = npt.NDArray[np.int64]


class Decoder(Protocol):
    """Computes logits for rows whose KV cache it keeps.

    A row is a place in the batch. The engine owns the assignment of samples to rows and tells the number of cached
    tokens of each row; the decoder owns the cache and the weights.
    """

    vocab_size: int
    max_positions: int
    description: str

    def prefill(self, sequences: Sequence[Tokens], rows: Sequence[Sequence[int]]) -> Tensor:
        """Compute sequences and store the KV of sequence i in each of ``rows[i]``.

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

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], longest: int) -> None:
        """Copy the KV of rows to other rows, of which none is a source."""

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Make the KV of rows finite again: what is masked counts for nothing only if it is."""

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

    def release(self) -> None:
        """Free weights, spare weights and cache; nothing is computed until ``restore``, or ``stage`` and ``switch``."""

    def restore(self) -> None:
        """Read the initial weights again.

        Raises:
            WeightTransferFailed: the model's files are not what they were.
        """
