"""From the parameters of a launch file to a spec, and a report in which each of them has its place.

The tables say what becomes of a parameter by itself, the system's rules what becomes of several together. What neither
of them read is reported as without effect here, never as applied.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flotilla.importers.engines import (
    EMBEDDED,
    OF_A_SERVER,
    OPTIONS,
    RESCORED,
    RESCORED_NOTE,
    is_rescored,
    overrides_for,
    suggestion,
)
from flotilla.importers.parameter import UNSET, Inherit, Parameter, Verdict
from flotilla.importers.report import Entry, Report
from flotilla.importers.source import Given, Source, System
from flotilla.importers.values import is_null, same, shown
from flotilla.shared.config.load.overrides import apply_overrides
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec

HIDDEN = "(not shown)"
WITHOUT_EFFECT = frozenset({Verdict.IGNORED, Verdict.UNSUPPORTED})
VARIABLE = "a name of this file's own: what refers to it by ${...} has its value"
SECRET = re.compile(r"api_?key|secret|password|_token$", re.IGNORECASE)
"""Names of parameters that we do not know, whose values must not be shown all the same."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of an import.

    Attributes:
        document: the spec as a mapping, sections in the spec's order.
        spec: the same, validated; None where that failed.
        report: what became of each parameter.
        files: further files that the spec names, by name: adapters of reward functions.
    """

    document: dict[str, Any]
    spec: ExperimentSpec | None
    report: Report
    files: Mapping[str, str]

    def may_run(self, *, allow_refused: bool = False, strict: bool = False) -> bool:
        """Whether the spec is whole, and nothing that was asked for was refused; if strict, or is unsupported."""
        is_whole = self.spec is not None and not self.report.problems
        is_done = not (strict and self.report.unsupported)
        return is_whole and is_done and (allow_refused or not self.report.refused)


INSTEAD: Mapping[str, tuple[str, ...]] = {
    "data.path": ("data.sources",), "data.sources": ("data.path",),
    "evaluation.path": ("evaluation.sets",), "evaluation.sets": ("evaluation.path", "evaluation.max_rows"),
}  # fmt: skip
"""What a field of the spec replaces where it is set last: rows are in one place or in several."""


def _without_replaced(fields: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Leave out what an override takes the place of."""
    replaced = {other for each in overrides for other in INSTEAD.get(each.partition("=")[0].strip(), ())}
    return {name: value for name, value in fields.items() if name not in replaced}


def build(
    system: System,
    given: Sequence[Given],
    *,
    rows: int | None = None,
    overrides: Sequence[str] = (),
    engine: str | None = None,
) -> Imported:
    """Make a spec from the parameters of a launch file.

    Args:
        system: whose they are.
        given: every parameter of the launch file, in its order.
        rows: rows of the training data, where that is known.
        overrides: ``KEY=VALUE`` on the spec's own fields, applied last.
        engine: sglang or vllm, which samples; None: the embedded engine.

    Raises:
        InvalidSpec: a value cannot be read; ``errors`` names the parameter.
    """
    source = Source(system, _by_name(system, given), _trees(system, given), rows)
    fields = _direct(source)
    for rule in system.rules:
        fields |= rule(source)
    if system.finish is not None:
        fields = system.finish(source, fields)
    of_engine = () if engine is None else overrides_for(system.name, given, engine)
    document = apply_overrides(_nested(_without_replaced(fields, overrides)), [*of_engine, *overrides])
    if not any(each.startswith("algorithm.old_log_probs=") for each in overrides) and is_rescored(document):
        document = _rescored(document, source)
    missing = [*source.missing] if not overrides else [each for each in source.missing if not _is_set(each, overrides)]
    spec, problems = None, missing
    try:
        spec = validate_spec(document)
    except InvalidSpec as error:
        lacked = {each.partition(":")[0] for each in missing}
        wrong = [entry for entry in error.errors if entry["path"] not in lacked]
        problems = [*missing, *(_explained(entry, source) for entry in wrong)]
    resolved = spec.model_dump(mode="json") if spec is not None else document
    entries = [_entry(each, source, resolved) for each in given]
    named = {_canonical(system, each.spelling) for each in given} | {each.spelling for each in given}
    entries += [
        Entry(name, _shown_default(source, name), "default", Verdict.REFUSED, why, {})
        for name, why in source.refusals.items()
        if name not in named
    ]
    has_server = look_up(resolved, "rollout.engine.kind") in OPTIONS
    if has_server:
        entries = [replace(each, detail=each.detail.replace(EMBEDDED, OF_A_SERVER)) for each in entries]
    told = [] if has_server or spec is None else _engine_named(document, overrides_for(system.name, given))
    report = Report(system.name, entries, problems, [*source.notes, *told])
    return Imported(document, spec, report, source.files)


