"""Puts the feeder of an experiment together: where its rows come from, and in which order."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flotilla.services.gateway.datasets.curriculum import Outcomes
from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.made import GroupMaker
from flotilla.services.gateway.feeder.feeder import Feeder
from flotilla.services.gateway.feeder.rows import Place, PoolOrder, RowOrder
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.feeder.subscribed import SubscribedFeeder
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.store.base import Store
from flotilla.shared.clock import Clock

log = logging.getLogger(__name__)


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
    has_caught_up: Callable[[float], bool],
    on_end: Callable[[Experiment], Awaitable[None]],
) -> Feeder:
    """Make the feeder of an experiment that trains the groups of another; see ``SubscribedFeeder``."""
    return SubscribedFeeder(experiment, store, clock, status, source=source, has_caught_up=has_caught_up, on_end=on_end)


async def unsubscribe(experiment: Experiment, repository: ExperimentRepository) -> None:
    """Let nothing be kept for an experiment any more, whatever became of its source; again without effect."""
    if (source := experiment.spec.data.subscribes_to) is not None:
        train, _ = repository.planes_of(source)
        await train.sharing.unsubscribe(experiment.id)


async def end_left_subscriptions(repository: ExperimentRepository) -> None:
    """Let nothing be kept for those that are not at work.

    One whose spec is refused, or that was deleted while it was, ends no subscription itself.
    """
    for each in (*repository, *repository.unusable()):
        sharing = repository.planes_of(each.record.id)[0].sharing
        for name in await sharing.subscribers():
            subscriber = repository.find(name)
            if subscriber is None or not subscriber.is_at_work:
                log.info("a subscription was left", extra={"experiment_id": each.record.id, "subscriber": name})
                await sharing.unsubscribe(name)
