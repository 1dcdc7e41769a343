"""Which row each group answers while what decides that changes: recorded before a group is issued by it.

What was graded moves rows between the pools of a curriculum with each version, and is stored before it counts.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from flotilla.services.gateway.datasets.curriculum import Curriculum, Outcomes, Snapshot
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.mixture import ChangedMixture
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.records.steering import pool_weights_by_group, weights_by_group
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.writes import CURRICULUM, PointRecord, PutMetrics, PutWindow
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.schemas.experiment import Origin
from flotilla.shared.schemas.live_changes import LiveChange


class PoolOrder:
    """The curriculum of one experiment.

    Args:
        outcomes: what reward services report.
    """

    def __init__(self, experiment: Experiment, store: Store, clock: Clock, outcomes: Outcomes) -> None:
        self._experiment, self._store, self._clock, self._outcomes = experiment, store, clock, outcomes
        self._curriculum: Curriculum | None = None
        self._version: int | None = None
        self._seen: dict[str, int] = {}

    async def at(self, first: int, changes: tuple[LiveChange, ...], dataset: Dataset) -> Curriculum:
        """Return what draws the rows of groups from one on that was not issued.

        A gateway that has just begun draws by the stored snapshot, and takes grades with the next version.
        """
        version = self._experiment.record.policy_version
        line = pool_weights_by_group(self._experiment.steering.base, changes)
        if self._curriculum is None:
            kept = Snapshot.of(await self._store.window(self._experiment.id, CURRICULUM))
            self._seen, self._version = kept.seen, version if kept.asked else None
            self._curriculum = await self._made(dataset, kept, line)
        if self._version != version:
            # In threads: a large dataset takes a while, and other experiments share this loop.
            new = self._outcomes.since(self._seen)
            snapshot = await asyncio.to_thread(partial(self._curriculum.advanced, first, new))
            made = await self._made(dataset, snapshot, line)
            await self._keep(snapshot, made, version)
            self._curriculum, self._version, self._seen = made, version, snapshot.seen
        if self._curriculum.line != line:
            # What was drawn ahead by the weights of before was not issued: a gateway that comes back would not know it.
            again = await asyncio.to_thread(partial(self._curriculum.advanced, first, ()))
            self._curriculum = await self._made(dataset, again, line)
        return self._curriculum

    async def _made(
        self, dataset: Dataset, snapshot: Snapshot, line: tuple[tuple[int, tuple[float, ...]], ...]
    ) -> Curriculum:
        config = dataset.config.curriculum
        assert config is not None
        make: Callable[[], Curriculum] = partial(Curriculum, config, len(dataset.rows), dataset.seed, snapshot, line)
        return await asyncio.to_thread(make)

    async def _keep(self, snapshot: Snapshot, made: Curriculum, version: int) -> None:
        """Store the snapshot, and how many rows each pool has, before a group is issued by them."""
        at, step = rfc3339(self._clock.now()), self._experiment.record.published_step
        points = [
            PointRecord(name=f"curriculum/{name}/rows", step=step, version=version, value=float(size), at=at)
            for name, size in made.sizes.items()
        ]
        async with self._store.transaction() as change:
            change.write(PutWindow(self._experiment.id, CURRICULUM, snapshot.to_json()))
            change.write(PutMetrics(self._experiment.id, points))


Place = Callable[[str, int], Awaitable[None]]
"""Records, for an experiment, the first group whose row is chosen by what was changed."""


class RowOrder:
    """The rows of one experiment, in the order in which its groups take them.

    Args:
        dataset: as its spec has it.
        place: see ``LiveChanges.place``; None where nothing can change.
        pools: of its curriculum; None without one.

    Attributes:
        dataset: knows the row of each group passed to ``settle``, and of those before.
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
