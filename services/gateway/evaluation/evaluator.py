"""The evaluator: held-out problems through the evaluation lane, pinned to one version, never two at a time.

While it lasts, ``evaluating_version`` is set in the experiment's record: rollouts hold that version. An evaluation that
a restart of the gateway interrupted is given up, and its tasks are resolved as dropped.

A data plane that lost the tail of its log shows the lane at an earlier state. So what belongs to an evaluation is told
by group id and version, and each group counts once: one that returns after it was counted is resolved again. What
returns of an evaluation that is over is dropped. One that lost tasks of its own begins again.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.datasets.finished import WrittenAnswers
from flotilla.services.gateway.evaluation.keeping import EvaluationKeeper, right_and_wrong
from flotilla.services.gateway.evaluation.schedule import due_version
from flotilla.services.gateway.evaluation.summary import summarise_sets
from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.lifecycle.drain_outstanding import GATEWAY, drain_outstanding
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.signals import wait_for_any
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.sections.evaluation import EvaluationConfig
from flotilla.shared.errors import Unavailable
from flotilla.shared.net.retry import DATA_PLANE, Backoff, retry
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.admission import IssueOutcome
from flotilla.shared.streams.hop import Claim, Hop, HopName, Resolution

log = logging.getLogger(__name__)

BATCH = 128
COLLECT_BATCH = 256
COLLECT_SECONDS = 0.5
GATHER_SECONDS = 0.25
"""How long answers gather between two looks: taken one by one, each costs two round trips of its own, and those of
hundreds of rows come over many steps."""
LEFTOVERS_SECONDS = 5.0
"""How often the lane is searched, between evaluations, for what returned of those that are over."""
EVALUATION_OVER = "evaluation_over"
"""Why a group is dropped that returned with a lost log tail after its evaluation had ended."""
LAG = "evaluation/lag_versions"
"""How many versions were published while the evaluation lasted."""


class Evaluator:
    """Evaluates one experiment.

    Args:
        written: where answers are graded that were written before; None where rollouts answer.
    """

    def __init__(
        self,
        experiment: Experiment,
        dataset: Dataset,
        repository: ExperimentRepository,
        events: EventLog,
        clock: Clock,
        written: WrittenAnswers | None = None,
    ) -> None:
        assert experiment.spec.evaluation is not None
        self._config: EvaluationConfig = experiment.spec.evaluation
        self._experiment = experiment
        self._dataset = dataset
        self._repository = repository
        self._events = events
        self._clock = clock
        self._written = written
        self._keeper = EvaluationKeeper(experiment)
        self._looked_for_leftovers_at: float | None = None
        self._num_answers = self._config.group_size if written is None else written.num_answers(dataset)

    async def run(self) -> None:
        """Evaluate whatever is due, until cancelled. One that the data plane's absence cut short is done again."""
        pauses = Backoff()
        await self._begin_again()
        while True:
            changed = self._experiment.changed.next
            version = self.due()
            try:
                if version is None or self._experiment.state is not ExperimentState.RUNNING:
                    await self._drop_old_leftovers()
                    await wait_for_any(LEFTOVERS_SECONDS, changed)
                else:
                    await self.evaluate(version)
                pauses.reset()
            except Unavailable as error:
                log.warning(
                    "data plane is unavailable", extra={"experiment_id": self._experiment.id, "error": repr(error)}
                )
                await asyncio.sleep(pauses.after(error))
                await self._begin_again()

    async def _begin_again(self) -> None:
        """Abandon what was under way, as soon as the data plane answers."""
        await retry(self.abandon, waiting_for=DATA_PLANE)

    def due(self) -> int | None:
        """Find the version to evaluate now."""
        record = self._experiment.record
        # It can change while the experiment runs, unlike the rest of the section.
        config = self._experiment.steering.in_force.evaluation or self._config
        return due_version(
            policy_version=record.policy_version,
            evaluated_version=record.evaluated_version,
            every_versions=config.every_versions,
            is_trained=self._experiment.is_trained,
        )

    async def abandon(self) -> None:
        """Abandon what was being evaluated and did not end."""
        version = self._experiment.record.evaluating_version
        if version is not None:
            await drain_outstanding(self._experiment, Lane.EVALUATION, "evaluation_abandoned")
            async with self._repository.transaction() as change:
                self._repository.stage(change, self._experiment, evaluating_version=None)
                self._events.stage(change, self._experiment.id, "evaluation_abandoned", version=version)

    async def evaluate(self, version: int) -> None:
        """Evaluate one version and record what was found.

        Raises:
            Unavailable: the data plane does not answer, or came back at a state that lacks tasks of this evaluation.
        """
        started_at = self._clock.monotonic()
        await self._drop_leftovers()
        await self._repository.update(self._experiment, evaluating_version=version)
        first = await self._experiment.evaluation.admission.next_group_id()
        num_issued = await self._issue(first, version)
        groups = await self._collect(range(first, first + num_issued), version)
        if groups is None:
            await drain_outstanding(self._experiment, Lane.EVALUATION, "evaluation_deadline")
            await self._give_up(version, f"it took longer than {self._config.deadline_seconds:g} s")
            return
        metrics = summarise_sets(
            groups,
            self._dataset.parts,
            num_issued=num_issued,
            num_answers=self._num_answers,
            pass_reward=self._config.pass_reward,
        )
        metrics[LAG] = float(self._experiment.record.policy_version - version)
        # Not the step that was done meanwhile: the result belongs to the version.
        step = await self._repository.step_of(self._experiment, version)
        await self._keeper.keep(groups, version=version, step=step)
        at = rfc3339(self._clock.now())
        points = [PointRecord(name=n, step=step, version=version, value=v, at=at) for n, v in metrics.items()]
        seconds = round(self._clock.monotonic() - started_at, 3)
        facts: dict[str, Any] = {"version": version, "step": step, "seconds": seconds, "metrics": metrics}
        facts["samples"] = right_and_wrong(groups)
        async with self._repository.transaction() as change:
            change.write(PutMetrics(self._experiment.id, points))
            self._repository.stage(change, self._experiment, evaluating_version=None, evaluated_version=version)
            self._events.stage(change, self._experiment.id, "evaluation", **facts)

    async def _give_up(self, version: int, cause: str) -> None:
        async with self._repository.transaction() as change:
            self._repository.stage(change, self._experiment, evaluating_version=None, evaluated_version=version)
            self._events.stage(change, self._experiment.id, "evaluation_failed", version=version, cause=cause)

    async def _drop_old_leftovers(self) -> None:
        """Drop what is in the lane, unless that was done a moment ago: the experiment changes with each version."""
        now, last = asyncio.get_running_loop().time(), self._looked_for_leftovers_at
        if last is None or now - last >= LEFTOVERS_SECONDS:
            await self._drop_leftovers()
            self._looked_for_leftovers_at = now

    async def _drop_leftovers(self) -> None:
        """Drop what is in the lane while no evaluation lasts."""
        ledger = await self._experiment.evaluation.ledger()
        if ledger.outstanding:
            facts = {"experiment_id": self._experiment.id, "groups": ledger.outstanding}
            log.warning("groups of an evaluation that is over returned, and are dropped", extra=facts)
            await drain_outstanding(self._experiment, Lane.EVALUATION, EVALUATION_OVER)

    async def _issue(self, first: int, version: int) -> int:
        admission = self._experiment.evaluation.admission
        num_rows = len(self._dataset.rows)
        issued = 0
        while issued < num_rows:
            batch = range(issued, min(issued + BATCH, num_rows))
            tasks = [
                self._dataset.task(
                    first + row,
                    row=row,
                    group_size=self._num_answers,
                    min_version=version,
                    pinned_version=version,
                    greedy=self._config.greedy,
                    issued_at=self._clock.now(),
                )
                for row in batch
            ]
            # Nothing else is outstanding in this lane, and all rows may be at once.
            if self._written is None:
                result = await admission.issue_many(tasks, limit=num_rows)
            else:
                groups = await asyncio.to_thread(self._written.groups, self._dataset, tasks)
                result = await admission.issue_groups(groups, hop=HopName.GENERATED, limit=num_rows)
            # No room in a lane that was empty: groups returned that were resolved before.
            if result.count == 0 and result.outcome is not IssueOutcome.CURSOR_MOVED:
                raise _came_back_earlier()
            issued = result.next_group_id - first
            if issued < 0:
                raise _came_back_earlier()
        return num_rows

    async def _collect(self, group_ids: range, version: int) -> list[Group] | None:
        """Collect answers until none is outstanding; None if the deadline came first. Pauses do not count.

        Raises:
            Unavailable: the data plane does not answer, or came back at a state that lacks some of these groups.
        """
        plane = self._experiment.evaluation
        hop = plane.hop(HopName.SCORED, GATEWAY)
        groups: dict[int, Group] = {}
        left = self._config.deadline_seconds
        looked_at = self._clock.monotonic()
        while left > 0:
            claims = await hop.claim(COLLECT_BATCH, wait_seconds=COLLECT_SECONDS)
            for group in await _resolved(hop, claims, group_ids, version):
                groups.setdefault(group.task.group_id, group)
            if len(groups) == len(group_ids):
                return list(groups.values())
            if 0 < len(claims) < COLLECT_BATCH:
                await asyncio.sleep(GATHER_SECONDS)
            if not claims:
                # In this order: a lane that went back before the first answer shows in the second.
                is_empty = (await plane.ledger()).outstanding == 0
                if await plane.admission.next_group_id() < group_ids.stop:
                    raise _came_back_earlier()
                if is_empty:
                    return list(groups.values())
            now = self._clock.monotonic()
            if self._experiment.state is ExperimentState.RUNNING:
                left -= now - looked_at
            looked_at = now
        return None


async def _resolved(hop: Hop, claims: Sequence[Claim], group_ids: range, version: int) -> list[Group]:
    """Resolve claims; return the groups that belong to the evaluation of these ids and this version."""
    unreadable: list[Claim] = []
    over: list[Claim] = []
    wanted: list[Claim] = []
    for claim in claims:
        try:
            task = claim.group().task
        except ValueError as error:
            # From before an upgrade, perhaps: one answer less, and no end of the experiment.
            log.warning("group is unreadable", extra={"entry_id": claim.entry_id, "error": repr(error)})
            unreadable.append(claim)
            continue
        is_wanted = task.group_id in group_ids and task.pinned_version == version
        (wanted if is_wanted else over).append(claim)
    await hop.resolve_many(unreadable, Resolution.FAILED, "unreadable")
    await hop.resolve_many(over, Resolution.DROPPED, EVALUATION_OVER)
    answers = await hop.resolve_many(wanted, Resolution.TRAINED, "evaluated")
    return [claim.group() for claim, is_resolved in zip(wanted, answers, strict=True) if is_resolved]


def _came_back_earlier() -> Unavailable:
    return Unavailable("the data plane came back at an earlier state")
