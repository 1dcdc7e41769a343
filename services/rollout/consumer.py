"""Claims tasks, samples their groups and forwards them to be graded.

One dispatcher per lane claims as many tasks as there is room for; each claimed task is answered by its own asyncio
task. A task is never sampled by a version older than its ``min_version``, nor by another than its
``pinned_version``. What is interrupted is handed over with the tokens that it has; what cannot be begun is handed back.

A claim may be lost (after a pause of this process the gateway takes it for dead): its request is then ended in the
engine at once. The task may come back to this very process, so a request is named after its claim, not its task.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial

from flotilla.services.rollout.episodes.base import Episodes
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.failed_samples import FailedSamples
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.concurrency.cancelling import cancelled_by
from flotilla.shared.errors import ClaimLost, DataError, EpisodeFailed, FlotillaError, InvalidRequest, WorkerDied
from flotilla.shared.net.retry import DATA_PLANE, retry
from flotilla.shared.schemas.task import Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.holding import LostClaims, holding
from flotilla.shared.streams.hop import REDUNDANT, Claim, Hop, Renewal, Resolution
from flotilla.shared.streams.partials import is_finished
from flotilla.shared.telemetry.tracing.recording import group_span

log = logging.getLogger(__name__)

CLAIM_WAIT_SECONDS = 1.0
HAND_BACK_SECONDS = 5.0
VERSION_WAIT_SECONDS = 60.0
OTHER_VERSION_PAUSE_SECONDS = 0.2
UNAVAILABLE_PAUSE_SECONDS = 1.0
"""So long a task is held that waits for another version, or for an engine or a tool that is unavailable: handed back
at once, it would come straight back here."""

UNREADABLE = "unreadable"
ROLLOUT_TIMEOUT = "rollout_timeout"
"""Reasons for which a task fails, besides the codes of ``InvalidRequest``, ``EpisodeFailed``, ``DataError`` and their
kinds."""


@dataclass
class HandOverCounts:
    """What a worker handed over, and what it made of what it was handed.

    Attributes:
        groups_handed_over, tokens_handed_over: given to the next rollout, finished members included.
        groups_resumed, tokens_resumed: taken from an earlier rollout into groups that were answered.
        tokens_restarted: came with a task and could not be kept (mixed versions, too old): sampled afresh.
    """

    groups_handed_over: int = 0
    tokens_handed_over: int = 0
    groups_resumed: int = 0
    tokens_resumed: int = 0
    tokens_restarted: int = 0

    def answered(self, claim: Claim, group: Group) -> None:
        """Count a group that was forwarded."""
        resumed = self._count_restarted(claim, group)
        self.groups_resumed += bool(resumed)
        self.tokens_resumed += resumed

    def handed_over(self, claim: Claim, group: Group) -> None:
        """Count a group that was handed over."""
        self._count_restarted(claim, group)
        self.groups_handed_over += 1
        self.tokens_handed_over += group.num_sampled

    def to_load(self) -> dict[str, float]:
        """Make gauges of it."""
        return asdict(self)

    def _count_restarted(self, claim: Claim, group: Group) -> int:
        resumed = sum(member.resumed_tokens for member in group.trajectories)
        self.tokens_restarted += max(0, claim.header.token_count - resumed)
        return resumed


class BusyTime:
    """Time in which at least one group was being sampled, and time in which none was.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._busy_seconds = 0.0
        self._busy_since = 0.0
        self._num_groups = 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Count the block as one group's sampling; blocks may overlap."""
        if self._num_groups == 0:
            self._busy_since = self._clock()
        self._num_groups += 1
        try:
            yield
        finally:
            self._num_groups -= 1
            if self._num_groups == 0:
                self._busy_seconds += self._clock() - self._busy_since

    def to_load(self) -> dict[str, float]:
        """Return both as gauges, in seconds since it began; they only grow, so that their differences are a span's."""
        now = self._clock()
        busy = self._busy_seconds + (now - self._busy_since if self._num_groups else 0.0)
        return {"busy_seconds": busy, "idle_seconds": now - self._started - busy}


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """How one lane claims.

    Attributes:
        name: for logs and task names.
        max_groups: groups in work at the same time.
        task_seconds: longest time to sample one task's group, once its version serves; None where the episodes end
            by times of their own.
        max_lag: groups are ended that a version makes older than so many versions; None: they are finished.
    """

    name: str
    max_groups: int
    task_seconds: float | None
    max_lag: int | None = None


