"""What live changes make of an experiment's spec: what its services were opened with, and what holds now."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla.services.gateway.digest import digest
from flotilla.services.gateway.store.records import ExperimentRecord
from flotilla.shared.config.load.live import applied, group_settings, undone, with_applied
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.schemas.live_changes import LiveChange, held_at


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

    def at(self, version: int) -> ExperimentSpec:
        """Make the spec that holds for a policy version.

        Raises:
            InvalidSpec: together the changes make none.
        """
        return with_applied(validate_spec(self.base), held_at(self.changes, version))


def changes_of(record: ExperimentRecord) -> tuple[LiveChange, ...]:
    """Read the live changes of a record, oldest first."""
    return tuple(LiveChange.model_validate(each) for each in record.changes or ())