def _rescored(document: dict[str, Any], source: Source) -> dict[str, Any]:
    """Let the trainer give log-probabilities that the engine cannot, where nothing else is wrong with the spec."""
    if _problem_of(document) is None:
        return document
    rescored = apply_overrides(document, [RESCORED])
    if _problem_of(rescored) is not None:
        return document
    source.notes.append(RESCORED_NOTE)
    return rescored


def _problem_of(document: Mapping[str, Any]) -> str | None:
    try:
        validate_spec(document)
    except InvalidSpec as error:
        return str(error.errors[0]["allowed"])
    return None


def _engine_named(document: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    if not overrides:
        return []
    wanted = apply_overrides(document, overrides)
    why_not = _problem_of(wanted)
    if why_not is not None and is_rescored(wanted) and _problem_of(apply_overrides(wanted, [RESCORED])) is None:
        return suggestion([*overrides, RESCORED], None)
    return suggestion(overrides, why_not)


def _by_name(system: System, given: Sequence[Given]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for each in given:
        row = system.find(each.spelling)
        if row is None or row.is_tree or row.verdict is Verdict.IGNORED or each.refusal is not None:
            continue
        earlier = found.get(row.name)
        if earlier is not None and earlier.spelling != each.spelling and is_null(each.value):
            continue  # a name of another release that its file leaves empty
        if earlier is not None and is_null(earlier.value):
            earlier = None
        if earlier is not None and earlier.spelling != each.spelling and not same(earlier.value, each.value):
            raise InvalidSpec(
                f"{each.spelling}: also given as {earlier.spelling}, with another value: keep one",
                errors=[{"path": each.spelling, "value": shown(each.value), "allowed": f"{shown(earlier.value)}"}],
            )
        found[row.name] = each
    return found


def _trees(system: System, given: Sequence[Given]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for each in given:
        row = system.find(each.spelling)
        if row is not None and row.is_tree and each.refusal is None:
            found.setdefault(row.name, {})[each.spelling] = each.value
    return found


def _direct(source: Source) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for row in source.system.parameters.values():
        if row.translate is None:
            continue
        value = source.value(row.name)
        made = UNSET if value is UNSET else row.translate(value)
        if made is not UNSET:
            fields[row.targets[0]] = made
    return fields


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for path in sorted(fields, key=lambda path: path.count(".")):
        *parents, last = path.split(".")
        target = document
        for parent in parents:
            below = target.setdefault(parent, {})
            if not isinstance(below, dict):  # a section that was set to null stays null
                break
            target = below
        else:
            if isinstance(target.get(last), dict) and isinstance(fields[path], dict):
                target[last] = {**target[last], **fields[path]}
            else:
                target[last] = fields[path]
    order = list(ExperimentSpec.model_fields)
    return dict(sorted(document.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _is_set(missing: str, overrides: Sequence[str]) -> bool:
    """A lack is said as ``field: what``; an override of that field, or above it, mends it."""
    field = missing.partition(":")[0]
    keys = [override.partition("=")[0].strip() for override in overrides]
    return any(field == key or field.startswith(f"{key}.") for key in keys)


def _explained(entry: Mapping[str, Any], source: Source) -> str:
    path = str(entry["path"])
    causes = [
        row.name
        for row in source.system.parameters.values()
        if row.name in source.read and any(target == path or target.startswith(f"{path}.") for target in row.targets)
    ]
    cause = f" (from {', '.join(causes[:4])})" if causes else ""
    hints = "".join(source.given[name].hint for name in causes if name in source.given)
    return f"{path or 'spec'}: {entry['allowed']}{cause}{hints}"


def _canonical(system: System, spelling: str) -> str | None:
    row = system.find(spelling)
    return row.name if row is not None else None


def _shown_default(source: Source, name: str) -> str:
    value = source.value(name) if name in source.system.parameters else UNSET
    return "(not given)" if value is UNSET else shown(value)


def _entry(each: Given, source: Source, resolved: Mapping[str, Any]) -> Entry:
    row = source.system.find(each.spelling)
    if each.refusal is not None:
        if row is not None and row.verdict in WITHOUT_EFFECT and row.name not in source.read:
            value = HIDDEN if row.is_secret else shown(each.value)
            return Entry(each.spelling, value, each.where, row.verdict, f"whatever its value: {row.reason}", {})
        return Entry(each.spelling, shown(each.value), each.where, Verdict.REFUSED, each.refusal, {})
    if row is None and each.is_variable and not source.system.is_section(each.spelling):
        value = HIDDEN if SECRET.search(each.spelling) else shown(each.value)
        return Entry(each.spelling, value, each.where, Verdict.IGNORED, VARIABLE, {})
    if row is None:
        known = [*source.system.parameters, *source.system.spellings]
        near = difflib.get_close_matches(each.spelling, known, n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]}?" if near else ""
        detail = f"no parameter of {source.system.name} that this importer knows{hint}"
        value = HIDDEN if SECRET.search(each.spelling) else shown(each.value)
        return Entry(each.spelling, value, each.where, Verdict.REFUSED, detail, {})
    value = HIDDEN if row.is_secret else shown(each.value)
    verdict, detail, fields = _verdict(row, each, source, resolved)
    return Entry(each.spelling, value, each.where, verdict, detail, fields)


def _verdict(
    row: Parameter, each: Given, source: Source, resolved: Mapping[str, Any]
) -> tuple[Verdict, str, dict[str, Any]]:
    for name in (row.name, each.spelling):
        if name in source.refusals:
            return Verdict.REFUSED, source.refusals[name], {}
    if row.verdict is Verdict.REFUSED:
        if row.is_judged or asks_for_nothing(row, each.value, source):
            return Verdict.IGNORED, f"asks for nothing at this value; others are refused: {row.reason}", {}
        return Verdict.REFUSED, row.reason, {}
    if each.spelling in source.set_aside:
        return Verdict.UNSUPPORTED, source.set_aside[each.spelling], {}
    if row.verdict in WITHOUT_EFFECT:
        asks = not asks_for_nothing(row, each.value, source)
        return _without_effect(row.verdict, row.reason, asks=asks)
    if row.name not in source.read and not row.is_tree:
        why = f"has no effect beside the other parameters here ({row.reason})"
        return _without_effect(row.unread, why, asks=not any(_is(each.value, known) for known in row.harmless))
    found = {target: look_up(resolved, target) for target in row.targets}
    return row.verdict, row.reason, {target: value for target, value in found.items() if value is not UNSET}


def _without_effect(verdict: Verdict, reason: str, *, asks: bool) -> tuple[Verdict, str, dict[str, Any]]:
    if verdict is Verdict.UNSUPPORTED and not asks:
        return Verdict.IGNORED, f"asks for nothing at this value; others are unsupported: {reason}", {}
    return verdict, reason, {}


def asks_for_nothing(row: Parameter, value: Any, source: Source) -> bool:
    """Return whether a refused or unsupported parameter has a value that asks for nothing."""
    default = source.value(row.default.name) if isinstance(row.default, Inherit) else row.default
    return any(_is(value, each) for each in (default, *row.harmless) if each is not UNSET)


def _is(value: Any, known: Any) -> bool:
    """Return whether a value is a known one; a switch that is on is no number."""
    is_on = value is True or (isinstance(value, str) and value.strip().lower() == "true")
    is_number = isinstance(known, int | float) and not isinstance(known, bool)
    return same(value, known) and not (is_on and is_number)


def look_up(document: Mapping[str, Any], path: str) -> Any:
    """Find the value at a dotted path; UNSET if there is none."""
    found: Any = document
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return UNSET
        found = found[part]
    return found
