"""The feeder of an experiment that trains the groups of another: it takes them as that one's rewards score them.

    source: scored --same step--> shared --read--> subscriber: scored, trimmed --confirm--> shared, deleted

Taking is one step in the subscriber's own data plane, which knows how far it came: what was taken and not confirmed is
found taken. A number means a group in one life of the server alone: one that comes back without the end of its log
gives it to another group, so what was read before is neither taken nor confirmed then. From there on the groups are
like any others of the subscriber: claims, plans, checkpoints, ledger.
"""

import logging
from collections.abc import Awaitable, Callable

from flotilla.services.gateway.feeder.admission import admitted, check_taken
from flotilla.services.gateway.feeder.feeder import BLOCKED_SECONDS, Feeder
from flotilla.services.gateway.feeder.status import FeederStatus
from flotilla.services.gateway.records.repository import Experiment
from flotilla.services.gateway.store.base import Store
from flotilla.shared.clock import Clock
from flotilla.shared.errors import DataError

log = logging.getLogger(__name__)

READER = "gateway"
BATCH = 16
"""Groups taken at once; a large one is a megabyte."""
SUBSCRIBE_SECONDS = 1.0
"""A server that came back from its log may have forgotten a subscription."""
LOOK_SECONDS = 1.0
"""Between two looks at which of the source's groups may still come: checkpoints of this experiment list no others."""
REFUSED = 64
"""Number of refused groups, with none trained, after which all are assumed to be refused."""


class SubscribedFeeder(Feeder):
    """Takes the groups of another experiment while this one runs.

    Args:
        source: finds the experiment whose groups are taken; None where there is none that can be used.
        has_caught_up: whether the present trainer has reached the step that was reported for this experiment, and has
            called since a given time of the clock: a stop would find one that hangs, and what it has trained since its
            last checkpoint would be lost.
        on_end: called, with the source, once that has ended and what it gave does not fill a step.
    """

    def __init__(
        self,
        experiment: Experiment,
        store: Store,
        clock: Clock,
        status: FeederStatus,
        *,
        source: Callable[[], Experiment | None],
        has_caught_up: Callable[[float], bool],
        on_end: Callable[[Experiment], Awaitable[None]],
    ) -> None:
        super().__init__(experiment, None, store, clock, status)
        self._find_source = source
        self._has_caught_up = has_caught_up
        self._on_end = on_end
        self._subscribed_at: float | None = None
        self._over_since: float | None = None
        self._looked_at: float | None = None

    async def feed(self) -> float:
        """Subscribe, however the experiment stands; take one batch while it runs.

        Raises:
            DataError: the source is gone or cannot be used, or none of its groups can be trained.
        """
        now = self._clock.monotonic()
        if self._subscribed_at is None or now - self._subscribed_at > SUBSCRIBE_SECONDS:
            sharing, admission = self._source().train.sharing, self._admission
            ours, theirs = await admission.life(), await sharing.life()
            await admission.begin_taking(await sharing.subscribe(self._experiment.id), ours)
            await sharing.confirm(self._experiment.id, await admission.taken_through(), theirs)
            self._subscribed_at = now
        return await super().feed()

    async def _has_planned(self, num_planned: int, since: float) -> bool:
        """Whether a step has a plan, and was not trained, or not again, as far as the trainer has said.

        Args:
            num_planned: groups that were planned and are in no durable checkpoint: one who comes after a trainer that
                died trains those first.
            since: when there was nothing more to come.
        """
        if not num_planned:
            return False
        if not self._has_caught_up(since):
            return True
        queue = self._experiment.train.trainer(READER)
        return await queue.load_plan(self._experiment.record.step + 1) is not None

    async def _lowest_open(self, source: Experiment, now: float) -> int | None:
        """Find the lowest id of a group that the source may still offer, now and then; else None."""
        if self._looked_at is not None and now - self._looked_at < LOOK_SECONDS:
            return None
        self._looked_at = now
        return await source.train.trainer(READER).lowest_open()

    def _source(self) -> Experiment:
        found = self._find_source()
        if found is None:
            named = self._experiment.spec.data.subscribes_to
            cause = f"data.from: the experiment {named} was deleted, or this release cannot use it"
            raise DataError(cause, field="data.from")
        return found

    async def _supply(self, version: int, now: float) -> float:
        spec, source, ledger = self._experiment.steering.in_force, self._source(), self._status.ledger
        assert ledger is not None
        # Read before the groups: what ended gives no more after that.
        is_over = source.state.is_final and source.record.final_ledger is not None
        ledger = ledger.model_copy(update={"consumed_since_publication": 0})
        # Groups that came too late, or were too old, do not predict the next ones.
        check_taken(ledger.model_copy(update={"dropped": {}}), max(REFUSED, spec.admission_budget))
        steps, groups_per_step = spec.optimisation.steps - self._first_step, spec.groups_per_step
        room = admitted(ledger, budget=spec.admission_budget, steps=steps, groups_per_step=groups_per_step)
        if room == 0:
            return BLOCKED_SECONDS
        life = await self._admission.life()
        sharing, after = source.train.sharing, await self._admission.taken_through()
        # Read before what is on offer: a group of the source that is over by now was offered before, if it ever is.
        lowest = await self._lowest_open(source, now)
        read = await sharing.read(after, min(room, BATCH))
        if read.reached <= after:
            if lowest is not None:
                await self._admission.come_from(lowest)
            if is_over and ledger.outstanding < groups_per_step:
                self._over_since = now if self._over_since is None else self._over_since
                # An end stops the trainer before its next step: one that is planned is trained first.
                if not await self._has_planned(ledger.planned, self._over_since):
                    await self._on_end(source)
            return BLOCKED_SECONDS
        self._over_since = None
        limit = max(spec.admission_budget, ledger.outstanding + room)
        taken = await self._admission.take(read, limit=limit, life=life)
        await sharing.confirm(self._experiment.id, taken.through, read.life)
        if (missed := taken.through - after - taken.count) > 0:
            facts = {"experiment_id": self._experiment.id, "source": source.id, "count": missed}
            log.warning("groups were trimmed before they could be taken", extra=facts)
        return BLOCKED_SECONDS if taken.is_full or not taken.count else 0.0
