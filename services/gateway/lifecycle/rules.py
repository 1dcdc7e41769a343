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
from flotilla.services.gateway.monitoring.conditions import Point, Seen, Watch
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.store.base import Store
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.services.gateway.store.writes import PutWindow
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.load.live import keys_between
from flotilla.shared.config.load.rule_effects import changed_with, values_of
from flotilla.shared.config.sections.rule import PauseConfig, RuleConfig, StopConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState, RuleFired, RuleView
from flotilla.shared.schemas.live_changes import LiveChange

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


async def look_at(store: Store, experiment: Experiment, seen: Seen, fired: Sequence[RuleFired]) -> None:
    """Read the points since the last time, and judge them by every rule."""
    rules = experiment.spec.rules
    for rule in rules:
        seen.watch(rule).resume(*remembered(rule.name, fired, experiment.steering.changes))
    names, cursor = sorted({rule.metric for rule in rules}), seen.cursor
    while names and not any(seen.watch(rule).is_full for rule in rules):
        rows = await store.metrics(experiment.id, names=names, after=cursor, limit=SLICE)
        seen.add(rules, ((place, row.name, Point(row.step, row.version, row.value)) for place, row in rows))
        cursor = max(seen.cursor, cursor)
        for rule in rules:
            seen.watch(rule).look(rule)
        if len(rows) < SLICE:
            return


async def views_of(store: Store, experiment: Experiment, seen: Seen) -> tuple[RuleView, ...]:
    """Show the rules of an experiment and where each stands."""
    if not experiment.spec.rules:
        return ()
    fired = await stored_actions(store, experiment.id)
    await look_at(store, experiment, seen, fired)
    views = []
    for rule in experiment.spec.rules:
        watch = seen.watch(rule)
        views.append(
            RuleView(
                name=rule.name,
                metric=rule.metric,
                times=rule.times,
                num_fired=watch.num_fired,
                num_points=watch.num_points,
                num_met=watch.num_met,
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
        await look_at(self._store, self._experiment, self._seen, self._fired)
        for rule in self._experiment.spec.rules:
            while self._seen.watch(rule).look(rule) is not None and await self._act(rule):
                pass

    async def _act(self, rule: RuleConfig) -> bool:
        """Let a rule act whose condition is met; whether it did."""
        watch = self._seen.watch(rule)
        async with self._repository.transaction() as change:
            experiment, fired = self._experiment, self._fired or ()
            is_there = self._repository.find(experiment.id) is experiment
            if not is_there or experiment.state is not ExperimentState.RUNNING:
                return False
            memory, met = remembered(rule.name, fired, experiment.steering.changes), watch.met
            if met is None or memory.num_fired > watch.num_fired:
                # While this waited for its turn a checkpoint has shown that it had acted.
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
            change.then(lambda: self._follow(watch, after))
        return True

    def _follow(self, watch: Watch, fired: tuple[RuleFired, ...]) -> None:
        self._fired = fired
        watch.resume(watch.num_fired + 1, fired[-1].step)

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
