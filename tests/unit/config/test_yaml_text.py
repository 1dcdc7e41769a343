"""A spec survives being written as YAML and read again, whatever it holds."""

import importlib
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flotilla.shared.config.load.yaml_text import read_value, write_value
from flotilla.shared.config.spec import ExperimentSpec

# A rule imports it when a URL is first drawn, and importing it draws a random number: the strategies may draw none.
importlib.import_module("httpx")

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "name": st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"),
    "pattern": st.sampled_from([r"(\d+)", r"answer: (.*)", "('\"#: )"]),
    "url": st.sampled_from(["https://grader.example.org/x", "http://127.0.0.1:5000"]),
    "hub": st.sampled_from(["squad", "own.er/na-me"]),
    "custom": st.sampled_from(["rows.py:Rows", "ünï/c ode.py:R"]),
    "environment": st.sampled_from(["frozen_lake", "ünï/c ode.py:Lake", "gymnasium:CliffWalking-v1"]),
    "input_template": st.sampled_from(["{}", "Q: {}\nA:", "é{}# '"]),
}
"""Fields whose text has a form."""
WHOLE: dict[str, st.SearchStrategy[Any]] = {
    "factors": st.dictionaries(WORDS, st.floats(0.01, 100.0), min_size=1, max_size=2),
    "pools": st.just([{"name": "hard", "below": 0.5}, {"name": "easy", "at_least": 0.5, "weight": 2.0}]),
    "tool_schema": st.sampled_from(["tool.json", {"type": "function", "function": {"name": "ünï", "x": [1.5, None]}}]),
    "environments": st.just([{"environment": "sokoban", "data_sources": ["a"]}, {"environment": "frozen_lake"}]),
}
"""Fields whose parts depend on each other."""
OFTEN = frozenset({"path", "hub", "custom", "sources", "sets", "command"})
"""Without one of these a section of rows, or of a server of tools, is empty, and refused."""
RARELY = [False, False, True]


def bounds(field: FieldInfo) -> tuple[Any, Any]:
    low = next((getattr(item, key) for item in field.metadata for key in ("ge", "gt") if hasattr(item, key)), None)
    high = next((getattr(item, key) for item in field.metadata for key in ("le", "lt") if hasattr(item, key)), None)
    return low, high


def of_type(annotation: Any, name: str, field: FieldInfo) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if name in WHOLE:
        return WHOLE[name]
    if origin is Annotated:
        return of_type(arguments[0], name, field)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in {Union, types.UnionType}:
        return st.one_of([of_type(each, name, field) for each in arguments])
    if origin is tuple:
        return st.lists(of_type(arguments[0], name, field), min_size=2, max_size=2)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0], name, field), WORDS, min_size=1, max_size=2)
    if origin is Mapping:
        return st.dictionaries(WORDS, of_type(arguments[1], name, field), min_size=1, max_size=2)
    if annotation is type(None):
        return st.none()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return sections(annotation)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return st.sampled_from([member.value for member in annotation])
    low, high = bounds(field)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(low if low is not None else -100, high if high is not None else (low or 0) + 10_000)
    if annotation is float:
        return st.floats(low if low is not None else -1e6, high if high is not None else 1e6, allow_nan=False)
    if name == "path":
        return st.sampled_from(["a.jsonl", "grade.py:score", "ünï/c ode: #.parquet", "~/x.json"])
    return SPECIAL.get(name, WORDS)


@st.composite
def sections(draw: st.DrawFn, model: type[BaseModel]) -> Any:
    """Draw a valid section: what its rules refuse is left out again."""
    values: dict[str, Any] = {}
    # Required ones first: rules across fields are only asked when all of them are there.
    for name, field in sorted(model.model_fields.items(), key=lambda item: not item[1].is_required()):
        is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if is_tag:
            values[name] = get_args(field.annotation)[0]
        elif field.is_required():
            values[name] = draw(of_type(field.annotation, name, field))
        elif draw(st.sampled_from([True, False] if name in OFTEN or holds_section(field.annotation) else RARELY)):
            drawn = draw(of_type(field.annotation, name, field))
            if is_valid(model, {**values, name: drawn}):
                values[name] = drawn
    return values


def holds_section(annotation: Any) -> bool:
    if isinstance(annotation, type):
        return issubclass(annotation, BaseModel)
    return any(holds_section(each) for each in get_args(annotation))


def is_valid(model: type[BaseModel], values: dict[str, Any]) -> bool:
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    try:
        model.model_validate(values)
    except ValidationError as error:
        # Required fields that are still to be drawn are no fault of this one.
        return all(item["type"] == "missing" and item["loc"][0] in required for item in error.errors())
    return True


@given(document=sections(ExperimentSpec))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_spec_written_as_yaml_is_the_same_spec(document: dict[str, Any]) -> None:
    try:
        spec = ExperimentSpec.model_validate(document)
    except ValidationError:
        return  # a required section was drawn against the rules of its own fields

    written = write_value(spec.model_dump(mode="json"))

    assert ExperimentSpec.model_validate(read_value(written)) == spec


def sections_below(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    for field in model.model_fields.values():
        for below in models_in(field.annotation):
            if below not in seen:
                seen |= {below} | sections_below(below, seen | {below})
    return seen


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for each in get_args(annotation) for model in models_in(each)]


SECTIONS = sorted(sections_below(ExperimentSpec, set()), key=lambda model: model.__name__)


def test_every_variant_is_among_the_sections() -> None:
    assert len(SECTIONS) > 60


@pytest.mark.parametrize("model", SECTIONS, ids=lambda model: model.__name__)
def test_every_section_and_variant_survives_yaml(model: type[BaseModel]) -> None:
    valid = 0

    @given(values=sections(model))
    @settings(max_examples=16, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def survives(values: dict[str, Any]) -> None:
        nonlocal valid
        try:
            section = model.model_validate(values)
        except ValidationError:
            return
        valid += 1
        written = write_value(section.model_dump(mode="json"))
        assert model.model_validate(read_value(written)) == section

    survives()

    assert valid
