"""Which groups a step trains: those of a standing plan, or the oldest ready ones under a new plan.

With ``on_max_lag: pace``, the last step before a publication first waits for the groups that the next version would
make too old, so that they are trained and not dropped.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from flotilla.services.trainer.data.live_settings import LiveSettings
from flotilla.services.trainer.data.source import GroupSource
from flotilla.shared.checkpoints.lineage import VersionLine
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.net.retry import DATA_PLANE, retry
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.admission import Admission
from flotilla.shared.streams.plans import Plan, TrainerQueue

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
RETRY_SECONDS = 1.0
REPORT_SECONDS = 10.0

MakeDurable = Callable[[str], Awaitable[None]]
"""Given the reason."""


@dataclass(frozen=True, eq=False)
class StepGroups:
    """What a step trains.

    Attributes:
        plan: of the step.
        groups: in training order.
        is_replay: whether the plan stood already.
        wait_seconds: time until they were there, ``pace_seconds`` included.
        pace_seconds: of it, time spent waiting for groups that would have become too old.
    """

    plan: Plan
    groups: tuple[Group, ...]
    is_replay: bool
    wait_seconds: float
    pace_seconds: float


class StepPlanner:
    """Chooses and plans the groups of one step after the other."""

    def __init__(
        self,
        spec: ExperimentSpec,
        queue: TrainerQueue,
        admission: Admission,
        source: GroupSource,
        line: VersionLine,
        live: LiveSettings,
    ) -> None:
        self.live = live
        self._line = line
        self._queue = queue
        self._admission = admission
        self._source = source
        self._count = spec.groups_per_step
        self._patience_seconds = spec.rollout.task_seconds
        self._bound_lag(spec)

    def _bound_lag(self, spec: ExperimentSpec) -> None:
        self.max_lag = spec.asynchrony.resolved_max_lag
        self._paces = spec.asynchrony.on_max_lag == "pace" and self.max_lag > 0 and not spec.data.holds_groups
        self._source.bound_lag(self.max_lag)

    def aged_from(self, version: int) -> tuple[int, Callable[[int, int], int]]:
        """Return from which version lags are counted in a step that trains ``version``, and how."""
        theirs = self._source.theirs
        return (version, self._line.lag) if theirs is None else (theirs.newest, theirs.lag)

    @property
    def has_own_groups(self) -> bool:
        """Whether a lag of 0 means the weights that are trained."""
        return self._source.theirs is None

    async def spec_of(self, step: int) -> ExperimentSpec:
        """Return what a step is trained with; what was changed holds from here on if no step of its version was begun.

        The same object as long as nothing changes. It waits for the gateway where something did.
        """
        version = self._line.at(step - 1)
        is_first = self.live.has_news and self._line.is_published(step - 1)
        if is_first and await retry(lambda: self._queue.load_plan(step), waiting_for=DATA_PLANE) is None:
            await self.live.adopt(version, step - 1)
        spec = self.live.spec_at(version)
        if spec.asynchrony.resolved_max_lag != self.max_lag:
            self._bound_lag(spec)
        return spec

    async def groups_of(self, step: int, parent: str, make_durable: MakeDurable) -> StepGroups:
        """Find the groups of a step, waiting as long as it takes; the plan stands when this returns.

        Args:
            step: from 1.
            parent: the lineage that it continues.
            make_durable: writes a checkpoint now. It is asked for when groups of earlier steps are here again, as the
                server came back from its log at a state before their plan: unresolved they fill the budget. And when
                no group can come, since planned ones fill the stream: until a checkpoint they are kept.

        Raises:
            ClaimLost: a later trainer took over.
            NotFound: a plan stands and its groups are gone.
        """
        started = time.monotonic()
        standing = await retry(lambda: self._queue.load_plan(step), waiting_for=DATA_PLANE)
        if standing is not None:
            claims = await retry(lambda: self._queue.replay(step), waiting_for=DATA_PLANE)
            groups = tuple(claim.group() for claim in claims)
            self._source.mark_planned(standing)
            log.info("step is replayed from its plan", extra={"step": step, "num_groups": len(groups)})
            return StepGroups(standing, groups, True, time.monotonic() - started, 0.0)
        version = self._line.at(step - 1)
        is_paced = self._paces and self._line.is_published(step) and step < self._line.total_steps
        pace_seconds = 0.0
        while True:
            await self._until_enough(step, make_durable)
            if await retry(lambda: self._source.drop_stale(version), waiting_for=DATA_PLANE):
                continue
            if is_paced:
                pacing = time.monotonic()
                await self._await_old_groups(version, make_durable)
                pace_seconds += time.monotonic() - pacing
            chosen = self._source.oldest(self._count)
            plan = await retry(partial(self._source.plan, step, chosen, version, parent), waiting_for=DATA_PLANE)
            if plan is not None:
                groups = tuple(each.group for each in chosen)
                return StepGroups(plan, groups, False, time.monotonic() - started, pace_seconds)

    async def _until_enough(self, step: int, make_durable: MakeDurable) -> None:
        next_report = time.monotonic() + REPORT_SECONDS
        while not await self._source.until(lambda ids: len(ids) >= self._count, wait_seconds=RETRY_SECONDS):
            if (reason := await self._why_durable()) is not None:
                await make_durable(reason)
            if time.monotonic() < next_report:
                continue
            next_report += REPORT_SECONDS
            log.info("waiting for groups", extra={"step": step, "ready": self._source.num_ready, "needed": self._count})

    async def _why_durable(self) -> str | None:
        """Return why groups are missing that a checkpoint would let come; None if it would not."""
        if self._source.num_again:
            return "groups came again that no checkpoint contains"
        retained = await retry(self._queue.retained, waiting_for=DATA_PLANE)
        return "planned groups fill the scored stream" if retained.is_stuck else None

    async def _await_old_groups(self, version: int, make_durable: MakeDurable) -> None:
        """Wait for outstanding groups that the version after ``version`` would find too old, as many as fit."""
        too_old_below = self._line.oldest_allowed(version + 1, self.max_lag)
        if too_old_below <= 0:
            return
        end = time.monotonic() + self._patience_seconds
        next_report = time.monotonic() + REPORT_SECONDS
        while True:
            old = await retry(lambda: self._admission.outstanding_older_than(too_old_below), waiting_for=DATA_PLANE)
            awaited = set(old[: self._count])
            if (reason := await self._why_durable()) is not None:
                await make_durable(reason)
            if await self._source.until(awaited.issubset, wait_seconds=POLL_SECONDS):
                if len(old) > self._count:
                    log.warning("more old groups than one step holds", extra={"old": len(old), "held": self._count})
                return
            if time.monotonic() > end:
                log.warning(
                    "old groups did not arrive in time, they will be dropped",
                    extra={"group_ids": sorted(awaited), "waited_seconds": self._patience_seconds},
                )
                return
            if time.monotonic() > next_report:
                next_report += REPORT_SECONDS
                log.info("publication waits for old groups", extra={"group_ids": sorted(awaited)})
