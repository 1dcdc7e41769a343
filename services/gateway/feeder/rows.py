"""Which row each group answers while what decides that changes: recorded before a group is issued by it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.mixture import ChangedMixture
from flotilla.services.gateway.feeder.pools import PoolOrder
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.records.steering import weights_by_group
from flotilla.shared.schemas.experiment import Origin
from flotilla.shared.schemas.live_changes import LiveChange

Place = Callable[[str, int], Awaitable[None]]
"""Records, for an experiment, the first group whose row is chosen by what was changed."""


class RowOrder:
    """The rows of one experiment, in the order in which its groups take them.

    Args:
        dataset: as its spec has it.
        place: see ``LiveChanges.place``; None where nothing can change.
        pools: of its curriculum; None without one.

    Attributes:
        dataset: says the row of each group that ``settle`` was asked about, and of those before.
    """

    def __init__(
        self, experiment: Experiment, dataset: Dataset, place: Place | None = None, pools: PoolOrder | None = None
    ) -> None:
        self._experiment, self._place, self._pools = experiment, place, pools
        self._known: tuple[LiveChange, ...] | None = None
        self.dataset = dataset

    async def settle(self, first: int) -> None:
        """Follow what was changed, and graded, from a group on that was not issued."""
        changes = await self._placed(first)
        if self._pools is not None:
            curriculum = await self._pools.at(first, changes, self.dataset)
            if curriculum is not self.dataset.curriculum:
                self.dataset = replace(self.dataset, curriculum=curriculum)
            return
        if self.dataset.mixture is None or self._known is changes:
            return
        origin = self._experiment.record.origin
        parent = None if origin is None else Origin.model_validate(origin)
        begun = () if parent is None else (parent.source_weights, parent.first_group_id)
        line = weights_by_group(self._experiment.steering.base, changes, *begun)
        mixture = ChangedMixture([(each.group_id, each.weights) for each in line])
        self.dataset, self._known = replace(self.dataset, mixture=mixture), changes

    async def _placed(self, first: int) -> tuple[LiveChange, ...]:
        """Record from which group on changes hold that no group was issued by."""
        changes = self._experiment.steering.changes
        if self._place is None or not any(each.reweighs_rows and each.group_id is None for each in changes):
            return changes
        await self._place(self._experiment.id, first)
        return self._experiment.steering.changes
