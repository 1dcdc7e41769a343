"""Puts the feeder of an experiment together: where its rows come from, and in which order."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.made import GroupMaker
from flotilla.services.gateway.datasets.outcomes import Outcomes
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.pools import PoolOrder
from flotilla.services.gateway.feeder.rows import Place, RowOrder
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.feeder.subscribed import SubscribedFeeder
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.store.base import Store
from flotilla.shared.clock import Clock


@dataclass(frozen=True)
class RowSources:
    """Where an experiment's rows come from, and what decides which of them is next.

    Attributes:
        dataset: the rows.
        place: records from which group on changed weights hold.
        outcomes: how rows were answered lately.
        finished: makes groups that need no rollout; None where rollouts answer the rows.
    """

    dataset: Dataset
    place: Place
    outcomes: Outcomes
    finished: GroupMaker | None = None


def open_feeder(
    experiment: Experiment, sources: RowSources, store: Store, clock: Clock, status: FeederStatus
) -> Feeder:
    """Make the feeder of an experiment."""
    has_pools = experiment.spec.data.curriculum is not None
    pools = PoolOrder(experiment, store, clock, sources.outcomes) if has_pools else None
    rows = RowOrder(experiment, sources.dataset, sources.place, pools)
    return Feeder(experiment, rows, store, clock, status, sources.finished)


def open_subscribed(
    experiment: Experiment,
    store: Store,
    clock: Clock,
    status: FeederStatus,
    *,
    source: Callable[[], Experiment | None],
    on_end: Callable[[Experiment], Awaitable[None]],
) -> Feeder:
    """Make the feeder of an experiment that trains the groups of another; see ``SubscribedFeeder``."""
    return SubscribedFeeder(experiment, store, clock, status, source=source, on_end=on_end)


async def unsubscribe(experiment: Experiment, source: Experiment | None) -> None:
    """Let nothing be kept for an experiment any more; again without effect."""
    if source is not None:
        await source.train.sharing.unsubscribe(experiment.id)
