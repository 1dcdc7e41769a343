"""From the scored stream to the groups of a step: claims in the background, hands out the oldest first.

The trainer's claims last until a later trainer takes over, so they need no renewal. What can never be trained (no
reward, too few members to compare, a token that is too old) is resolved with its reason as soon as that is known.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from flotilla.services.trainer.data.batch import baseline_of, check_group, episodes_of, experts_of, scored_trajectories
from flotilla.services.trainer.data.group_metrics import Totals
from flotilla.shared.checkpoints.lineage import VersionLine
from flotilla.shared.config.sections.advantage import GdpoConfig
from flotilla.shared.config.sections.job import KtoConfig, SftConfig
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import Conflict, DataError
from flotilla.shared.net.retry import DATA_PLANE, retry
from flotilla.shared.samples.recorder import KeepsEnded, NothingKept
from flotilla.shared.schemas.routing import RoutingSizes
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.trajectory import NO_VERSION, GradeStatus, Group
from flotilla.shared.streams.hop import REDUNDANT, STALE, Claim, Resolution
from flotilla.shared.streams.intervals import IntervalSet
from flotilla.shared.streams.plans import ENDED_BEFORE, LOST_WITH_CHECKPOINT, Plan, TrainerQueue

log = logging.getLogger(__name__)

CLAIM_COUNT = 64
CLAIM_WAIT_SECONDS = 1.0
GATHER_SECONDS = 0.1
"""While a step is computed, the groups that come within this time are claimed together."""

ReadVersion = Callable[[], Awaitable[int | None]]
"""Reads the newest version that was published; None before the first."""


@dataclass(frozen=True)
class Requirements:
    """What a group must have to be trained.

    Attributes:
        vocabulary: token ids that the model can read.
        min_scored: members with a reward; 2 where members are compared with each other.
        components: names that every reward must be made of.
        max_lag: versions that a token may be older than the one being trained.
        needs_baseline: whether its greedy answer must have a reward.
        needs_teacher: whether every member must have log-probs of a teacher.
        joins_branches: whether the branches of an episode are one member.
        too_old: the reason of what is dropped for its age.
        routing: sizes of the experts that every member must have a record of; None where none are replayed.
        is_foreign: whether versions are the numbers of another run, so that none of them is a lost one of this.
    """

    vocabulary: int
    min_scored: int
    components: tuple[str, ...]
    max_lag: int
    needs_baseline: bool = False
    needs_teacher: bool = False
    joins_branches: bool = False
    too_old: str = STALE
    routing: RoutingSizes | None = None
    is_foreign: bool = False


def requirements_of(spec: ExperimentSpec, vocabulary: int, routing: RoutingSizes | None = None) -> Requirements:
    """Return what a group must have to be trained under this spec.

    Args:
        spec: of the experiment.
        vocabulary: token ids that the model reads.
        routing: sizes of its routers, if they replay choices.
    """
    advantage = spec.algorithm.advantage
    min_scored = min(advantage.MIN_SCORED, spec.rollout.group_size)
    if spec.finished_job is not None:
        min_scored = 1 if isinstance(spec.finished_job, SftConfig | KtoConfig) else 2
    return Requirements(
        vocabulary=vocabulary,
        min_scored=min_scored,
        components=advantage.components if isinstance(advantage, GdpoConfig) else (),
        max_lag=spec.asynchrony.resolved_max_lag,
        needs_baseline=advantage.kind == "remax",
        needs_teacher=bool(spec.algorithm.distillation and spec.algorithm.distillation.servers),
        joins_branches=spec.joins_branches,
        too_old=REDUNDANT if spec.asynchrony.redundant_groups else STALE,
        routing=routing if spec.algorithm.router_replay == "R3" else None,
        is_foreign=spec.data.holds_groups,
    )


@dataclass(frozen=True, eq=False)
class ReadyGroup:
    """A claimed group that can be trained."""

    claim: Claim
    group: Group

    @property
    def group_id(self) -> int:
        """The task's id."""
        return self.group.task.group_id


