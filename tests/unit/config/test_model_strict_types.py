"""Numbers are written as numbers and truths as truths, in every field of the spec; what loses nothing is taken."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flotilla.launch_file import read_launch_file
from flotilla.shared.config.base.model import NUMBERS, _options, check_exact, is_guessed
from flotilla.shared.config.load.spec_text import parse_document, validate_spec
from flotilla.shared.config.load.yaml_text import read_value, write_value
from flotilla.shared.config.spec import ExperimentSpec
from flotilla.shared.errors import InvalidSpec
from tests.unit.config.test_yaml_text import sections_below

DOCUMENT: dict[str, Any] = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "reward": {"components": [{"kind": "numeric"}]},
    "optimisation": {"steps": 3},
}
SECTIONS: list[type[BaseModel]] = [
    ExperimentSpec,
    *sorted(sections_below(ExperimentSpec, set()), key=lambda model: model.__name__),
]
FIELDS = [(model, name) for model in SECTIONS for name, field in model.model_fields.items()]
GUESSED = [(model, name) for model, name in FIELDS if is_guessed(model.model_fields[name].annotation)]


def refusals(model: type[BaseModel], name: str, value: Any) -> list[str]:
    """Validate a section with one value, and give what is said of its field."""
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        return [item["msg"] for item in error.errors() if item["loc"][:1] == (name,)]
    return []


def test_every_field_that_holds_a_number_or_a_truth_is_looked_at() -> None:
    assert len(GUESSED) > 140


@pytest.mark.parametrize(("model", "name"), GUESSED, ids=lambda value: getattr(value, "__name__", value))
def test_no_field_takes_a_truth_for_a_number_or_the_other_way_round(model: type[BaseModel], name: str) -> None:
    options = _options(model.model_fields[name].annotation)
    wrong: list[Any] = ["1", "0.5"] if options & NUMBERS else []
    wrong += [True, False] if options & NUMBERS and bool not in options else []
    wrong += [1, 0, 1.0, "true", "on", "1"] if bool in options and not options & NUMBERS else []
    if not options & {int, float, bool}:  # a list or a mapping of such
        wrong = [[True], [True, True], ["1"], ["1", "1"], {"a": True}, {"a": "1"}]

    taken = [value for value in wrong if not refusals(model, name, value)]

    assert taken == []


@pytest.mark.parametrize(
    ("written", "path", "allowed"),
    [
        ("optimisation: {steps: true}", "optimisation.steps", "a number is wanted, not true or false, got True"),
        ("optimisation: {steps: yes}", "optimisation.steps", "a number is wanted, not true or false"),
        ("optimisation: {steps: '3'}", "optimisation.steps", "not text: write it without quotes, got '3'"),
        ("optimisation: {steps: 3.5}", "optimisation.steps", "valid integer"),
        ("optimisation: {steps: 3, learning_rate: '1e-5'}", "optimisation.learning_rate", "without quotes"),
        ("optimisation: {steps: 3, betas: [0.9, true]}", "optimisation.betas", "item 1: a number is wanted"),
        ("evaluation: {path: p, greedy: 1}", "evaluation.greedy", "true or false is wanted, not a number"),
        ("evaluation: {path: p, greedy: 'off'}", "evaluation.greedy", "true or false is wanted, without quotes"),
        ("seed: false", "seed", "a number is wanted"),
    ],
)
def test_what_would_be_guessed_is_refused_at_its_path(written: str, path: str, allowed: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        validate_spec(DOCUMENT | parse_document(written, source="spec"))

    said = {entry["path"]: str(entry["allowed"]) for entry in caught.value.errors}
    assert allowed in said[path]
    assert path in caught.value.detail


@pytest.mark.parametrize("written", ["1e-5", "1E-5", "1.e-5", "1.0e-5", ".1e-4", "0.00001", "+1e-5"])
def test_a_learning_rate_is_a_number_however_it_is_written(written: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(DOCUMENT)[:-2] + f', "learning_rate": {written}}}}}')

    from_file = read_launch_file(file).spec
    on_command_line = read_launch_file(file, [f"optimisation.learning_rate={written}"]).spec
    in_environment = read_launch_file(file, (), {"FLOTILLA_SPEC__OPTIMISATION__LEARNING_RATE": written}).spec

    rates = {spec.optimisation.learning_rate for spec in (from_file, on_command_line, in_environment)}
    assert rates == {1e-5}


def test_a_whole_number_may_be_written_as_a_float_and_a_float_as_a_whole_number() -> None:
    written = "optimisation: {steps: 1e3, learning_rate: 1}\nseed: 7.0"

    spec = validate_spec(DOCUMENT | parse_document(written, source="spec"))

    assert (spec.optimisation.steps, spec.seed, spec.optimisation.learning_rate) == (1000, 7, 1.0)


@pytest.mark.parametrize("text", ["1e5", "-1e-5", "1.5E+3", "true", "on", "12", "", "v1e5", "1e", "null"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert read_value(write_value({"a": text, "b": [text]})) == {"a": text, "b": [text]}
    assert read_value(write_value(text, flow=True)) == text


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, bool | int),
        ("3", str | int),
        ("auto", int | None | str),
        (None, int | None),
        ([1, 2.5], tuple[float, ...]),
        ({"a": 1}, dict[str, float]),
        ([True], list[bool]),
        ("three", int),
    ],
)
def test_what_the_field_takes_is_left_to_it(value: Any, annotation: Any) -> None:
    check_exact(value, annotation)
