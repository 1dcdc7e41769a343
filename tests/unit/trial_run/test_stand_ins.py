from types import SimpleNamespace
from typing import Any

import pytest

from flotilla.importers.adapter import openrlhf_adapter, verl_adapter, verl_batch_adapter, verl_keys_adapter
from flotilla.shared.errors import InvalidRequest
from flotilla.trial_run.stand_ins import ENVIRONMENT, SAMPLE, TOOL, call_of, grader_for, loaded_by, loading, named

SAMPLES = [
    SimpleNamespace(response=f"answer {n}", prompt="p", label="1", data_source="d", metadata={}) for n in range(16)
]


def run(code: str, **names: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "made", **names}
    exec(compile(code, "made.py", "exec"), found)
    return found


@pytest.mark.parametrize(
    "adapter",
    [
        verl_adapter("own/grade.py", "compute"),
        verl_batch_adapter("own/grade.py", "compute"),
        verl_keys_adapter("own/grade.py", "compute", ["format", "acc"]),
        openrlhf_adapter("own/grade.py"),
    ],
)
def test_an_adapter_calls_its_stand_in_and_rewards_differ(adapter: str, tmp_path: Any) -> None:
    (tmp_path / "stand_in.py").write_text(grader_for(adapter))
    file = tmp_path / "adapter.py"
    file.write_text(loading(adapter, "stand_in.py"))

    score = run(file.read_text(), __file__=str(file))["score"]

    found = [score(sample) for sample in SAMPLES]
    assert {each["reward"] if isinstance(each, dict) else each for each in found} == {0.0, 1.0}
    assert loaded_by(adapter) == "own/grade.py"


def test_stand_ins_have_the_signatures_that_the_fleet_calls() -> None:
    graded = [run(SAMPLE.format(name="score"))["score"](sample)["reward"] for sample in SAMPLES]
    environment = run(ENVIRONMENT.format(name="Shop"))["Shop"](kind="shop")

    observation, info = environment.reset(3)
    after, reward, is_over, is_cut, _ = environment.step("1")

    assert set(graded) == {0.0, 1.0}
    assert isinstance(observation, str) and info == {}
    assert isinstance(after, str) and reward in {0.0, 1.0} and is_cut is False and isinstance(is_over, bool)
    assert "made-up" in run(TOOL.format(name="search"))["search"](query="x")


def test_arguments_are_those_of_the_function() -> None:
    assert call_of("def f(a, b=1): ...\ndef g(): ...\n", "f") == {"a": "1", "b": "1"}


@pytest.mark.parametrize("name", ["a():\n    pass\nprint(1)\ndef b", "class", "", "a.b"])
def test_a_name_that_is_none_of_python_comes_into_no_code(name: str) -> None:
    for write in (lambda: grader_for(verl_adapter("own/grade.py", name)), lambda: named(TOOL, name)):
        with pytest.raises(InvalidRequest, match="no name of a function"):
            write()
