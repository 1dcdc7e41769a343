"""Each row of the tables keeps its word: what is said to change the spec does, what is ignored does not."""

from typing import Any

import pytest

from flotilla.importers.build import Imported, look_up
from flotilla.importers.parameter import UNSET, Inherit, Parameter, Verdict
from flotilla.importers.systems import SYSTEMS
from flotilla.importers.values import same
from flotilla.importers.verl.trainer import FULLY_ASYNC
from shared.config.spec import ExperimentSpec
from tests.unit.importers.sources import BASES, import_flat, label, rows_with


def resolved(imported: Imported) -> dict[str, Any]:
    assert imported.spec is not None, imported.report.problems
    return imported.spec.model_dump(mode="json")


SETTINGS = [(name, row) for name, row in rows_with(Verdict.APPLIED, Verdict.TRANSLATED) if not row.is_tree]
REFUSALS = [(name, row) for name, row in rows_with(Verdict.REFUSED) if not row.is_judged]  # else tested by name
WITH_DEFAULT = [
    (name, row)
    for name, row in REFUSALS
    if row.default is not UNSET and row.default is not None and not isinstance(row.default, Inherit)
]


@pytest.mark.parametrize(("system", "row"), SETTINGS, ids=label)
def test_a_changed_parameter_changes_the_field_that_its_row_names(system: str, row: Parameter) -> None:
    base = {**BASES[system], **row.context}

    before = resolved(import_flat(system, base))
    imported = import_flat(system, {**base, row.name: row.example})

    after = resolved(imported)
    entry = next(entry for entry in imported.report.entries if entry.name == row.name)
    assert entry.verdict is row.verdict, entry
    assert imported.report.problems == []
    for target in row.targets:
        assert look_up(before, target) != look_up(after, target), target
        if look_up(after, target) is not UNSET:
            assert entry.fields[target] == look_up(after, target)


@pytest.mark.parametrize(("system", "row"), rows_with(Verdict.IGNORED), ids=label)
def test_an_ignored_parameter_changes_nothing(system: str, row: Parameter) -> None:
    name = f"{row.name}.anything" if row.is_tree else row.name
    name = "algorithm._target_" if row.name == "_target_" else name
    base = {**BASES[system], **(FULLY_ASYNC if name.startswith("async_training.") else {})}

    imported = import_flat(system, {**base, name: [] if name == "defaults" else "another-value"})

    assert resolved(imported) == resolved(import_flat(system, base))
    assert [entry.verdict for entry in imported.report.entries if entry.name == name] == [Verdict.IGNORED]


@pytest.mark.parametrize(("system", "row"), rows_with(Verdict.UNSUPPORTED), ids=label)
def test_what_is_unsupported_is_named_and_changes_nothing(system: str, row: Parameter) -> None:
    name = f"{row.name}.anything" if row.is_tree else row.name
    base = {**BASES[system], **(FULLY_ASYNC if name.startswith("async_training.") else {})}

    asked = import_flat(system, {**base, name: "another-value"})

    assert resolved(asked) == resolved(import_flat(system, base))
    assert [(entry.name, entry.detail) for entry in asked.report.unsupported if entry.name == name] == [
        (name, row.reason)
    ]
    assert asked.may_run() and not asked.may_run(strict=True)


@pytest.mark.parametrize(("system", "row"), rows_with(Verdict.UNSUPPORTED), ids=label)
def test_a_way_to_run_that_asks_for_nothing_is_ignored(system: str, row: Parameter) -> None:
    name = f"{row.name}.anything" if row.is_tree else row.name
    values = [value for value in row.harmless if value not in (None, False, {}, [])]
    values = values or [False if False in row.harmless else row.default]
    base = {**BASES[system], **(FULLY_ASYNC if name.startswith("async_training.") else {})}

    for value in values:
        report = import_flat(system, {**base, name: str(value) if system == "openrlhf" else value}).report
        assert [entry.verdict for entry in report.entries if entry.name == name] == [Verdict.IGNORED], value


@pytest.mark.parametrize(("system", "row"), REFUSALS, ids=label)
def test_a_refused_parameter_makes_the_import_fail_unless_refusals_are_allowed(system: str, row: Parameter) -> None:
    name = f"{row.name}.anything" if row.is_tree else row.name

    imported = import_flat(system, {**BASES[system], name: other_than(row)})

    entry = next(entry for entry in imported.report.entries if entry.name == name)
    assert (entry.verdict, entry.detail) == (Verdict.REFUSED, row.reason)
    assert not imported.may_run()
    assert imported.may_run(allow_refused=True)


@pytest.mark.parametrize(("system", "row"), WITH_DEFAULT, ids=label)
def test_a_refused_parameter_at_its_default_is_no_refusal(system: str, row: Parameter) -> None:
    imported = import_flat(system, {**BASES[system], row.name: row.default})

    assert imported.report.refused == []


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
