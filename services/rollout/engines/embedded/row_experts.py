"""Which experts were chosen for the tokens of each row of the batch, as far as the decoder has read them.

A token keeps the experts that were chosen when the one behind it was sampled: what is computed again after an update of
the weights, or behind tokens that came with the request, changes none of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flotilla.shared.schemas.routing import RoutedExperts, RoutingSizes

Rows = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.int16]


class RowExperts:
    """What is known of each row.

    Args:
        num_slots: the most rows.
        context_tokens: the longest prompt and completion together.
        sizes: of the model.
    """

    def __init__(self, num_slots: int, context_tokens: int, sizes: RoutingSizes) -> None:
        self._sizes = sizes
        # Only what is written takes memory.
        self._ids = np.empty((num_slots, context_tokens, sizes.num_layers, sizes.top_k), dtype=sizes.dtype)
        self._known = np.zeros(num_slots, dtype=np.int64)

    def begin(self, rows: Rows) -> None:
        """Forget what rows held: others join there."""
        self._known[rows] = 0

    def resume(self, row: int, experts: RoutedExperts) -> None:
        """Keep what came with the tokens that a sample has already.

        Raises:
            ValueError: it is no record of this model's.
        """
        if experts.sizes != self._sizes:
            raise ValueError(f"routed experts are of {experts.sizes}, this model has {self._sizes}")
        self._ids[row, : experts.num_tokens] = experts.ids()
        self._known[row] = experts.num_tokens

    def prefilled(self, lengths: Sequence[int], rows: Sequence[Rows], chosen: Chosen) -> None:
        """Record what a prefill chose for tokens that nothing was known of.

        Args:
            lengths: tokens of each sequence.
            rows: that each is in.
            chosen: [sequences, W, layers, top_k], a sequence's tokens last.
        """
        for length, targets, of_sequence in zip(lengths, rows, chosen, strict=True):
            own = of_sequence[of_sequence.shape[0] - length :]
            for row in targets.tolist():
                known = int(self._known[row])
                self._ids[row, known:length] = own[known:]
                self._known[row] = max(known, length)

    def append(self, rows: Rows, chosen: Chosen) -> None:
        """Record what a step chose for the token that each row appended: [rows, layers, top_k]."""
        self._ids[rows, self._known[rows]] = chosen
        self._known[rows] += 1

    def move(self, sources: Rows, targets: Rows) -> None:
        """Copy rows to other rows."""
        longest = int(self._known[sources].max())
        self._ids[targets, :longest] = self._ids[sources, :longest]
        self._known[targets] = self._known[sources]

    def of(self, row: int) -> RoutedExperts:
        """Return what is known of a row, from its first token on."""
        return RoutedExperts.of(self._ids[row, : self._known[row]], self._sizes.num_experts)
