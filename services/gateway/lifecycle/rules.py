"""Rules: each watches a series and acts once its points meet the condition; what it did is stored with what it changed.

    points stored -> condition met -> one transaction: the change, what the rule did, its audit record and its event

A gateway that is killed before that transaction has done nothing of it, and the next one acts on the same points; one
that is killed afterwards has done all of it, and the next one reads so.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.lifecycle.commands import ExperimentCommands
from flotilla.services.gateway.monitoring.conditions import Met, Point, Seen, standing
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PutWindow
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.load.live import keys_between
from flotilla.shared.config.load.rule_effects import changed_with, values_of
from flotilla.shared.config.sections.rule import PauseConfig, RuleConfig, StopConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.live_changes import LiveChange
from flotilla.shared.schemas.rules import RuleFired, RuleView

log = logging.getLogger(__name__)

FIRED: Final = "rule_fired"
"""Type of event."""
WINDOW: Final = "rules"
LOOK_SECONDS: Final = 1.0
SLICE: Final = 20_000
MOST_LETTERS: Final = 500
"""Of what a rule did."""


def actor_of(rule: str) -> str:
    """Name a rule as the one who changed something."""
    return f"rule {rule}"


class Memory(NamedTuple):
    """How often a rule has acted, and the step after which points count."""

    num_fired: int
    since_step: int


def remembered(rule: str, fired: Sequence[RuleFired], changes: Sequence[LiveChange]) -> Memory:
    """Find how often a rule acted, by what is stored and by the live changes that it made.

    A database that came back older may know of an action only by the change that a checkpoint has told it.
    """
    own = [each for each in fired if each.rule == rule]
    named = {name for each in own for name in each.changes}
    told = [each for each in changes if each.actor == actor_of(rule) and each.id not in named]
    by_effect = Counter(each.effect for each in told)
    steps = [each.step for each in own] + [each.step for each in told if each.step is not None]
    return Memory(len(own) + max(by_effect.values(), default=0), max(steps, default=-1))


async def stored_actions(store: Store, experiment_id: str) -> tuple[RuleFired, ...]:
    """Read what rules of an experiment did, oldest first."""
    kept = await store.window(experiment_id, WINDOW)
    return tuple(RuleFired.model_validate(each) for each in kept.get("fired", ()))


async def read_points(store: Store, experiment: Experiment, seen: Seen) -> None:
    """Read the points since the last time."""
    names = sorted({rule.metric for rule in experiment.spec.rules})
    cursor = seen.cursor
    while names:
        rows = await store.metrics(experiment.id, names=names, after=cursor, limit=SLICE)
        for _, row in rows:
            seen.points.setdefault(row.name, {})[row.step] = Point(row.step, row.version, row.value)
        cursor = rows[-1][0] if rows else cursor
        seen.cursor = max(seen.cursor, cursor)
        if len(rows) < SLICE:
            return


async def views_of(store: Store, experiment: Experiment, seen: Seen) -> tuple[RuleView, ...]:
    """Show the rules of an experiment and where each stands."""
    await read_points(store, experiment, seen)
    fired = await stored_actions(store, experiment.id)
    views = []
    for rule in experiment.spec.rules:
        memory = remembered(rule.name, fired, experiment.steering.changes)
        points = seen.of(rule.metric, memory.since_step)
        views.append(
            RuleView(
                name=rule.name,
                metric=rule.metric,
                times=rule.times,
                num_fired=memory.num_fired,
                num_points=len(points),
                num_met=standing(rule, points).num_met,
                patience=rule.when.patience,
                fired=tuple(each for each in fired if each.rule == rule.name),
            )
        )
    return tuple(views)


class Rules:
    """Acts by the rules of one experiment while it runs.

    Args:
        seen: what was read of their series.
    """

    def __init__(
        self,
        experiment: Experiment,
        repository: ExperimentRepository,
        commands: ExperimentCommands,
        events: EventLog,
        store: Store,
        clock: Clock,
        seen: Seen,
    ) -> None:
        self._experiment, self._repository, self._commands = experiment, repository, commands
        self._events, self._store, self._clock = events, store, clock
        self._seen = seen
        self._looked_at = -1
        self._fired: tuple[RuleFired, ...] | None = None

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Read new points, and let rules act whose conditions they meet."""
        if self._experiment.state is not ExperimentState.RUNNING:
            return
        if self._fired is None:
            self._fired = await stored_actions(self._store, self._experiment.id)
        await read_points(self._store, self._experiment, self._seen)
        cursor = self._seen.cursor
        if cursor == self._looked_at:
            return
        for rule in self._experiment.spec.rules:
            while await self._act(rule):
                pass
        self._looked_at = cursor

    def _met(self, rule: RuleConfig) -> Met | None:
        memory = remembered(rule.name, self._fired or (), self._experiment.steering.changes)
        if memory.num_fired >= rule.times:
            return None
        return standing(rule, self._seen.of(rule.metric, memory.since_step)).met

    async def _act(self, rule: RuleConfig) -> bool:
        """Let a rule act if its condition is met; whether it did."""
        if self._met(rule) is None:
            return False
        async with self._repository.transaction() as change:
            experiment, fired = self._experiment, self._fired or ()
            is_there = self._repository.find(experiment.id) is experiment
            if not is_there or experiment.state is not ExperimentState.RUNNING:
                return False
            # Asked again: somebody may have acted while this waited for its turn.
            met = self._met(rule)
            if met is None:
                return False
            did, changes = self._stage_effect(change, rule)
            done = RuleFired(
                rule=rule.name,
                at=rfc3339(self._clock.now()),
                step=met.point.step,
                version=met.point.version,
                value=met.point.value,
                best=met.best,
                did=did[:MOST_LETTERS],
                changes=changes,
            )
            after = (*fired, done)
            change.write(PutWindow(experiment.id, WINDOW, {"fired": [each.model_dump(mode="json") for each in after]}))
            facts: dict[str, Any] = {"metric": rule.metric, **done.model_dump(mode="json", exclude={"at"})}
            self._repository.stage_audit(change, experiment.id, "rule", **facts)
            self._events.stage(change, experiment.id, FIRED, **facts)
            change.then(lambda: setattr(self, "_fired", after))
        return True

    def _stage_effect(self, change: Transaction, rule: RuleConfig) -> tuple[str, tuple[str, ...]]:
        """Stage what a rule does; return it in words, and the ids of the live changes."""
        experiment, effect = self._experiment, rule.then
        if isinstance(effect, PauseConfig):
            self._commands.stage_pause(change, experiment)
            return "paused the experiment", ()
        if isinstance(effect, StopConfig):
            self._commands.stage_stop(change, experiment)
            return "stopped the experiment", ()
        before = experiment.spec
        try:
            spec = changed_with(before, values_of(before, effect), self._commands.live.base_of(experiment))
            changes = self._commands.live.stage(change, experiment, spec, actor_of(rule.name))
        except InvalidSpec as error:
            log.warning("a rule could not act", extra={"experiment_id": experiment.id, "cause": str(error)})
            return f"could not act: {error}", ()
        keys = keys_between(before.model_dump(mode="json"), spec.model_dump(mode="json"))
        named = "; ".join(f"{key.path}: {key.before} to {key.after}" for key in keys)
        return named or "changed nothing: the values were those already", changes
