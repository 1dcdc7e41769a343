"""Each row of the tables keeps its word: what is said to change the spec does, what is ignored does not."""

from functools import cache
from typing import Any

import pytest

from flotilla.importers.build import Imported, look_up
from flotilla.importers.parameter import UNSET, Inherit, Parameter, Verdict
from flotilla.importers.systems import SYSTEMS
from flotilla.importers.values import same
from flotilla.importers.verl.releases import IN_REWARD, OLDER
from flotilla.importers.verl.trainer import FULLY_ASYNC
from flotilla.shared.config.spec import ExperimentSpec
from tests.unit.importers.sources import BASES, import_flat, rows_with


def resolved(imported: Imported) -> dict[str, Any]:
    assert imported.spec is not None, imported.report.problems
    return imported.spec.model_dump(mode="json")


@cache
def resolved_base(system: str, name: str) -> dict[str, Any]:
    return resolved(import_flat(system, base_of(system, name)))


def base_of(system: str, name: str) -> dict[str, Any]:
    today = {IN_REWARD: False} if name in OLDER else {}  # else it says that the file is of an older release
    return {**BASES[system], **today, **(FULLY_ASYNC if name.startswith("async_training.") else {})}


def rows_of(system: str, *verdicts: Verdict) -> list[Parameter]:
    found = [row for of, row in rows_with(*verdicts) if of == system]
    assert found
    return found


def refusals_of(system: str) -> list[Parameter]:
    return [row for row in rows_of(system, Verdict.REFUSED) if not row.is_judged]  # else tested by name


def name_in_a_file(row: Parameter) -> str:
    if row.name == "_target_":
        return "algorithm._target_"
    return f"{row.name}.anything" if row.is_tree else row.name


def verdicts_of(imported: Imported, name: str) -> list[Verdict]:
    return [entry.verdict for entry in imported.report.entries if entry.name == name]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_changed_parameter_changes_the_field_that_its_row_names(system: str) -> None:
    for row in rows_of(system, Verdict.APPLIED, Verdict.TRANSLATED):
        if row.is_tree:
            continue
        base = {**BASES[system], **row.context}

        before = resolved(import_flat(system, base)) if row.context else resolved_base(system, "")
        imported = import_flat(system, {**base, row.name: row.example})

        after = resolved(imported)
        entry = next(entry for entry in imported.report.entries if entry.name == row.name)
        assert entry.verdict is row.verdict, entry
        assert imported.report.problems == [], row.name
        for target in row.targets:
            assert look_up(before, target) != look_up(after, target), (row.name, target)
            if look_up(after, target) is not UNSET:
                assert entry.fields[target] == look_up(after, target), row.name


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_ignored_parameter_changes_nothing(system: str) -> None:
    for name in map(name_in_a_file, rows_of(system, Verdict.IGNORED)):
        value = [] if name == "defaults" else "another-value"
        imported = import_flat(system, {**base_of(system, name), name: value})

        assert resolved(imported) == resolved_base(system, name), name
        assert verdicts_of(imported, name) == [Verdict.IGNORED], name


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_unsupported_is_named_and_changes_nothing(system: str) -> None:
    for row in rows_of(system, Verdict.UNSUPPORTED):
        name = name_in_a_file(row)

        asked = import_flat(system, {**base_of(system, name), name: "another-value"})

        assert resolved(asked) == resolved_base(system, name), name
        found = [(entry.name, entry.detail) for entry in asked.report.unsupported if entry.name == name]
        assert found == [(name, row.reason)]
        assert asked.may_run() and not asked.may_run(strict=True), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_way_to_run_that_asks_for_nothing_is_ignored(system: str) -> None:
    for row in rows_of(system, Verdict.UNSUPPORTED):
        name = name_in_a_file(row)
        values = [value for value in row.harmless if value not in (None, False, {}, [])]
        values = values or [False if False in row.harmless else row.default]

        for value in values:
            written = str(value) if system == "openrlhf" else value
            imported = import_flat(system, {**base_of(system, name), name: written})
            assert verdicts_of(imported, name) == [Verdict.IGNORED], (name, value)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_refused_parameter_makes_the_import_fail_unless_refusals_are_allowed(system: str) -> None:
    for row in refusals_of(system):
        name = name_in_a_file(row)

        imported = import_flat(system, {**BASES[system], name: other_than(row)})

        entry = next(entry for entry in imported.report.entries if entry.name == name)
        assert (entry.verdict, entry.detail) == (Verdict.REFUSED, row.reason), name
        assert not imported.may_run(), name
        assert imported.may_run(allow_refused=True), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_refused_parameter_at_its_default_is_no_refusal(system: str) -> None:
    for row in refusals_of(system):
        if row.default is not UNSET and row.default is not None and not isinstance(row.default, Inherit):
            assert import_flat(system, {**BASES[system], row.name: row.default}).report.refused == [], row.name


def other_than(row: Parameter) -> Any:
    candidates: tuple[Any, ...] = (True, False, 7, "something-else")
    default = None if isinstance(row.default, Inherit) else row.default
    typed = [value for value in candidates if type(value) is type(default)]
    return next(
        value for value in (*typed, *reversed(candidates))
        if not any(same(value, each) for each in (default, *row.harmless) if each is not UNSET)
    )  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_target_is_a_field_of_the_spec(system: str) -> None:
    schema = ExperimentSpec.model_json_schema()
    names = {name for part in schema["$defs"].values() for name in part.get("properties", {})} | set(
        schema["properties"]
    )

    for row in SYSTEMS[system].parameters.values():
        for target in row.targets:
            assert set(target.split(".")) <= names, target


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_row_gives_a_reason_of_one_line(system: str) -> None:
    for row in SYSTEMS[system].parameters.values():
        assert row.reason and "\n" not in row.reason, row.name
        assert bool(row.targets) == (row.verdict in {Verdict.APPLIED, Verdict.TRANSLATED}), row.name


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_base_of_these_tests_imports_without_a_refusal(system: str) -> None:
    imported = import_flat(system, BASES[system])

    assert imported.may_run(), imported.report.render()
    assert {entry.name for entry in imported.report.entries} == set(BASES[system])
