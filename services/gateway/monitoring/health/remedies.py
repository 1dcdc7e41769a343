"""The command that makes the change which would help with a finding, where a command does."""

import shlex
from collections.abc import Callable, Mapping
from typing import Any, Final

from flotilla.shared.config.load.live import changed_live
from flotilla.shared.config.load.spec_text import with_changes
from flotilla.shared.config.sections.health import CheckName
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec

HIGHEST_TEMPERATURE: Final = 2.0

Keys = Mapping[str, Any]
"""Paths of the spec, each with the value that would help."""


def _half_the_rate(spec: ExperimentSpec, subject: str | None) -> Keys:
    return {"optimisation.learning_rate": _short(spec.optimisation.learning_rate / 2)}


def _stay_nearer(spec: ExperimentSpec, subject: str | None) -> Keys:
    kl = spec.algorithm.kl
    return _half_the_rate(spec, subject) if kl is None else {"algorithm.kl.coefficient": _short(2 * kl.coefficient)}


def _sample_broader(spec: ExperimentSpec, subject: str | None) -> Keys:
    wanted = _short(min(HIGHEST_TEMPERATURE, 1.2 * spec.rollout.sampling.temperature))
    return {} if wanted <= spec.rollout.sampling.temperature else {"rollout.sampling.temperature": wanted}


def _larger_groups(spec: ExperimentSpec, subject: str | None) -> Keys:
    return {"rollout.group_size": 2 * spec.rollout.group_size}


def _longer_answers(spec: ExperimentSpec, subject: str | None) -> Keys:
    return {"rollout.sampling.max_new_tokens": 2 * spec.rollout.sampling.max_new_tokens}


def _less_of_component(spec: ExperimentSpec, subject: str | None) -> Keys:
    for number, each in enumerate(spec.reward.components):
        if (each.name or each.kind) == subject:
            return {f"reward.components.{number}.weight": _short(each.weight / 2)}
    return {}


def _without_source(spec: ExperimentSpec, subject: str | None) -> Keys:
    for number, each in enumerate(spec.data.sources or ()):
        if each.weight and each.known_data_sources == (subject,):
            return {f"data.sources.{number}.weight": 0}
    return {}


KEYS: Final[Mapping[CheckName, Callable[[ExperimentSpec, str | None], Keys]]] = {
    CheckName.NOT_FINITE: _half_the_rate,
    CheckName.DIVERGING: _half_the_rate,
    CheckName.KL_EXPLODING: _stay_nearer,
    CheckName.ENTROPY_GONE: _sample_broader,
    CheckName.NEAR_DUPLICATES: _sample_broader,
    CheckName.NO_SIGNAL: _larger_groups,
    CheckName.ALWAYS_TRUNCATED: _longer_answers,
    CheckName.COMPONENTS_DRIFT: _less_of_component,
    CheckName.DEAD_SOURCE: _without_source,
}
"""What to change, for checks whose advice is a value of a key."""
DRAINED: Final = frozenset({CheckName.ROLLOUT_DIFFERS, CheckName.MEMORY_CREEPS})
"""Checks of one service, which begins again."""


def command_for(check: CheckName, subject: str | None, spec: ExperimentSpec) -> str | None:
    """Write the command, as a person would type it.

    What can change while the experiment runs is changed there; else the command forks with it, or there is none.

    Args:
        check: that found something.
        subject: what the finding is of, where it is one of several.
        spec: of the experiment, as it is now.
    """
    name = shlex.quote(spec.name)
    if check in DRAINED:
        return None if subject is None or subject == "gateway" else f"flotilla drain {shlex.quote(subject)}"
    if check is CheckName.NOTHING_LEFT:
        return f"flotilla stop {name}"
    keys = KEYS[check](spec, subject) if check in KEYS else {}
    if not keys:
        return None
    changes = _document(keys)
    assignments = " ".join(shlex.quote(f"{path}={value}") for path, value in keys.items())
    try:
        changed_live(spec, changes)
    except InvalidSpec:
        return f"flotilla fork {name} --set {assignments}" if _is_valid(spec, changes) else None
    return f"flotilla set {name} {assignments}"


def _document(keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in keys.items():
        *sections, last = path.split(".")
        target = found
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return found


def _is_valid(spec: ExperimentSpec, changes: Mapping[str, Any]) -> bool:
    try:
        with_changes(spec, changes)
    except InvalidSpec:
        return False
    return True


def _short(value: float) -> float:
    return float(f"{value:.3g}")
