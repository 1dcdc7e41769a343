"""What live changes make of an experiment's spec: what its services were opened with, and what holds now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flotilla.services.gateway.digest import digest
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.config.load.live import applied, group_settings, undone, with_applied
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.live_changes import SOURCES, Effect, LiveChange, WeightsFrom, held_at
from flotilla.shared.schemas.service import ServiceKind

UNSEEN, POOLS = "data.curriculum.unseen", "data.curriculum.pools."
REWARDS = "reward."
"""Begins the path of each key that reward services apply, group by group."""
SAMPLING, PROFILES = "rollout.sampling.", "tracking.profiler.engine_"
"""Begin the paths of the keys that rollouts apply, group by group; a group's size is in its task."""
TEMPERATURE = f"{SAMPLING}temperature"
"""At which the trainer scores a group, too."""


@dataclass(frozen=True)
class Steering:
    """A spec and its live changes.

    Attributes:
        changes: oldest first.
        base: the spec without them, as JSON: what services are opened with, which are told of changes otherwise.
        base_digest: names it.
        in_force: the spec with those that hold already.
        settings: what groups issued now carry, by the path of the key.
    """

    changes: tuple[LiveChange, ...]
    base: Mapping[str, Any]
    base_digest: str
    in_force: ExperimentSpec
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, document: Mapping[str, Any], spec: ExperimentSpec, changes: tuple[LiveChange, ...]) -> "Steering":
        """Take the changes apart that led to a spec, which is ``document`` validated."""
        if not changes:
            return cls((), document, digest(document), spec, {})
        base = undone(document, changes)
        held = [each for each in changes if each.version is not None]
        in_force = spec if len(held) == len(changes) else validate_spec(applied(base, held))
        return cls(changes, base, digest(base), in_force, group_settings(changes))

    @cached_property
    def hearers(self) -> frozenset[ServiceKind]:
        """Kinds of service that have to take changes while they work, since there are changes that they apply."""
        paths = [(each.effect, key.path) for each in self.changes for key in each.keys]
        return frozenset(kind for effect, path in paths for kind in hearers_of(effect, path))

    def at(self, version: int) -> ExperimentSpec:
        """Make the spec that holds for a policy version.

        Raises:
            InvalidSpec: together the changes make none.
        """
        return with_applied(validate_spec(self.base), held_at(self.changes, version))


def hearers_of(effect: Effect, path: str) -> tuple[ServiceKind, ...]:
    """Name the kinds of service that apply a change of a key, and that in an earlier release would not hear of it."""
    if effect is Effect.TRAINER:
        return (ServiceKind.TRAINER,)
    if effect is Effect.GATEWAY:
        return ()
    if path.startswith(REWARDS):
        return (ServiceKind.REWARD,)
    if path == TEMPERATURE:
        return (ServiceKind.ROLLOUT, ServiceKind.TRAINER)
    return (ServiceKind.ROLLOUT,) if path.startswith((SAMPLING, PROFILES)) else ()


def weights_of(document: Mapping[str, Any]) -> tuple[float, ...]:
    """List the weights of a spec's sources; none where all rows count alike."""
    sources = (document.get("data") or {}).get("sources") or ()
    return tuple(source["weight"] for source in sources if source.get("weight") is not None)


def weights_by_group(
    base: Mapping[str, Any], changes: Sequence[LiveChange], begun: Sequence[WeightsFrom] = (), first_group_id: int = 0
) -> tuple[WeightsFrom, ...]:
    """List by which weights groups take turns among the sources of their rows, oldest first.

    Args:
        base: the spec without changes, as JSON.
        changes: oldest first; those that no group was issued by yet are left out.
        begun: of the experiment that this one is a fork of.
        first_group_id: where the experiment's own groups begin.
    """
    weights = weights_of(base)
    if not weights:
        return ()
    line = [each for each in begun if len(each.weights) == len(weights)] or [WeightsFrom(group_id=0, weights=weights)]
    if line[-1].weights != weights:
        line = _followed(line, first_group_id, weights)
    for change in changes:
        if change.group_id is None or not change.reweighs_rows:
            continue
        found = dict(enumerate(line[-1].weights))
        keys = (key for key in change.keys if key.path.startswith(SOURCES))
        found |= {int(key.path.split(".")[2]): key.after for key in keys}
        line = _followed(line, change.group_id, tuple(found.values()))
    return tuple(line)


def pool_weights_by_group(
    base: Mapping[str, Any], changes: Sequence[LiveChange]
) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """List by which weights groups draw among unseen rows and the pools of a curriculum, oldest first, from group 0.

    Args:
        base: the spec without changes, as JSON, with a curriculum.
        changes: oldest first; those that no group was issued by yet are left out.
    """
    given = base["data"]["curriculum"]
    now = {UNSEEN: given["unseen"]} | {f"{POOLS}{n}.weight": pool["weight"] for n, pool in enumerate(given["pools"])}
    line: list[tuple[int, tuple[float, ...]]] = [(0, tuple(now.values()))]
    for change in changes:
        if change.group_id is not None:
            now |= {key.path: key.after for key in change.keys if key.path in now}
            line = [each for each in line if each[0] < change.group_id or not each[0]]
            line.append((change.group_id, tuple(now.values())))
    return tuple(line)


def _followed(line: Sequence[WeightsFrom], group_id: int, weights: tuple[float, ...]) -> list[WeightsFrom]:
    # A data plane that came back older may issue a group again, by what holds now.
    return [*(each for each in line if each.group_id < group_id), WeightsFrom(group_id=group_id, weights=weights)]


def changes_of(record: ExperimentRecord) -> tuple[LiveChange, ...]:
    """Read the live changes of a record, oldest first."""
    return tuple(LiveChange.model_validate(each) for each in record.changes or ())
