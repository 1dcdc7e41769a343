"""Live changes of a spec: recorded before they have an effect, and held from the version that the record names.

    recorded -> (trainer's keys: the trainer asks at a version that it has not begun to train) -> held

A gateway that ends in between comes back with the record, from which feeder, evaluator and trainer take what holds: no
step of the way is only in memory.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.records.repository import Experiment, ExperimentRepository
from flotilla.services.gateway.records.steering import hearers_of
from flotilla.services.gateway.registry.services import Registry
from flotilla.services.gateway.store.transaction import Transaction
from flotilla.shared.clock import Clock, rfc3339
from flotilla.shared.config.load.live import MOST_CHANGES, changed_live, effect_of, keys_between, with_told
from flotilla.shared.config.load.rule_effects import check_rules
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.experiment import ExperimentState
from flotilla.shared.schemas.live_changes import ChangedKey, Effect, LiveChange, merged
from flotilla.shared.schemas.service import ServiceKind

CHANGED, HELD, RESTORED = "settings_changed", "settings_held", "settings_restored"
REFUSED = "settings_refused"
"""Types of events."""


log = logging.getLogger(__name__)

MOST_TOLD = 500
"""Letters of the reason why changes are refused."""


class LiveChanges:
    """Records live changes of experiments."""

    def __init__(self, repository: ExperimentRepository, registry: Registry, events: EventLog, clock: Clock) -> None:
        self._repository, self._registry, self._events, self._clock = repository, registry, events, clock

    def check(self, spec: ExperimentSpec) -> None:
        """Check what the rules of a new spec would change.

        Raises:
            InvalidSpec: a rule could not act.
        """
        check_rules(spec)

    def changed(self, experiment: Experiment, document: Mapping[str, Any]) -> ExperimentSpec:
        """Merge keys into the spec of an experiment at work.

        Raises:
            InvalidSpec: one of them cannot change, or its value is not allowed.
        """
        return changed_live(experiment.spec, document, self.base_of(experiment))

    def base_of(self, experiment: Experiment) -> ExperimentSpec:
        """Return what the services of an experiment were opened with."""
        return validate_spec(experiment.steering.base)

    def stage(self, change: Transaction, experiment: Experiment, spec: ExperimentSpec, actor: str) -> tuple[str, ...]:
        """Replace the spec by one that differs in keys that can change; nothing happens where none does.

        Args:
            change: the transaction.
            experiment: whose spec it is.
            spec: the changed one.
            actor: who changes it.

        Returns:
            Ids of the changes.

        Raises:
            InvalidSpec: it was changed as often as it can be, or a service that applies it would not hear of it.
        """
        record, known = experiment.record, experiment.steering.changes
        keys = keys_between(experiment.spec.model_dump(mode="json"), spec.model_dump(mode="json"))
        by_effect: dict[Effect, list[ChangedKey]] = {}
        for key in keys:
            if (effect := effect_of(key.path)) is not None:
                by_effect.setdefault(effect, []).append(key)
        if not by_effect:
            return ()
        if len(known) + len(by_effect) > MOST_CHANGES:
            raise InvalidSpec(
                f"{experiment.id} was changed {len(known)} times, at most {MOST_CHANGES} are kept with an experiment: "
                "fork it to go on with other settings"
            )
        self._check_hearers(experiment.id, by_effect)
        is_draft = record.state is ExperimentState.DRAFT
        made = [
            LiveChange(
                id=secrets.token_hex(6),
                at=rfc3339(self._clock.now()),
                actor=actor,
                effect=effect,
                keys=tuple(of_effect),
                # The trainer alone knows which version it has not begun to train; a draft has none.
                version=None if effect is Effect.TRAINER and not is_draft else record.policy_version,
                step=None if effect is Effect.TRAINER and not is_draft else record.step,
            )
            for effect, of_effect in by_effect.items()
        ]
        self._repository.stage_spec(change, experiment, spec)
        self._stage_changes(change, experiment, [*known, *made])
        for each in made:
            facts = each.model_dump(mode="json", exclude={"at"})
            self._repository.stage_audit(change, experiment.id, "change", **facts)
            self._events.stage(change, experiment.id, CHANGED, **facts)
        return tuple(each.id for each in made)

    def _check_hearers(self, experiment_id: str, by_effect: Mapping[Effect, Sequence[ChangedKey]]) -> None:
        """Check that the services that apply changes take them at all.

        Those that come later are chosen by it: see ``Demand.hearers``.

        Raises:
            InvalidSpec: one is of an earlier release, which would continue with the former values, in silence.
        """
        applied: dict[ServiceKind, list[str]] = {}
        for effect, keys in by_effect.items():
            for key in keys:
                for kind in hearers_of(effect, key.path):
                    applied.setdefault(kind, []).append(key.path)
        for kind, paths in applied.items():
            for service in self._registry.of(experiment_id, kind):
                if not service.capabilities.live_changes:
                    raise InvalidSpec(
                        f"{', '.join(paths)}: {kind.value} {service.id} is of a release that takes no changes while it "
                        "works: start it again with this one (docs/compatibility.md), then change it"
                    )

    async def adopt(self, experiment_id: str, version: int, step: int) -> tuple[LiveChange, ...]:
        """Let what waits for the trainer hold from a version on, which it has not begun to train.

        Repeated, it changes nothing of what holds already.
        """
        async with self._repository.transaction() as change:
            experiment = self._repository.get(experiment_id)
            known = experiment.steering.changes
            waiting = [each for each in known if each.version is None]
            if not waiting:
                return known
            held = {each.id: each.model_copy(update={"version": version, "step": step}) for each in waiting}
            found = tuple(held.get(each.id, each) for each in known)
            self._stage_changes(change, experiment, found)
            for each in held.values():
                self._events.stage(change, experiment_id, HELD, **each.model_dump(mode="json", exclude={"at", "actor"}))
        return found

    async def place(self, experiment_id: str, group_id: int) -> None:
        """Let changed weights of sources or pools choose rows from a group on that was not issued."""
        async with self._repository.transaction() as change:
            experiment = self._repository.get(experiment_id)
            known = experiment.steering.changes
            waits = [each.reweighs_rows and each.group_id is None for each in known]
            if any(waits):
                placed = {"group_id": group_id}
                found = [e.model_copy(update=placed) if w else e for e, w in zip(known, waits, strict=True)]
                self._stage_changes(change, experiment, found)

    def stage_restored(self, change: Transaction, experiment: Experiment, trained: Sequence[LiveChange]) -> None:
        """Take over what a checkpoint was trained with, and a database that came back older does not know.

        The trainer's word is worth no more than a person's ``changed``. What goes beyond that is told of in an event
        and left out, all of it: the takeover continues.
        """
        known = experiment.steering.changes
        try:
            if len(trained) > MOST_CHANGES:
                raise InvalidSpec(f"at most {MOST_CHANGES} changes are kept with an experiment, got {len(trained)}")
            found = merged(known, trained)
            if found == known:
                return
            if len(found) > MOST_CHANGES:
                raise InvalidSpec(f"at most {MOST_CHANGES} changes are kept with an experiment, got {len(found)}")
            told = {each.id for each in found} - {each.id for each in known}
            found, spec = with_told(validate_spec(experiment.steering.base), found, told)
        except InvalidSpec as error:
            log.warning("live changes of a checkpoint are refused", extra={"experiment_id": experiment.id})
            self._events.stage(change, experiment.id, REFUSED, cause=str(error)[:MOST_TOLD])
            return
        self._repository.stage_spec(change, experiment, spec)
        self._stage_changes(change, experiment, found)
        restored = [each.id for each in found if each not in known]
        self._repository.stage_audit(change, experiment.id, "restore", changes=restored)
        self._events.stage(change, experiment.id, RESTORED, changes=restored)

    def _stage_changes(self, change: Transaction, experiment: Experiment, changes: Sequence[LiveChange]) -> None:
        self._repository.stage(change, experiment, changes=[each.model_dump(mode="json") for each in changes])
