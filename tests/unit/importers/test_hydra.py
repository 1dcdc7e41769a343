"""YAML as Hydra reads it: overrides, interpolations, and messages that name the place."""

from typing import Any

import pytest

from flotilla.importers.hydra import apply_hydra_overrides, as_given, read_yaml
from flotilla.importers.parameter import UNSET
from flotilla.shared.errors import InvalidSpec


def values(text: str, *overrides: str, **environment: str) -> dict[str, Any]:
    flat, touched = apply_hydra_overrides(read_yaml(text, source="f.yaml"), overrides)
    defaults = {"data.max_prompt_length": 512}
    given = as_given(flat, touched, lambda name: defaults.get(name, UNSET), environment)
    return {each.spelling: each.value for each in given}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("a: {b: 3, c: '${a.b}'}", "a.c", 3),
        ("a: {b: 3, c: '${.b}'}", "a.c", 3),
        ("a: {b: 3}\nc: 'x-${a.b}-y'", "c", "x-3-y"),
        ("a: {b: x, x: 7}\nc: '${a.${a.b}}'", "c", 7),
        ("a: '${data.max_prompt_length}'", "a", 512),
        ("a: '${oc.env:HOME_OF_DATA}/train'", "a", "/data/train"),
        ("a: '${oc.env:NOT_THERE,17}'", "a", 17),
        ("a: '${oc.select:not.there,null}'", "a", None),
        ("a: '${now:%%}'", "a", "%"),
        ("a: ['${b}', 2]\nb: 1", "a", [1, 2]),
        ("a: {}", "a", {}),
    ],
)
def test_an_interpolation_gives_the_value_that_it_names(text: str, name: str, value: Any) -> None:
    assert values(text, HOME_OF_DATA="/data")[name] == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=4", {"a.b": 4, "a.c": 2}),
        ("+a.d=x", {"a.b": 1, "a.c": 2, "a.d": "x"}),
        ("++a.b=[1,2]", {"a.b": [1, 2], "a.c": 2}),
        ("~a.b", {"a.c": 2}),
        ("a=5", {"a": 5}),
        ("a={b: 6}", {"a.b": 6}),
        ("a.b=", {"a.b": None, "a.c": 2}),
        ("a.b=[console,wandb]", {"a.b": ["console", "wandb"], "a.c": 2}),
    ],
)
def test_an_override_sets_adds_or_removes(override: str, expected: dict[str, Any]) -> None:
    assert values("a: {b: 1, c: 2}", override) == expected


def test_an_override_is_told_from_the_file() -> None:
    flat, touched = apply_hydra_overrides({"a": 1, "b": 2}, ["b=3"])

    given = as_given(flat, touched, lambda name: UNSET, {})

    assert [(each.spelling, each.where) for each in given] == [("a", "file"), ("b", "override")]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a: '${b}'\nb: '${a}'", "a"),
        ("a: '${a}'", "a"),
        ("a: {b: '${nowhere.at.all}'}", "a.b"),
        ("a: '${unclosed'", "a"),
        ("a: '${uuid:}'", "a"),
        ("a: '${b}'\nb: '${oc.env:NOT_THERE}'", "b"),
        ("1.5: x", "f.yaml"),
        ("a: 2020-13-45", "f.yaml"),
    ],
)
def test_what_cannot_be_resolved_is_a_message_with_its_place(text: str, path: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        values(text)

    assert [entry["path"] for entry in caught.value.errors] == [path]


def test_a_variable_that_is_not_set_is_the_fault_of_its_parameter_alone() -> None:
    given = as_given({"a": "${oc.env:SOME_API_KEY}", "b": 2}, set(), lambda name: UNSET, {})

    assert [(each.spelling, each.refusal is None) for each in given] == [("a", False), ("b", True)]
    assert "SOME_API_KEY" in str(given[0].refusal)


@pytest.mark.parametrize("override", ["novalue", "=3", "a b=3", "-x=1"])
def test_an_override_of_no_known_form_is_a_message(override: str) -> None:
    with pytest.raises(InvalidSpec, match="override"):
        values("a: 1", override)
