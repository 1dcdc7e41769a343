"""The files that wrap reward functions of other contracts load in our reward service and call them as promised."""

import ast
from pathlib import Path
from typing import Any

import pytest

from flotilla.importers.adapter import (
    adapter_name,
    openrlhf_adapter,
    verl_adapter,
    verl_batch_adapter,
    verl_keys_adapter,
    verl_rows_adapter,
)
from flotilla.services.gateway.datasets.custom import custom_rows
from flotilla.services.reward.verifiers.custom_process import grade_of, load_function
from flotilla.shared.schemas.grading import GradingSample
from flotilla.shared.schemas.trajectory import GradeStatus

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, extra_info) == ("gsm8k", {"index": 3})
    return {"score": float(solution_str.endswith(ground_truth)), "acc": True, "pred": "x"}
"""
VERL_ASYNC = """
async def grade(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)
"""
OPENRLHF = """
def reward_func(queries, prompts, labels):
    assert queries == ["2+2=4"] and prompts == ["2+2="]
    return {"rewards": [float(labels[0] == "4")], "scores": [0.5], "extra_logs": {"length": [1]}}
"""


def a_sample(**values: Any) -> GradingSample:
    column = {"style": "rule", "ground_truth": "4"}
    return GradingSample(
        **{"id": "1/0", "prompt": "2+2=", "response": "so 4", "label": "4", "data_source": "gsm8k",
           "metadata": {"extra_info": {"index": 3}, "reward_model": column}, **values}
    )  # fmt: skip


def adapter(tmp_path: Path, name: str, text: str, user: str) -> Any:
    (tmp_path / "grade.py").write_text(user)
    (tmp_path / name).write_text(text)
    return load_function(f"{tmp_path / name}:score")


def test_a_function_of_verl_gets_the_inner_label_and_its_numbers_become_metrics(tmp_path: Path) -> None:
    score = adapter(tmp_path, "a.py", verl_adapter("grade.py", "compute_score"), VERL)

    grade = grade_of(score(a_sample()))

    assert (grade.status, grade.reward, grade.metrics) == (GradeStatus.SCORED, 1.0, {"acc": 1.0})


async def test_an_async_function_of_verl_is_awaited(tmp_path: Path) -> None:
    score = adapter(tmp_path, "a.py", verl_adapter("grade.py", "grade"), VERL_ASYNC)

    assert await score(a_sample()) == 4.0


@pytest.mark.parametrize("label", ["so 4", "4", '{"other": 1}'])
def test_a_label_that_is_plain_text_is_passed_as_it_is(tmp_path: Path, label: str) -> None:
    user = (
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return ground_truth == {label!r}"
    )
    score = adapter(tmp_path, "a.py", verl_adapter("grade.py", "compute_score"), user)

    assert score(a_sample(label=label, metadata={})) == 1.0


@pytest.mark.parametrize("column", [{"ground_truth": [3, {"x": 1.5}]}, '{"ground_truth": [3, {"x": 1.5}]}'])
def test_a_label_that_is_a_structure_reaches_a_function_of_verl_as_one(tmp_path: Path, column: Any) -> None:
    user = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return ground_truth[1]['x']"
    score = adapter(tmp_path, "a.py", verl_adapter("grade.py", "compute_score"), user)

    assert score(a_sample(label='[3, {"x": 1.5}]', metadata={"reward_model": column})) == 1.5


def test_a_function_of_openrlhf_gets_lists_of_one(tmp_path: Path) -> None:
    score = adapter(tmp_path, "b.py", openrlhf_adapter("grade.py"), OPENRLHF)

    grade = grade_of(score(a_sample(response="4", label="4")))

    assert (grade.reward, grade.metrics) == (1.0, {"length": 1.0, "score": 0.5})


DATASET = """
import json
from pathlib import Path


class Tensor:
    pass


class Chats:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        assert processor is None and max_samples == -1
        self.rows = [json.loads(line) for name in data_files for line in Path(name).read_text().splitlines()]
        self.length = config.max_prompt_length + config.get("absent", 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"raw_prompt": [{"role": "user", "content": self.rows[index]["q"]}], "input_ids": Tensor(),
                "data_source": "own", "reward_model": {"ground_truth": self.length}, "extra_info": {"index": index}}
"""


def test_a_dataset_class_of_verl_makes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.py").write_text(DATASET)
    (tmp_path / "adapter.py").write_text(verl_rows_adapter("rows.py", "Chats"))
    (tmp_path / "a.jsonl").write_text('{"q": "1+1="}\n{"q": "2+2="}\n')
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path, **_: path)
    options = {"data_files": ["a.jsonl"], "tokenizer": "model", "config": {"prompt_key": "prompt",
                                                                           "max_prompt_length": 7}}  # fmt: skip

    rows = custom_rows(f"{tmp_path / 'adapter.py'}:Rows", options, None, "data.sources.0")

    assert rows == [
        {"prompt": [{"role": "user", "content": text}], "data_source": "own", "reward_model": {"ground_truth": 8},
         "extra_info": {"index": index}}
        for index, text in enumerate(["1+1=", "2+2="])
    ]  # fmt: skip


def test_an_error_of_the_function_stays_an_error(tmp_path: Path) -> None:
    score = adapter(tmp_path, "a.py", verl_adapter("grade.py", "compute_score"), VERL)

    with pytest.raises(AssertionError):
        score(a_sample(data_source="other"))


def test_adapters_of_two_functions_have_two_names() -> None:
    assert adapter_name("x/grade.py", "a") != adapter_name("x/grade.py", "b")


HOSTILE = ['x""";intruder();"""', "x\nintruder()", "x'function(**_arguments(sample))", "x{0}\\"]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_launch_file_says_is_never_code_of_an_adapter(text: str) -> None:
    for write in (
        lambda each: verl_adapter(each, each),
        lambda each: verl_batch_adapter(each, each),
        lambda each: verl_keys_adapter(each, each, [each]),
        lambda each: verl_rows_adapter(each, each),
        openrlhf_adapter,
    ):
        assert shape_of(write(text)) == shape_of(write("x"))


def shape_of(code: str) -> list[str]:
    """List the nodes of code: none more where a text is only a literal."""
    return [type(each).__name__ for each in ast.walk(ast.parse(code))]


def test_further_arguments_of_the_launch_file_reach_a_function_of_verl(tmp_path: Path) -> None:
    user = "def compute_score(data_source, solution_str, ground_truth, extra_info, low, more): return low + more['x']"

    score = adapter(tmp_path, "a.py", verl_adapter("grade.py", "compute_score", {"low": 0.5, "more": {"x": 1}}), user)

    assert grade_of(score(a_sample())).reward == 1.5


def test_further_arguments_of_a_batch_function_are_no_lists(tmp_path: Path) -> None:
    user = "def grade(data_sources, solution_strs, ground_truths, extra_infos, low): return [low] * len(data_sources)"

    score = adapter(tmp_path, "a.py", verl_batch_adapter("grade.py", "grade", {"low": 0.5}), user)

    assert grade_of(score(a_sample())).reward == 0.5
