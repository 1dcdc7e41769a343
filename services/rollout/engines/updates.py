"""Weight updates that wait to be applied, in the order in which they were asked for.

The image of the first is read into the decoder's spare weights at once, while the old version goes on sampling; only
the switch waits for the batch.
"""

from dataclasses import dataclass
from pathlib import Path

from services.rollout.engines.decoder import Decoder
from services.rollout.engines.outcomes import Updated
from shared.config.asynchrony import OnWeightUpdate
from shared.errors import WeightTransferFailed


@dataclass(frozen=True, slots=True)
class Update:
    """New weights, and what happens to the samples in flight."""

    update_id: int
    image: Path
    version: int
    mode: OnWeightUpdate


class UpdateQueue:
    """Updates in order; the first one is staged.

    Args:
        decoder: whose weights they replace.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._updates: list[Update] = []
        self._staged: Update | None = None

    def __bool__(self) -> bool:
        return bool(self._updates)

    def add(self, update: Update) -> None:
        """Add an update behind the others."""
        self._updates.append(update)

    def cancel(self, update_id: int) -> None:
        """Forget an update that has not been applied."""
        self._updates = [update for update in self._updates if update.update_id != update_id]

    def clear(self) -> None:
        """Forget all updates."""
        self._updates.clear()

    def stage_first(self) -> tuple[Update | None, list[Updated]]:
        """Stage the first update whose image fits.

        Returns:
            The update that is staged now, or None, and a report of each one that was refused.
        """
        refused = []
        while self._updates and self._staged is not self._updates[0]:
            self._staged = None
            try:
                self._decoder.stage(self._updates[0].image)
            except WeightTransferFailed as error:
                refused.append(Updated(self._updates.pop(0).update_id, error))
            else:
                self._staged = self._updates[0]
        return (self._updates[0] if self._updates else None), refused

    def apply_first(self) -> None:
        """Switch to the staged weights."""
        assert self._updates and self._staged is self._updates[0]
        self._decoder.switch()
        self._updates.pop(0)
        self._staged = None

    @property
    def first(self) -> Update | None:
        """The update that comes next."""
        return self._updates[0] if self._updates else None
