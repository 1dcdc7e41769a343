"""Claims generated groups, grades their samples and forwards them to the trainer.

A failed grade is never a reward: the sample stays in its group with status error and no reward, and the trainer leaves
it out. A group none of whose samples could be graded fails; one that teaches nothing may be filtered, and the feeder
issues another in its place.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flotilla.services.reward.audit import Audit, Auditor
from flotilla.services.reward.decision import ALL_ABSTAINED, decide, used_names, why_failed, with_rules
from flotilla.services.reward.grading import grades_of, weights_in, with_grades
from flotilla.services.reward.tally import GradingTally
from flotilla.services.reward.teacher.teachers import Teachers
from flotilla.services.reward.verifiers.base import AsksServer, CountsGrades, GraderReports, Reweighs, Verifier
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.errors import ClaimLost, FlotillaError
from flotilla.shared.net.retry import DATA_PLANE, retry
from flotilla.shared.samples.recorder import KeepsEnded, NothingKept
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.service import TEACHER, Failure
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.streams.holding import LostClaims, holding
from flotilla.shared.streams.hop import Claim, Hop, Resolution

log = logging.getLogger(__name__)

CLAIM_WAIT_SECONDS = 1.0
HAND_BACK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RewardLane:
    """One lane that is graded.

    Attributes:
        name: for logs.
        hop: where generated groups come from.
        is_filtered: whether groups that teach nothing are filtered (never in evaluation).
    """

    name: str
    hop: Hop
    is_filtered: bool


class RewardConsumer:
    """Grades the groups of one experiment.

    Args:
        lanes: where groups come from.
        verifier: what grades.
        config: what is filtered.
        concurrency: groups graded at the same time in each lane.
        kept: receives groups that are not trained.
        teachers: asked about what is to be trained; None where no teacher is behind a URL.
        auditor: grades a share of the groups in training a second time; None where the spec asks for none.
    """

    def __init__(
        self,
        lanes: Sequence[RewardLane],
        verifier: Verifier,
        config: RewardConfig,
        concurrency: int,
        kept: KeepsEnded | None = None,
        teachers: Teachers | None = None,
        auditor: Auditor | None = None,
    ) -> None:
        self._lanes = lanes
        self._teachers = teachers
        self._auditor = auditor
        self._verifier = verifier
        self._config = config
        self._kept = NothingKept() if kept is None else kept
        self._concurrency = concurrency
        self._claiming = asyncio.Event()
        self._arranged: dict[Claim, Hop] = {}
        self._sending = Counter[Hop]()
        """How many groups have been graded and are on their way."""
        self.in_work = 0
        self._lost = LostClaims("claims were lost, their gradings were ended")
        self.graded_samples = 0
        self.failed_samples = 0
        self.failures_in_a_row = 0
        self.last_error: str | None = None
        self.tally = GradingTally()

    @property
    def graders(self) -> GraderReports:
        """What each component of the reward did so far."""
        return self._verifier.graders if isinstance(self._verifier, CountsGrades) else {}

    @property
    def why_hopeless(self) -> str | None:
        """Return why grading will not recover by itself, as once too many groups in a row could not be graded."""
        if self._refusal is not None or self.failures_in_a_row < self._config.max_consecutive_failures:
            return self._refusal
        return f"{self.failures_in_a_row} groups in a row could not be graded; the last error: {self.last_error}"

    @property
    def problem(self) -> Failure | None:
        """What is asked, outside of this service, and does not answer now; None if nothing is."""
        teacher = None if self._teachers is None else self._teachers.problem
        if teacher is not None:
            return Failure(component=TEACHER, cause=teacher, fatal=False)
        return self._verifier.problem if isinstance(self._verifier, AsksServer) else None

    @property
    def _refusal(self) -> str | None:
        return None if self._teachers is None else self._teachers.refusal

    def resume(self) -> None:
        """Claim groups."""
        if self._refusal is None:
            self._claiming.set()

    def pause(self) -> None:
        """Claim no more groups; those in work are finished."""
        self._claiming.clear()

    async def run(self) -> None:
        """Work until cancelled; what is in work is then handed back."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in self._lanes:
                    tasks.create_task(self._dispatch(lane, tasks), name=f"{lane.name} dispatcher")
        finally:
            # A task that is cancelled before its first step runs nothing of its own.
            unbegun = [self._give_up(hop, claim) for claim, hop in self._arranged.items()]
            await asyncio.shield(asyncio.gather(*unbegun))
            self._arranged.clear()

    async def _dispatch(self, lane: RewardLane, tasks: asyncio.TaskGroup) -> None:
        in_work, has_room = 0, asyncio.Event()

        def ended(_: asyncio.Task[None]) -> None:
            nonlocal in_work
            in_work -= 1
            has_room.set()

        def is_full() -> bool:
            # What is on its way to the next stream makes room in a moment: there is one claim for all of it, not one
            # for each. The other half goes on being graded meanwhile.
            return in_work >= self._concurrency or (self._sending[lane.hop] > 0 and 2 * in_work > self._concurrency)

        while True:
            await self._claiming.wait()
            while is_full():
                has_room.clear()
                await has_room.wait()
            try:
                claims = await lane.hop.claim(count=self._concurrency - in_work, wait_seconds=CLAIM_WAIT_SECONDS)
            except FlotillaError as error:
                log.warning("groups cannot be claimed", extra={"lane": lane.name, "error": repr(error)})
                await asyncio.sleep(CLAIM_WAIT_SECONDS)
                continue
            in_work += len(claims)
            for claim in claims:
                self._arranged[claim] = lane.hop
                answer = tasks.create_task(self._grade(lane, claim), name=f"grade {claim.entry_id}")
                answer.add_done_callback(ended)

    async def _grade(self, lane: RewardLane, claim: Claim) -> None:
        del self._arranged[claim]
        self.in_work += 1
        try:
            sampled = await self._readable(lane.hop, claim)
            if sampled is None:
                return
            async with holding(lane.hop, claim):
                group, audit = await self._graded_twice(sampled, is_audited=lane.is_filtered)
            # However long the data plane is absent: what was graded is not graded again. Only its answer tells whether
            # the claim is still held.
            async with lane.hop.renewing(claim):
                is_sent = await self._send_on(lane, claim, group, why_failed(sampled))
            if is_sent and audit is not None:
                self.tally.add_audit(group, audit)
        except ClaimLost:
            self._lost.add(claim)
        except FlotillaError as error:
            log.warning("group is handed back", extra={"entry_id": claim.entry_id, "error": repr(error)})
            if self._refusal is not None:
                self.pause()
            await self._give_up(lane.hop, claim)
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up(lane.hop, claim))
            raise
        finally:
            self.in_work -= 1

    async def _readable(self, hop: Hop, claim: Claim) -> Group | None:
        """Decode the group; one of another schema, from before an upgrade perhaps, ends here."""
        try:
            return claim.group()
        except ValueError as error:
            log.warning("group is unreadable", extra={"entry_id": claim.entry_id, "error": repr(error)})
            await self._resolve(hop, claim, Resolution.FAILED, "unreadable")
            return None

    async def _graded_twice(self, sampled: Group, *, is_audited: bool) -> tuple[Group, Audit | None]:
        """Grade a group, and beside that a second time if it is one of those."""
        auditor = self._auditor
        if auditor is None or not is_audited or not auditor.chooses(sampled):
            return await self._graded(sampled), None
        async with asyncio.TaskGroup() as both:
            first, second = both.create_task(self._graded(sampled)), both.create_task(auditor.grades_of(sampled))
        return first.result(), auditor.compare(first.result(), second.result())

    async def _graded(self, group: Group) -> Group:
        started = time.perf_counter()
        verifier, weights = self._verifier, weights_in(group.task.settings)
        if weights and isinstance(verifier, Reweighs):
            verifier = verifier.reweighed(weights)
        grades = await grades_of(verifier, group)
        for grade in grades:
            if grade.status is GradeStatus.ERROR:
                self.failed_samples += 1
                self.last_error = grade.reason
            else:
                self.graded_samples += 1
        seconds, kept = time.perf_counter() - started, used_names(self._rules_of(group))
        return with_grades(group, grades, seconds, kept, now=time.time())

    def _rules_of(self, group: Group) -> RewardConfig:
        return with_rules(self._config, group.task.settings)

    async def _send_on(self, lane: RewardLane, claim: Claim, group: Group, failure: str) -> bool:
        """Send a graded group where it belongs; False if the claim was lost."""
        if not lane.is_filtered:
            return await self._forward(lane.hop, claim, group)
        decided = decide(group, self._rules_of(group), failure)
        self.tally.add(group, is_filtered=decided.is_filtered_by_rule)
        if decided.trained is None:
            assert decided.resolution is not None
            assert decided.reason is not None
            if decided.resolution is Resolution.FAILED:
                self.failures_in_a_row += 1
                log.warning("no sample could be graded", extra={"entry_id": claim.entry_id, "error": self.last_error})
            elif decided.reason != ALL_ABSTAINED:
                self.failures_in_a_row = 0
            return await self._end(lane.hop, claim, group, decided.resolution, decided.reason)
        if (judged := await self._judged(decided.trained)) is not None:
            self.failures_in_a_row = 0
            return await self._forward(lane.hop, claim, judged)
        self.failures_in_a_row += 1
        log.warning("no sample could be judged", extra={"entry_id": claim.entry_id, "error": self.last_error})
        return await self._end(lane.hop, claim, group, Resolution.FAILED, "teacher_error")

    async def _judged(self, group: Group) -> Group | None:
        """Have a teacher judge what is to be trained, as long as it takes; None if it could judge no member."""
        if self._teachers is None:
            return group
        judged = await self._teachers.judged(group)
        pairs = zip(group.trajectories, judged.trajectories, strict=True)
        refused = [after.reason for before, after in pairs if before.status is not after.status]
        self.failed_samples += len(refused)
        self.graded_samples -= len(refused)
        self.last_error = refused[-1] if refused else self.last_error
        return judged if any(each.status is GradeStatus.SCORED for each in judged.trajectories) else None

    async def _end(self, hop: Hop, claim: Claim, group: Group, resolution: Resolution, reason: str) -> bool:
        self._kept.ended(group, SampleKind(resolution.value), reason)
        return await self._resolve(hop, claim, resolution, reason)

    async def _forward(self, hop: Hop, claim: Claim, group: Group) -> bool:
        return await self._sent(hop, partial(hop.forward, claim, group))

    async def _resolve(self, hop: Hop, claim: Claim, resolution: Resolution, reason: str) -> bool:
        return await self._sent(hop, partial(hop.resolve, claim, resolution, reason))

    async def _sent(self, hop: Hop, send: Callable[[], Awaitable[bool]]) -> bool:
        self._sending[hop] += 1
        try:
            return await retry(send, waiting_for=DATA_PLANE)
        finally:
            self._sending[hop] -= 1

    async def _give_up(self, hop: Hop, claim: Claim) -> None:
        # If this fails too, the lease ends and another consumer takes the claim over.
        try:
            async with asyncio.timeout(HAND_BACK_SECONDS):
                await hop.hand_back(claim)
        except (FlotillaError, TimeoutError) as error:
            log.warning("claim could not be handed back", extra={"entry_id": claim.entry_id, "error": repr(error)})