class SourceVersions:
    """The versions of the experiment whose groups another one trains: how old their tokens are is counted in them.

    They are unrelated to the subscriber's own versions, whose ratios go by the recorded log-probabilities. A number
    that the source lost with a checkpoint counts like any other, so no token is older than it is said to be.

    Args:
        read: the newest that was published, or None before the first.

    Attributes:
        newest: when it was last looked for.
    """

    def __init__(self, read: ReadVersion) -> None:
        self._read = read
        self.newest = 0

    async def look(self) -> None:
        """Find the newest version.

        Raises:
            Unavailable: the data plane does not answer.
        """
        self.newest = max(self.newest, await self._read() or 0)

    def know(self, version: int) -> None:
        """Note a version that was published, as that which sampled a group of a standing plan."""
        self.newest = max(self.newest, version)

    def lag(self, trained: int, sampled: int) -> int:
        """Count the versions between two; see ``VersionLine.lag``."""
        return max(0, trained - sampled)


class GroupSource:
    """Holds the claimed groups that wait for their step.

    Args:
        queue: the trainer's, after ``take_over``.
        requirements: of a group.
        trained: ids of the groups trained in this lineage; grows elsewhere.
        totals: counts what is resolved here.
        line: the versions of the lineage.
        kept: receives groups that are not trained.
        read_theirs: reads the newest version of the experiment that samples the groups; None where it is this one, or
            one that is over.
    """

    def __init__(
        self,
        queue: TrainerQueue,
        requirements: Requirements,
        trained: IntervalSet,
        totals: Totals,
        line: VersionLine,
        kept: KeepsEnded | None = None,
        read_theirs: ReadVersion | None = None,
    ) -> None:
        self.theirs = None if read_theirs is None else SourceVersions(read_theirs)
        self._queue = queue
        self._line = line
        self._kept = NothingKept() if kept is None else kept
        self._requirements = requirements
        self._trained = trained
        self._totals = totals
        self._ready: dict[int, ReadyGroup] = {}
        self._planned: set[int] = set()
        self._plans: dict[int, Plan] = {}
        self._already_trained: list[Claim] = []
        self._durable = trained.copy()
        self._closed_below = 0
        self._changed = asyncio.Event()
        self._is_awaited = asyncio.Event()

    def bound_lag(self, max_lag: int) -> None:
        """Refuse tokens that are more than so many versions older than the one being trained, from now on."""
        self._requirements = replace(self._requirements, max_lag=max_lag)

    def close(self, below: int) -> None:
        """Know from now on of groups below an id only that they have ended, not that they were trained."""
        self._closed_below = below

    @property
    def num_ready(self) -> int:
        """Groups that could be trained now."""
        return len(self._ready)

    @property
    def num_again(self) -> int:
        """Groups that came again after they were planned here, and that no durable checkpoint contains yet."""
        return len(self._already_trained)

    async def run(self) -> None:
        """Claim until cancelled; a server that is absent is waited for.

        Raises:
            ClaimLost: a later trainer took over.
        """
        claim_some = partial(self._queue.hop.claim, CLAIM_COUNT, wait_seconds=CLAIM_WAIT_SECONDS)
        while True:
            claims = await retry(claim_some, waiting_for=DATA_PLANE)
            for claim in claims:
                await self._take_in(claim)
            if 0 < len(claims) < CLAIM_COUNT:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_SECONDS):
                        await self._is_awaited.wait()

    async def until(self, is_enough: Callable[[Collection[int]], bool], *, wait_seconds: float) -> bool:
        """Wait until the ids of the ready groups are enough; False if they were not in time."""
        self._is_awaited.set()
        try:
            async with asyncio.timeout(wait_seconds):
                while not is_enough(self._ready.keys()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return is_enough(self._ready.keys())
        finally:
            self._is_awaited.clear()
        return True

    def oldest(self, count: int) -> list[ReadyGroup]:
        """Choose the ready groups with the lowest ids, in their order."""
        return [self._ready[group_id] for group_id in sorted(self._ready)[:count]]

    async def drop_stale(self, version: int) -> int:
        """Resolve the groups that have a token too old for ``version``, and count them.

        Where another experiment samples them they are held against its newest version.
        """
        if self.theirs is not None:
            await self.theirs.look()
            version = self.theirs.newest
            oldest_allowed = version - self._requirements.max_lag
        elif self._requirements.is_foreign:
            return 0
        else:
            oldest_allowed = self._line.oldest_allowed(version, self._requirements.max_lag)
        stale = [
            each for each in self._ready.values() if NO_VERSION < each.claim.header.oldest_version < oldest_allowed
        ]
        for each in stale:
            level = logging.WARNING if self._requirements.too_old == STALE else logging.INFO
            log.log(
                level,
                "group is too old to be trained",
                extra={
                    "group_id": each.group_id,
                    "oldest_version": each.claim.header.oldest_version,
                    "trained_version": version,
                    "num_tokens": each.group.num_sampled,
                },
            )
            del self._ready[each.group_id]
            self._totals.dropped_groups += 1
            self._kept.ended(each.group, SampleKind.DROPPED, self._requirements.too_old)
            await self._resolve(each.claim, Resolution.DROPPED, self._requirements.too_old)
        return len(stale)

    async def plan(self, step: int, chosen: list[ReadyGroup], version: int, parent: str) -> Plan | None:
        """Write the plan of a step; None if a claim of it was lost, or one is too old to be trained: choose again.

        This is where a token over ``max_lag`` is refused, whatever chose it: a group may have come since the last look.

        Raises:
            Conflict: another plan of the step stands.
            ClaimLost: a later trainer took over.
        """
        if await self.drop_stale(version) and not all(each.group_id in self._ready for each in chosen):
            return None
        claims = [each.claim for each in chosen]
        if await self._queue.plan(step, claims, version, parent):
            plan = Plan.of(step, claims, version, parent)
            self.mark_planned(plan)
            return plan
        standing = await self._queue.load_plan(step)
        if standing is not None:
            raise Conflict(f"step {step} has another plan already, of groups {list(standing.group_ids)}")
        lost = {claim.header.group_id for claim in await self._queue.hop.renew(claims)}
        # A claim may be held and its group yet not outstanding: the server came back from its log in between.
        for group_id in lost or {each.group_id for each in chosen}:
            log.warning("claim of a group was lost", extra={"group_id": group_id})
            self._ready.pop(group_id, None)
        return None

    def mark_planned(self, plan: Plan) -> None:
        """Note that a plan's groups are trained from here on; they are not chosen again, even if the server forgets."""
        self._plans[plan.step] = plan
        if self.theirs is not None:
            self.theirs.know(plan.newest_version)
        for group_id in plan.group_ids:
            self._planned.add(group_id)
            self._ready.pop(group_id, None)

    async def commit(self, until: int, trained: IntervalSet, steps: Sequence[int] | None = None) -> None:
        """Make steps final: a durable checkpoint contains them. A server that is absent is waited for.

        Args:
            until: the last one that is final.
            trained: ids of the groups of all of them, and of those before.
            steps: with a plan; None for all whose plan stands, rather than what was planned since the last time: a
                server that came back from its log at an earlier state has steps again that were committed before.

        Raises:
            ClaimLost: a later trainer took over.
        """
        if steps is None:
            steps = [plan.step for plan in await retry(partial(self._queue.plans_from, 0), waiting_for=DATA_PLANE)]
        if final := [step for step in steps if step <= until]:
            await retry(partial(self._queue.commit, final), waiting_for=DATA_PLANE)
        plans = [plan for number, plan in sorted(self._plans.items()) if number <= until]
        await retry(partial(self._queue.record, plans), waiting_for=DATA_PLANE)
        await retry(partial(self.on_durable, trained), waiting_for=DATA_PLANE)

    async def on_durable(self, trained: IntervalSet) -> None:
        """Record which groups a durable checkpoint contains, and resolve those that appeared again meanwhile."""
        # A report of an older checkpoint, written beside steps that are final already, undoes nothing.
        self._durable = self._durable.union(trained)
        for step, plan in list(self._plans.items()):
            if all(group_id in self._durable for group_id in plan.group_ids):
                del self._plans[step]
        self._planned = {group_id for group_id in self._planned if group_id not in self._durable}
        held, self._already_trained = self._already_trained, []
        for claim in held:
            await self._resolve_trained(claim)

    async def _take_in(self, claim: Claim) -> None:
        group_id = claim.header.group_id
        if group_id in self._trained or group_id in self._planned:
            await self._resolve_trained(claim)
            return
        try:
            group = claim.group()
        except ValueError as error:
            await self._refuse(claim, Resolution.FAILED, "unreadable", repr(error))
            return
        self._totals.generated_tokens += group.num_sampled
        is_ours = not self._requirements.is_foreign
        if is_ours and any(self._line.is_lost(version) for version in _sampled_by(group)):
            self._totals.dropped_groups += 1
            log.warning("group was sampled by a version that is lost", extra={"group_id": group_id})
            self._kept.ended(group, SampleKind.DROPPED, LOST_WITH_CHECKPOINT)
            await self._resolve(claim, Resolution.DROPPED, LOST_WITH_CHECKPOINT)
            return
        if self._requirements.routing is None:
            problem = find_problem(group, self._requirements)
        else:  # records of experts take longer to read than leases may wait for the loop
            problem = await asyncio.to_thread(find_problem, group, self._requirements)
        if problem is not None:
            self._kept.ended(group, SampleKind(problem[0].value), problem[1])
            await self._refuse(claim, *problem)
            return
        self._ready[group_id] = ReadyGroup(claim, group)
        self._changed.set()

    async def _resolve_trained(self, claim: Claim) -> None:
        if claim.header.group_id not in self._durable:
            # It counts as trained once a checkpoint contains it: until then a crash may still undo it.
            self._already_trained.append(claim)
            return
        if claim.header.group_id < self._closed_below:
            # Were it counted as trained, fewer would be issued than the steps to come need.
            log.info("group has ended before", extra={"group_id": claim.header.group_id})
            self._totals.dropped_groups += 1
            await self._resolve(claim, Resolution.DROPPED, ENDED_BEFORE)
            return
        log.info("group was trained already", extra={"group_id": claim.header.group_id})
        await retry(partial(self._queue.resolve_already_trained, claim), waiting_for=DATA_PLANE)

    async def _refuse(self, claim: Claim, resolution: Resolution, reason: str, detail: str) -> None:
        log.info(
            "group cannot be trained", extra={"group_id": claim.header.group_id, "reason": reason, "detail": detail}
        )
        if resolution is Resolution.FILTERED:
            self._totals.filtered_groups += 1
        else:
            self._totals.failed_groups += 1
        await self._resolve(claim, resolution, reason)

    async def _resolve(self, claim: Claim, resolution: Resolution, reason: str) -> None:
        """End a group, as long as it takes: a claim has no lease here, and what is forgotten is held for ever."""
        await retry(partial(self._queue.hop.resolve, claim, resolution, reason), waiting_for=DATA_PLANE)


def _sampled_by(group: Group) -> set[int]:
    """List the versions that sampled a token of a group."""
    return {version for trajectory in group.trajectories for _, version in trajectory.versions}


def find_problem(group: Group, requirements: Requirements) -> tuple[Resolution, str, str] | None:
    """Return why a group can never be trained: resolution, reason and detail; None if it can."""
    scored = scored_trajectories(group)
    num_scored = len(set(episodes_of(scored))) if requirements.joins_branches else len(scored)
    if num_scored < requirements.min_scored:
        detail = f"{num_scored} of {len(group.trajectories)} scored, {requirements.min_scored} needed"
        has_errors = any(t.status is GradeStatus.ERROR for t in group.trajectories)
        if not scored and not has_errors:
            return Resolution.FILTERED, "abstained", detail
        return Resolution.FAILED, "too_few_scored", detail
    if not any(t.num_sampled for t in scored):
        return Resolution.FILTERED, "nothing_sampled", "no trajectory has a sampled token"
    if requirements.needs_baseline and baseline_of(group) is None:
        return Resolution.FAILED, "no_baseline", "the greedy answer has no reward"
    if requirements.needs_teacher and any(t.teacher_log_probs is None for t in scored):
        return Resolution.FAILED, "no_teacher", "a teacher's log-probabilities are missing"
    missing = [name for name in requirements.components if any(name not in t.components for t in scored)]
    if missing:
        return Resolution.FAILED, "missing_component", f"rewards lack the component {missing[0]}"
    try:
        check_group(group, requirements.vocabulary)
    except DataError as error:
        return Resolution.FAILED, "invalid_tokens", error.detail
    try:
        for each in scored if requirements.routing is not None else ():
            experts_of(each, requirements.routing)
    except DataError as error:
        return Resolution.FAILED, "invalid_experts", error.detail
    return None
