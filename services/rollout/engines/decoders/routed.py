"""A decoder of a mixture of experts that records what its routers choose: what ``CachedDecoder`` does, and that."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flotilla.services.rollout.engines.decoders.base import KeptRow, Tokens
from flotilla.services.rollout.engines.decoders.generic import CachedDecoder, ModelWeights
from flotilla.shared.models.routers import Routing


class RecordingDecoder(CachedDecoder):
    """A ``RoutedDecoder``.

    Args:
        routers: of the model.
        model: of transformers.
        weights: the same model's.
        num_rows: rows of the cache.
    """

    def __init__(self, routers: Routing, model: nn.Module, weights: ModelWeights, num_rows: int) -> None:
        super().__init__(model, weights, num_rows)
        self.description = f"{self.description}, with its routers recorded"
        self.routing = routers.sizes
        self._routers = routers
        self._num_computed = 0

    def prefill(
        self,
        sequences: Sequence[Tokens],
        rows: Sequence[Sequence[int]],
        kept: Sequence[tuple[KeptRow, int] | None] = (),
    ) -> Tensor:
        """Compute sequences; see ``Decoder.prefill``."""
        self._num_computed = len(sequences)
        with self._routers.recording():
            return super().prefill(sequences, rows, kept)

    def decode(self, token_ids: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Append one token to each of the first rows; see ``Decoder.decode``."""
        self._num_computed = token_ids.shape[0]
        with self._routers.recording():
            return super().decode(token_ids, lengths, longest)

    @torch.inference_mode()
    def routed(self) -> Tensor:
        """Return what the last pass chose; see ``RoutedDecoder.routed``."""
        return self._routers.taken(self._num_computed)
