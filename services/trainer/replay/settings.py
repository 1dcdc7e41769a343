"""Which settings a recorded step was trained with, read from where they are kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla.shared.checkpoints.folders import StoredCheckpoint
from flotilla.shared.config.load.live import undone, with_applied
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.samples.folder import CHANGES, SAMPLES, SPEC_FILE
from flotilla.shared.schemas.live_changes import Effect, LiveChange


def base_spec(directory: Path, step: int, checkpoints: Mapping[int, StoredCheckpoint]) -> ExperimentSpec:
    """Find the spec without live changes: that of the next checkpoint, else that of now.

    Raises:
        InvalidRequest: there is neither.
        InvalidSpec: this version does not take it.
    """
    later = min((number for number in checkpoints if number >= step), default=None)
    path = directory / SAMPLES / SPEC_FILE
    if later is not None:
        state = checkpoints[later].state
        return validate_spec(undone(state.spec, [each for each in state.changes if each.effect is Effect.TRAINER]))
    if path.is_file():
        return ExperimentSpec.model_validate_json(path.read_text(encoding="utf-8"))
    raise InvalidRequest(f"{directory} has neither a checkpoint after step {step} nor {SAMPLES}/{SPEC_FILE}")


def spec_of_step(base: ExperimentSpec, facts: Mapping[str, Any]) -> ExperimentSpec:
    """Make the spec that a step was trained with: with what had been changed by then."""
    return with_applied(base, changes_in(facts))


def changes_in(facts: Mapping[str, Any]) -> tuple[LiveChange, ...]:
    """Read the changes that a step was trained with, oldest first."""
    return tuple(map(LiveChange.model_validate, facts.get(CHANGES, ())))