class _TooOld(Exception):  # no error: others were finished first
    """A new version makes what is being sampled too old."""


class RolloutConsumer:
    """Answers the tasks of one experiment.

    Args:
        lanes: how to claim, and from where, for each lane.
        episodes: what samples a group.
        gate: the serving version.
        on_engine_death: called when the engine's process ended under a task.
        tally: what the episodes count in; reported from here.
        failed: records tasks that fail; None: they are not recorded.
        max_failures: this many failed tasks in a row fail the experiment.
        called: the name of this service, to compare rollouts; empty while it has no name.

    Attributes:
        pool: of machines, which this service is in; None: it names none.
    """

    def __init__(
        self,
        lanes: list[tuple[LaneConfig, Hop]],
        episodes: Episodes,
        gate: VersionGate,
        on_engine_death: Callable[[WorkerDied], None],
        tally: SamplingTally | None = None,
        failed: FailedSamples | None = None,
        max_failures: int = 32,
        called: Callable[[], str] = str,
    ) -> None:
        self._called = called
        self.pool: str | None = None
        self._lanes = lanes
        self._episodes = episodes
        self._gate = gate
        self._on_engine_death = on_engine_death
        self._failed = failed
        self._max_failures = max_failures
        self._claiming = asyncio.Event()
        self._is_interrupted = asyncio.Event()
        self._claims_under_way = 0
        self._arranged: dict[Claim, Hop] = {}
        self._held: dict[tuple[str, str], Renewal] = {}
        self.in_work = 0
        self.answered = 0
        self.failures_in_a_row = 0
        self.last_error: str | None = None
        self._lost = LostClaims("claims were lost, their requests were ended")
        self.busy = BusyTime()
        self.counts = HandOverCounts()
        self.tally = tally or SamplingTally()

    @property
    def is_idle(self) -> bool:
        """Whether it holds no claim, and none is on its way to it; asked of one that is paused."""
        return not self.in_work and not self._claims_under_way

    @property
    def why_hopeless(self) -> str | None:
        """Return why sampling will not recover by itself, once too many tasks in a row could not be answered."""
        if self.failures_in_a_row < self._max_failures:
            return None
        return f"{self.failures_in_a_row} tasks in a row could not be answered; the last error: {self.last_error}"

    def resume(self) -> None:
        """Claim tasks."""
        self._is_interrupted.clear()
        self._claiming.set()

    def pause(self) -> None:
        """Claim no more tasks; those in work are finished."""
        self._claiming.clear()

    async def interrupt(self) -> None:
        """Claim no more tasks, and hand over what is in work with the tokens that it has, until ``resume``."""
        self.pause()
        self._is_interrupted.set()
        await self._episodes.interrupt()

    async def run(self) -> None:
        """Work until cancelled; what is in work is then handed back."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for config, hop in self._lanes:
                    tasks.create_task(self._dispatch(config, hop, tasks), name=f"{config.name} dispatcher")
        finally:
            # A task that is cancelled before its first step runs nothing of its own.
            unbegun = [self._give_up(hop, claim) for claim, hop in self._arranged.items()]
            await asyncio.shield(asyncio.gather(*unbegun))
            self._arranged.clear()

    async def _dispatch(self, config: LaneConfig, hop: Hop, tasks: asyncio.TaskGroup) -> None:
        room = asyncio.Semaphore(config.max_groups)
        while True:
            await self._claiming.wait()
            await room.acquire()
            extra = 0
            while extra + 1 < config.max_groups and not room.locked():
                await room.acquire()
                extra += 1
            claims: list[Claim] = []
            try:
                claims = await self._claim(config, hop, 1 + extra)
            finally:
                for _ in range(1 + extra - len(claims)):
                    room.release()
            for claim in claims:
                if (former := self._held.get((config.name, claim.entry_id))) is not None:
                    # It comes again: what this process held of it is lost, though renewing has not found that yet.
                    former.lost.set()
                self.in_work += 1
                self._arranged[claim] = hop
                answer = tasks.create_task(self._answer(config, hop, claim), name=f"{config.name} {claim.entry_id}")
                answer.add_done_callback(lambda _: self._is_done(room))

    def _is_done(self, room: asyncio.Semaphore) -> None:
        self.in_work -= 1
        room.release()

    async def _claim(self, config: LaneConfig, hop: Hop, count: int) -> list[Claim]:
        """Claim tasks; what arrives after a pause began is given back at once."""
        self._claims_under_way += 1
        try:
            claims = await hop.claim(count=count, wait_seconds=CLAIM_WAIT_SECONDS)
            if not self._claiming.is_set():
                for claim in claims:
                    await self._give_up(hop, claim)
                return []
        except FlotillaError as error:
            log.warning("tasks cannot be claimed", extra={"lane": config.name, "error": repr(error)})
            await asyncio.sleep(CLAIM_WAIT_SECONDS)
            return []
        finally:
            self._claims_under_way -= 1
        return claims

    async def _answer(self, config: LaneConfig, hop: Hop, claim: Claim) -> None:
        del self._arranged[claim]
        try:
            group = await self._sampled(config, hop, claim)
            if group is not None:
                # However long the data plane is absent: what was sampled is not sampled again. Only its answer tells
                # whether the claim is still held.
                async with hop.renewing(claim):
                    await self._end(hop, claim, group)
        except ClaimLost:
            self._lost.add(claim)
        except (InvalidRequest, EpisodeFailed, DataError) as error:
            self.failures_in_a_row += 1
            self.last_error = error.detail
            log.warning("task cannot be answered", extra={"entry_id": claim.entry_id, "error": error.detail})
            await self._fail(hop, claim, error.code, error.detail)
        except WorkerDied as error:
            self._on_engine_death(error)
            await self._give_up(hop, claim)
        except FlotillaError as error:
            log.warning("task is handed back", extra={"entry_id": claim.entry_id, "error": repr(error)})
            await self._give_up(hop, claim)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(hop, claim))
            raise

    async def _sampled(self, config: LaneConfig, hop: Hop, claim: Claim) -> Group | None:
        """Sample a task's group under the right version; None if the claim has ended otherwise.

        Raises:
            ClaimLost: it was lost meanwhile, and the engine no longer samples it.
        """
        async with self._holding(config, hop, claim):
            try:
                task, partials = claim.task(), claim.partials()
            except ValueError as error:
                log.warning("task is unreadable", extra={"entry_id": claim.entry_id, "error": repr(error)})
                await self._fail(hop, claim, UNREADABLE, repr(error))
                return None
            version = await self._right_version(task, claim.header.newest_version)
            if version is None:
                await self._hold(OTHER_VERSION_PAUSE_SECONDS)
                await hop.hand_back(claim)
                return None
            sampling = asyncio.timeout(config.task_seconds)
            oldest = min(version, claim.header.oldest_version) if partials else version
            try:
                with self.busy.sampling():
                    async with sampling, self._while_young(config, oldest):
                        with group_span("rollout", task, {"flotilla.version": version}) as facts:
                            group = await self._episodes.run(task, partials, version, delivery=claim.token)
                            facts["flotilla.tokens"] = group.num_sampled
            except FlotillaError as error:
                if error.retryable:
                    await self._hold(UNAVAILABLE_PAUSE_SECONDS)
                raise
            except _TooOld:
                log.info("group is ended, others were finished first", extra={"entry_id": claim.entry_id})
                await retry(partial(hop.resolve, claim, Resolution.DROPPED, REDUNDANT), waiting_for=DATA_PLANE)
                return None
            except TimeoutError:
                if not sampling.expired():
                    raise
                log.warning("task took too long", extra={"entry_id": claim.entry_id, "seconds": config.task_seconds})
                await self._fail(hop, claim, ROLLOUT_TIMEOUT, f"not sampled within {config.task_seconds:g} s")
                return None
            if task.pinned_version is not None and (others := _sampled_by(group) - {task.pinned_version}):
                # The engine was given other weights before it began: the answer's version would be unknown.
                log.warning("task was sampled by another version", extra={"versions": sorted(others)})
                await self._hold(OTHER_VERSION_PAUSE_SECONDS)
                await hop.hand_back(claim)
                return None
            return group

    async def _hold(self, seconds: float) -> None:
        """Keep a claim that is to be handed back for some seconds, or until the worker is interrupted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_interrupted.wait()

    @asynccontextmanager
    async def _while_young(self, config: LaneConfig, oldest: int) -> AsyncIterator[None]:
        """End the block once a version comes that makes tokens of version ``oldest`` too old.

        Raises:
            _TooOld: it did.
        """
        if config.max_lag is None:
            yield
            return
        too_old = partial(self._gate.comes, oldest + config.max_lag + 1)
        async with cancelled_by(too_old, _TooOld(), name="age"):
            yield

    @asynccontextmanager
    async def _holding(self, config: LaneConfig, hop: Hop, claim: Claim) -> AsyncIterator[None]:
        key = config.name, claim.entry_id
        async with holding(hop, claim) as renewal:
            self._held[key] = renewal
            try:
                yield
            finally:
                if self._held.get(key) is renewal:
                    del self._held[key]

    async def _end(self, hop: Hop, claim: Claim, group: Group) -> None:
        """Forward a group that is finished; hand another one over with what it has."""
        if all(is_finished(member) for member in group.trajectories):
            group = group.timed("generated_after_seconds", time.time())
            if (name := self._called()) or self.pool is not None:
                group = group.sampled_by(name or None, self.pool)
            is_forwarded = await retry(partial(hop.forward, claim, group), waiting_for=DATA_PLANE)
            self.answered += is_forwarded
            self.failures_in_a_row = 0
            if is_forwarded:
                self.counts.answered(claim, group)
            else:
                log.info("claim was lost, group discarded", extra={"group_id": claim.header.group_id})
            return
        partials = tuple(member if member.num_sampled else None for member in group.trajectories)
        if not any(partials):
            await self._give_up(hop, claim)
        elif await retry(partial(hop.hand_over, claim, partials), waiting_for=DATA_PLANE):
            self.counts.handed_over(claim, group)
        else:
            log.info("claim was lost, tokens discarded", extra={"group_id": claim.header.group_id})

    async def _right_version(self, task: Task, newest: int) -> int | None:
        """Wait for a version that may sample the task, tokens that it was handed over with considered.

        Returns:
            The version; None if it does not come, is another than the pinned one, or the worker is interrupted.
        """
        wanted = max(task.min_version, newest) if task.pinned_version is None else task.pinned_version
        waiting = asyncio.create_task(self._gate.at_least(wanted, VERSION_WAIT_SECONDS), name="version")
        interrupted = asyncio.create_task(self._is_interrupted.wait(), name="interruption")
        try:
            await asyncio.wait([waiting, interrupted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task_of_mine in (waiting, interrupted):
                task_of_mine.cancel()
            await asyncio.gather(waiting, interrupted, return_exceptions=True)
        if self._is_interrupted.is_set() or waiting.cancelled():
            return None
        if waiting.exception() is not None:
            log.warning("task waits for a version that does not come", extra={"version": wanted})
            return None
        version = waiting.result()
        return version if task.pinned_version in {None, version} else None

    async def _fail(self, hop: Hop, claim: Claim, reason: str, detail: str) -> None:
        if self._failed is not None and reason != UNREADABLE:
            self._failed.keep(claim.task(), claim.partials(), reason, detail)
        await retry(partial(hop.resolve, claim, Resolution.FAILED, reason), waiting_for=DATA_PLANE)

    async def _give_up(self, hop: Hop, claim: Claim) -> None:
        # If this fails too, the lease ends and another consumer takes the claim over.
        try:
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await hop.hand_back(claim)
        except (FlotillaError, TimeoutError) as error:
            log.warning("claim could not be handed back", extra={"entry_id": claim.entry_id, "error": repr(error)})


def _sampled_by(group: Group) -> set[int]:
    """Name the versions that sampled a token of a group."""
    return {version for each in group.trajectories if each.num_sampled for _, version in each.versions}
