"""File, environment, command line: which of them wins, what is said of a mistake, and where a value is from."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla.launch_file import LaunchFile, read_launch_file
from flotilla.shared.config.load.overrides import apply, in_environment, on_command_line, origin_of
from flotilla.shared.errors import InvalidSpec

FILE: dict[str, Any] = {
    "name": "trial",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl"},
    "reward": {"components": [{"kind": "numeric"}]},
    "optimisation": {"steps": 10, "betas": [0.9, 0.99]},
}


def launched(folder: Path, environment: dict[str, str], *sets: str) -> LaunchFile:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(FILE))
    return read_launch_file(path, sets, environment)


def test_the_environment_beats_the_file_and_the_command_line_beats_both(tmp_path: Path) -> None:
    environment = {"FLOTILLA_SPEC__OPTIMISATION__STEPS": "50", "FLOTILLA_SPEC__SEED": "7", "FLOTILLA_URL": "x"}

    spec = launched(tmp_path, environment, "seed=8").spec

    assert (spec.optimisation.steps, spec.seed) == (50, 8)
    assert spec.optimisation.betas == (0.9, 0.99)


def test_a_whole_section_comes_before_its_keys_whatever_their_order(tmp_path: Path) -> None:
    environment = {
        "FLOTILLA_SPEC__EVALUATION__GREEDY": "false",
        "FLOTILLA_SPEC__EVALUATION": "{path: held.jsonl, greedy: true}",
        "FLOTILLA_SPEC__REWARD__COMPONENTS__0__KIND": "exact",
    }

    spec = launched(tmp_path, environment).spec

    assert spec.evaluation is not None and not spec.evaluation.greedy
    assert spec.evaluation.path == str(tmp_path / "held.jsonl")
    assert spec.reward.components[0].kind == "exact"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FLOTILLA_SPEC__OPTIMISATION__STEPZ": "5"},
         "unknown key 'stepz'; did you mean optimisation.steps? (set by FLOTILLA_SPEC__OPTIMISATION__STEPZ)"),
        ({"FLOTILLA_SPEC__OPTIMIZATION__STEPS": "5"},
         "unknown key 'optimization'; did you mean optimisation? (set by FLOTILLA_SPEC__OPTIMIZATION__STEPS)"),
        ({"FLOTILLA_SPEC__OPTIMISATION__STEPS": "many"}, "got 'many' (set by FLOTILLA_SPEC__OPTIMISATION__STEPS)"),
        ({"FLOTILLA_SPEC__": "5"}, "FLOTILLA_SPEC__ names no key"),
        ({"FLOTILLA_SPEC__NAME__DEEPER": "5"}, "is a value, not a section"),
        ({"FLOTILLA_SPEC__REWARD__COMPONENTS__1__KIND": "exact"}, "the list has 1 items"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_the_name_of_the_variable(
    tmp_path: Path, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        launched(tmp_path, environment)

    assert words in caught.value.detail
    assert next(iter(environment)) in caught.value.detail


def test_an_error_of_the_file_names_no_override(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as caught:
        launched(tmp_path, {"FLOTILLA_SPEC__SEED": "1"}, "optimisation.betas=3")

    assert [entry["path"] for entry in caught.value.errors] == ["optimisation.betas"]
    assert "set by --set optimisation.betas" in caught.value.detail


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("name", "file"),
        ("seed", "default"),
        ("optimisation.steps", "environment variable FLOTILLA_SPEC__OPTIMISATION__STEPS"),
        ("optimisation.betas", "command line"),
        ("reward.components.0.kind", "file"),
        ("algorithm.advantage.kind", "command line"),
        ("algorithm.advantage.epsilon", "default"),
        ("model.path", "environment variable flotilla_spec__model"),
        ("model.dtype", "default"),
    ],
)
def test_a_value_is_from_the_last_that_wrote_it(path: str, origin: str) -> None:
    layers = [
        *in_environment({"FLOTILLA_SPEC__OPTIMISATION__STEPS": "5", "flotilla_spec__model": "{path: other}"}),
        *on_command_line(["optimisation.betas.1=0.999", "algorithm.advantage={kind: rloo}"]),
    ]

    assert apply(FILE, layers)["optimisation"]["betas"] == [0.9, 0.999]
    assert origin_of(path.split("."), FILE, layers) == origin


@pytest.mark.parametrize("value", ["[" * 3000, "&a [*a]", "&a {b: *a}"])
def test_a_value_without_end_is_refused_with_where_it_was_given(value: str) -> None:
    with pytest.raises(InvalidSpec, match="override --set data: "):
        on_command_line([f"data={value}"])
    with pytest.raises(InvalidSpec, match="override FLOTILLA_SPEC__DATA: "):
        in_environment({"FLOTILLA_SPEC__DATA": value})
