"""Makes the checks while an experiment runs, and records what begins and what ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.monitoring.health.checks import Found, find
from flotilla.services.gateway.monitoring.health.evidence import Evidence, Seen, facts_of
from flotilla.services.gateway.monitoring.health.measurements import stage_window, store_window
from flotilla.services.gateway.monitoring.health.remedies import command_for
from flotilla.services.gateway.monitoring.health.window import WITHOUT_AUDIT, HealthWindow
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PointRecord, PutMetrics
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.sections.health import CheckName
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.host.own_memory import ProcessMemory
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.health import HealthFinding, SampleExcerpt

LOOK_SECONDS: Final = 1.0
PAUSING: Final = frozenset({CheckName.GRADERS_DISAGREE.value})
"""Checks whose findings pause the experiment, where the spec says so."""
REFRESH_SECONDS: Final = 15.0
"""How old the figures of a finding may be that continues: each change of a record is stored."""
MEMORY_SECONDS: Final = 5.0
"""How often the memory of processes is stored, at most."""
STORE_SECONDS: Final = 5.0
"""How old what is stored of a window may be."""

Fail = Callable[[str, str], Awaitable[None]]
"""Ends the experiment, given component and cause."""
StagePause = Callable[[Transaction, Experiment], None]
"""Lets the trainer start no further step; nothing where the experiment does not run."""


class HealthMonitor:
    """Watches the training health of one experiment.

    Args:
        window: what was reported of it.
        fail: ends it.
        stage_pause: pauses it.
    """

    def __init__(
        self,
        experiment: Experiment,
        repository: ExperimentRepository,
        events: EventLog,
        clock: Clock,
        window: HealthWindow,
        fail: Fail,
        stage_pause: StagePause,
    ) -> None:
        self._experiment = experiment
        self._repository = repository
        self._fail = fail
        self._stage_pause = stage_pause
        self._recorded_at = self._stored_at = clock.monotonic()
        self._stored_changes: int | None = None
        self._events = events
        self._clock = clock
        self._window = window
        self._commands_of: ExperimentSpec | None = None
        self._commands: dict[tuple[CheckName, str | None], str | None] = {}
        self._own_memory = ProcessMemory()
        self._memory_at, self._memory_step = clock.monotonic() - MEMORY_SECONDS, 0

    async def run(self) -> None:
        """Check every second until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Make the checks once; record what begins, changes and ends; end the experiment where a bound says so."""
        experiment, spec = self._experiment, self._experiment.spec
        if experiment.state in {ExperimentState.STARTING, ExperimentState.PAUSED, ExperimentState.DRAFT}:
            return
        evidence = self._window.evidence(facts_of(spec))
        found = find(evidence, without=spec.health.skip)
        known = {each.check: each for each in self._known()}
        now = [self._finding(each, known.get(each.check.name.value), evidence.samples) for each in found]
        if not evidence.is_enough:
            # A gateway that has just started has seen too little to call anything over.
            now += [each for name, each in known.items() if name not in {one.check for one in now}]
        is_old = self._clock.monotonic() - self._recorded_at >= REFRESH_SECONDS
        if {each.check for each in now} != set(known) or (is_old and now != list(known.values())):
            self._recorded_at = self._clock.monotonic()
            await self._record(now, known)
        await self._store()
        await self._record_memory(evidence)
        await self._hold_to_the_bound()

    async def _store(self) -> None:
        now, changes = self._clock.monotonic(), self._window.num_changes
        if changes != self._stored_changes and now - self._stored_at >= STORE_SECONDS:
            self._stored_at, self._stored_changes = now, changes
            await store_window(self._experiment, self._repository, self._window)

    async def _record_memory(self, evidence: Evidence) -> None:
        """Store what the processes have, and how it grows, for the newest step."""
        record, now = self._experiment.record, self._clock.monotonic()
        self._window.memory.add("gateway", "gateway", record.step, self._own_memory.look())
        if record.step == self._memory_step or now - self._memory_at < MEMORY_SECONDS:
            return
        self._memory_step, self._memory_at = record.step, now
        slopes: dict[str, float] = {}
        for each in evidence.memory:
            slopes[each.process] = max(slopes.get(each.process, each.slope), each.slope)
        values = {f"memory/{name}": value for name, value in self._window.memory.newest().items()}
        values |= {f"memory_slope/{name}": value for name, value in slopes.items()}
        at = rfc3339(self._clock.now())
        points = [PointRecord(name, record.step, record.policy_version, value, at) for name, value in values.items()]
        if not points:
            return
        async with self._repository.transaction() as change:
            if self._repository.find(self._experiment.id) is self._experiment:
                change.write(PutMetrics(self._experiment.id, points))

    def _known(self) -> list[HealthFinding]:
        return [HealthFinding.model_validate(each) for each in self._experiment.record.health or ()]

    def _finding(self, found: Found, known: HealthFinding | None, samples: tuple[SampleExcerpt, ...]) -> HealthFinding:
        """Make a finding; one that was known keeps when it began, and the samples it began with."""
        check, seen = found.check, found.seen
        return HealthFinding(
            check=check.name.value,
            component=check.component,
            since_step=known.since_step if known else self._experiment.record.step,
            at=known.at if known else rfc3339(self._clock.now()),
            seen=seen.text,
            advice=seen.advice or check.advice,
            command=self._command(check.name, seen.subject),
            figures=seen.figures,
            samples=known.samples if known and known.samples else _shown(seen, samples),
        )

    def _command(self, check: CheckName, subject: str | None) -> str | None:
        """Write what would help, once for each spec: telling whether it can change now takes milliseconds."""
        spec = self._experiment.spec
        if self._commands_of is not spec:
            self._commands_of, self._commands = spec, {}
        if (check, subject) not in self._commands:
            self._commands[check, subject] = command_for(check, subject, spec)
        return self._commands[check, subject]

    async def _record(self, now: list[HealthFinding], known: dict[str, HealthFinding]) -> None:
        names = {each.check for each in now}
        async with self._repository.transaction() as change:
            if self._repository.find(self._experiment.id) is not self._experiment:
                return
            health = [each.model_dump(mode="json") for each in now]
            self._repository.stage(change, self._experiment, health=health)
            for each in now:
                if each.check not in known:
                    facts = each.model_dump(mode="json", exclude={"at"})
                    self._events.stage(change, self._experiment.id, "health_finding", **facts)
            if names & PAUSING and not known.keys() & PAUSING and _pauses(self._experiment.spec):
                # In one transaction with the finding: a gateway that is killed has done both or neither. The second
                # grades that paused it are forgotten with it, so that a resume is not undone by them.
                self._stage_pause(change, self._experiment)
                change.then(self._window.clear_audit)
                stage_window(change, self._experiment, {**self._window.to_window(), **WITHOUT_AUDIT})
            for each in known.values():
                if each.check not in names:
                    facts = {"check": each.check, "component": each.component, "since_step": each.since_step}
                    self._events.stage(change, self._experiment.id, "health_recovered", **facts)

    async def _hold_to_the_bound(self) -> None:
        bound, without = self._experiment.spec.health.max_groups_without_signal, self._window.groups_without_signal
        if bound is None or without < bound or not self._experiment.is_active:
            return
        reward = [each for each in self._known() if each.component != "trainer"]
        why = f": {reward[0].check}, {reward[0].seen}" if reward else ""
        cause = f"{without} groups in a row taught nothing, health.max_groups_without_signal is {bound}{why}"
        await self._fail("reward", cause)


def _shown(seen: Seen, others: tuple[SampleExcerpt, ...]) -> tuple[SampleExcerpt, ...]:
    """Choose the samples of a new finding: those that show it, else the newest."""
    if seen.samples:
        return seen.samples
    return others if seen.sample is None else (seen.sample,)


def _pauses(spec: ExperimentSpec) -> bool:
    return spec.reward.audit is not None and spec.reward.audit.pause
