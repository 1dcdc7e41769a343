"""Which keys of a spec can change while its experiment runs, where each takes effect, and what a change is.

A change of services' quotas or of ``optimisation.steps`` is another matter: it has an effect of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import Any

from flotilla.shared.config.load.spec_text import STEPS, validate_spec, with_changes, with_steps
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec, Scalar
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.schemas.live_changes import SOURCES, ChangedKey, Effect, LiveChange

Document = Mapping[str, Any]
"""A spec, or keys of one, as JSON."""
LIVE: Mapping[str, Effect] = {
    "optimisation.learning_rate": Effect.TRAINER,
    "optimisation.schedule": Effect.TRAINER,
    "optimisation.min_learning_rate_ratio": Effect.TRAINER,
    "optimisation.warmup_updates": Effect.TRAINER,
    "optimisation.warmup_start_ratio": Effect.TRAINER,
    "optimisation.decay_updates": Effect.TRAINER,
    "optimisation.wsd_decay_updates": Effect.TRAINER,
    "optimisation.wsd_decay": Effect.TRAINER,
    "optimisation.max_grad_norm": Effect.TRAINER,
    "algorithm.kl.coefficient": Effect.TRAINER,
    "algorithm.entropy_coefficient": Effect.TRAINER,
    "algorithm.policy_loss.clip_low": Effect.TRAINER,
    "algorithm.policy_loss.clip_high": Effect.TRAINER,
    "algorithm.policy_loss.dual_clip": Effect.TRAINER,
    "algorithm.policy_loss.low": Effect.TRAINER,
    "algorithm.policy_loss.high": Effect.TRAINER,
    "algorithm.policy_loss.ratio_cap": Effect.TRAINER,
    "asynchrony.staleness_threshold": Effect.TRAINER,
    "asynchrony.max_lag": Effect.TRAINER,
    "rollout.sampling.temperature": Effect.GROUP,
    "rollout.sampling.max_new_tokens": Effect.GROUP,
    "rollout.group_size": Effect.GROUP,
    "data.sources.*.weight": Effect.GROUP,
    "data.curriculum.unseen": Effect.GROUP,
    "data.curriculum.pools.*.weight": Effect.GROUP,
    "reward.components.*.weight": Effect.GROUP,
    "reward.filter_zero_spread": Effect.GROUP,
    "reward.group_filter": Effect.GROUP,
    "reward.group_filter.low": Effect.GROUP,
    "reward.group_filter.high": Effect.GROUP,
    "reward.group_filter.statistic": Effect.GROUP,
    "reward.group_filter.threshold": Effect.GROUP,
    "reward.group_filter.keep_single": Effect.GROUP,
    "reward.group_filter.metric": Effect.GROUP,
    "tracking.profiler.steps": Effect.TRAINER,
    "tracking.profiler.ranks": Effect.TRAINER,
    "tracking.profiler.engine_versions": Effect.GROUP,
    "tracking.profiler.engine_steps": Effect.GROUP,
    "evaluation.every_versions": Effect.GATEWAY,
}
"""What can change, and where it takes effect; ``*`` is a number in a list. docs/steering.md has this table."""

OWN_WAY = ("resources.*", f"{STEPS}.steps")
"""What can change, too, and is no live change: see ``ExperimentCommands.change``."""

REASONS: Mapping[str, str] = {
    "name": "it is in every address and file of the experiment",
    "seed": "rows, samples and losses so far were drawn by it",
    "model.*": "trainer and rollouts have loaded it",
    "job.*": "its groups, streams and services are of one kind of job",
    "data.*": "the order of rows, by which a group's number names its row, is made of it",
    "evaluation.*": "values of another evaluation would appear in the same series",
    "rollout.engine.*": "engines were started with it",
    "rollout.episodes.*": "environments and tools were started with it",
    "rollout.agents.*": "agents were started with it, and have episodes that were handed out by it",
    "reward.*": "reward services were opened with it, and rewards in one step would not compare",
    "parallelism.*": "the trainer's ranks were formed with it",
    "checkpoint.*": "the trainer's checkpoints were opened with it",
    "asynchrony.*": "it defines what a version and a step are, or how weights travel",
    "optimisation.*": "the optimiser and its batches were made with it",
    "rules": "what they have done is recorded by their names",
    "algorithm.*": "it decides which models are loaded, or what a loss is made of",
}
"""Why other keys cannot; the first pattern that matches gives the reason."""
OTHERWISE = "its services were opened with it"

FILTERS = ("reward.filter_zero_spread", "reward.group_filter")
"""Begin the paths of the rules by which a graded group is not trained."""

MOST_CHANGES = 256
"""Of one experiment: each is in every answer about it and in every checkpoint."""
MOST_LETTERS = 200
"""Of the id, the time and the actor of a change that a service tells."""


def effect_of(path: str) -> Effect | None:
    """Return where a change of a key takes effect; None where it cannot change."""
    return LIVE.get(".".join("*" if part.isdecimal() else part for part in path.split(".")))


def keys_between(before: Any, after: Any, path: str = "") -> list[ChangedKey]:
    """List the keys in which two documents differ, as deep as both have the same sections, or as many in a list."""
    if before == after:
        return []
    if _are_lists_of_sections(before, after):
        before, after = by_number(before), by_number(after)
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before.get("kind") == after.get("kind"):
        names = [*before, *(name for name in after if name not in before)]
        parts = [keys_between(before.get(n), after.get(n), f"{path}.{n}".removeprefix(".")) for n in names]
        return [key for part in parts for key in part]
    return [ChangedKey(path=path, before=before, after=after)]


def by_number(value: Any) -> Any:
    """Make a mapping of a list of sections, by their numbers; anything else stays as it is."""
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        return {str(number): each for number, each in enumerate(value)}
    return value


def _are_lists_of_sections(before: Any, after: Any) -> bool:
    """Whether keys in the items of two lists can be compared one by one."""
    if not (isinstance(before, list) and isinstance(after, list) and len(before) == len(after)):
        return False
    return all(isinstance(by_number(each), Mapping) for each in (before, after))


def differences(before: Document, after: Document) -> Document:
    """Make the smallest document that leads from one to the other where it is merged into it."""
    found = {}
    for name, value in after.items():
        known = before.get(name)
        if known == value:
            continue
        if _are_lists_of_sections(known, value):
            found[name] = differences(by_number(known), by_number(value))
            continue
        is_section = (
            isinstance(known, Mapping) and isinstance(value, Mapping) and known.get("kind") == value.get("kind")
        )
        found[name] = differences(known, value) if is_section else value  # type: ignore[arg-type]
    return found


def changed_live(spec: ExperimentSpec, changes: Document, base: ExperimentSpec | None = None) -> ExperimentSpec:
    """Apply changes to what an experiment at work may change; keys that are not named stay.

    Args:
        spec: as it is.
        changes: keys, merged into it.
        base: what its services were opened with; None: the same.

    Raises:
        InvalidSpec: a change is of something else, or the changed spec does not validate; it names what cannot change,
            why, and the command that forks with it.
    """
    if not changes:
        raise InvalidSpec(f"nothing is changed; what can be changed is {', '.join((*OWN_WAY, *LIVE))}")
    changed = with_changes(spec, changes)
    keys = keys_between(spec.model_dump(mode="json"), changed.model_dump(mode="json"))
    named = [key.path for key in keys] or list(_leaves(changes))
    refused = [path for path in named if not _is_live(path)]
    entries: list[dict[str, Scalar]] = [{"path": path, "value": None, "allowed": refusal(path)} for path in refused]
    entries += [
        {"path": key.path, "value": str(key.after), "allowed": f"{reason}; {FORK}"}
        for key in keys
        if (reason := _why_not(key, spec, base or spec)) is not None
    ]
    if entries:
        raise InvalidSpec("; ".join(f"{entry['path']}: {entry['allowed']}" for entry in entries), errors=entries)
    if changed.optimisation.steps != spec.optimisation.steps:
        with_steps(spec, changed.optimisation.steps)
    return changed


FORK = "`flotilla fork EXPERIMENT --set KEY=VALUE` goes on from the newest checkpoint with another one"


def _is_live(path: str) -> bool:
    return effect_of(path) is not None or any(fnmatchcase(path, pattern) for pattern in OWN_WAY)


def refusal(path: str) -> str:
    """Return why a key cannot change, and which command continues with another value."""
    matching = (why for pattern, why in REASONS.items() if fnmatchcase(path, pattern) or f"{path}.*" == pattern)
    return f"cannot change while the experiment runs, since {next(matching, OTHERWISE)}; {FORK}"


def _leaves(changes: Document, path: str = "") -> Iterable[str]:
    for name, value in changes.items():
        here = f"{path}.{name}".removeprefix(".")
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        else:
            yield here


def _why_fixed(key: ChangedKey) -> str | None:
    """Return why a key of ``resources`` cannot change, unlike others of that section."""
    if key.path in {"resources.trainer.devices", "resources.rollouts.devices"}:
        return f"{key.before} cannot be changed once an experiment was created: what it computes on is decided"
    if key.path == "resources.sharing" or key.path.startswith("resources.lending"):
        return "cannot change while trainer and rollouts are at work, which were assigned these devices at their start"
    return None


def _why_not(key: ChangedKey, spec: ExperimentSpec, base: ExperimentSpec) -> str | None:
    """Return why a key that can change otherwise cannot in this experiment."""
    path = key.path
    if (why := _why_fixed(key)) is not None:
        return why
    if path.startswith("rollout.") and spec.rollout.agents is not None:
        return "cannot change while agents sample, which were given the present one"
    if path.startswith(("rollout.", *FILTERS)) and (spec.finished_job is not None or spec.data.holds_groups):
        return "has no effect on answers that are written already"
    if path == "rollout.sampling.temperature" and _changes_what_is_recorded(key, base):
        return "engines were started to record log-probabilities as this engine has them at the present one"
    if path.endswith(".weight") and not path.startswith("data.curriculum."):
        return _why_no_weight(key, spec)
    most = base.rollout.sampling.max_new_tokens
    if path == "rollout.sampling.max_new_tokens" and key.after > most:
        return f"at most {most}, for which engines and batches were laid out when the services started, got {key.after}"
    if path in {"asynchrony.max_lag", "asynchrony.staleness_threshold"}:
        if spec.asynchrony.redundant_groups:
            return "cannot change with asynchrony.redundant_groups: rollouts end groups by the bound they started with"
        if spec.algorithm.old_log_probs == "recompute_at_version":
            return "cannot change with algorithm.old_log_probs recompute_at_version: older weights were not kept"
    return None


def _why_no_weight(key: ChangedKey, spec: ExperimentSpec) -> str | None:
    if key.path.startswith(SOURCES) and key.before is None:
        return "cannot get a weight while it runs: without weights the order of rows is that of all of them together"
    if not key.path.startswith(SOURCES) and spec.finished_job is not None:
        return "has no effect on answers that are written already"
    return None


def _changes_what_is_recorded(key: ChangedKey, base: ExperimentSpec) -> bool:
    is_uncut = EngineCapability.UNCUT_LOG_PROBS in base.rollout.engine.CAPABILITIES
    sampling = base.rollout.sampling
    return sampling.is_cut and not is_uncut and (key.after == 1) != (sampling.temperature == 1)


def with_values(document: Document, values: Iterable[tuple[str, Any]]) -> Document:
    """Set keys in a copy of a document; every section on the way has to be there."""
    changed = deepcopy(dict(document))
    for path, value in values:
        *sections, name = path.split(".")
        target: Any = changed
        for section in sections:
            target = target[_place_in(target, section)]
        target[_place_in(target, name)] = value
    return changed


def _place_in(section: Any, name: str) -> Any:
    return int(name) if isinstance(section, list) else name


def applied(document: Document, changes: Sequence[LiveChange]) -> Document:
    """Make the document that changes lead to, in their order."""
    return with_values(document, ((key.path, key.after) for change in changes for key in change.keys))


def undone(document: Document, changes: Sequence[LiveChange]) -> Document:
    """Make the document that there was before changes, which are the last ones."""
    keys = [key for change in changes for key in change.keys]
    return with_values(document, ((key.path, key.before) for key in reversed(keys)))


def with_applied(spec: ExperimentSpec, changes: Sequence[LiveChange]) -> ExperimentSpec:
    """Make the spec that changes lead to; the same object without any.

    Raises:
        InvalidSpec: together they are none.
    """
    return validate_spec(applied(spec.model_dump(mode="json"), changes)) if changes else spec


def with_told(
    base: ExperimentSpec, changes: Sequence[LiveChange], told: Collection[str]
) -> tuple[tuple[LiveChange, ...], ExperimentSpec]:
    """Apply changes to a spec. Those that a service asked for are held to what a user may change.

    Args:
        base: the spec without changes.
        changes: all of them, oldest first.
        told: ids of those that a service asked for.

    Returns:
        The changes, with the services' values in the spec's form, and the spec.

    Raises:
        InvalidSpec: one of them names a key that cannot change or does not take effect there, begins with another value
            than the key had, has one that is not allowed, or does not hold yet.
    """
    document: Document = base.model_dump(mode="json")
    found: list[LiveChange] = []
    for change in changes:
        if change.id not in told:
            document = applied(document, [change])
            found.append(change)
            continue
        _check_told(change, document)
        spec = validate_spec(applied(document, [change]))
        before, document = document, spec.model_dump(mode="json")
        paths = [key.path for key in change.keys]
        keys = [ChangedKey(path=p, before=_value_at(before, p), after=_value_at(document, p)) for p in paths]
        for key in keys:
            if (reason := _why_not(key, spec, base)) is not None:
                raise InvalidSpec(f"{key.path}: {reason}")
        found.append(change.model_copy(update={"keys": tuple(keys)}))
    with_applied(base, [each for each in found if each.version is not None])
    return tuple(found), validate_spec(document)


def _check_told(change: LiveChange, document: Document) -> None:
    if change.version is None or max(map(len, (change.id, change.at, change.actor))) > MOST_LETTERS:
        raise InvalidSpec(f"a change does not hold yet, or its id, time or actor has over {MOST_LETTERS} letters")
    if len({key.path for key in change.keys}) < len(change.keys):
        raise InvalidSpec("a change names a key twice")
    for key in change.keys:
        if effect_of(key.path) is not change.effect:
            raise InvalidSpec(f"{key.path[:MOST_LETTERS]}: cannot change with effect {change.effect} while it runs")
        if _value_at(document, key.path) != key.before:
            raise InvalidSpec(f"{key.path}: the change begins with another value than the key had")


def _value_at(document: Document, path: str) -> Any:
    found: Any = document
    for name in path.split("."):
        found = by_number(found)
        if not isinstance(found, Mapping) or name not in found:
            raise InvalidSpec(f"{path}: the spec does not have this key")
        found = found[name]
    return found


def group_settings(changes: Sequence[LiveChange]) -> Document:
    """List what the groups issued from now on carry: changed keys by path, with their newest values.

    In the order of the changes, and without keys of a section that was changed as a whole after them.
    """
    found: dict[str, Any] = {}
    for key in (key for change in changes if change.effect is Effect.GROUP for key in change.keys):
        found = {path: value for path, value in found.items() if not f"{path}.".startswith(f"{key.path}.")}
        found[key.path] = key.after
    return found
