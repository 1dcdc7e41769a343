"""verl's programs that answer problems without training become jobs of kind ``evaluation``."""

from typing import Any

import pytest
import yaml

from flotilla.importers.build import UNSET, Imported, build, look_up
from flotilla.importers.parameter import Verdict
from flotilla.importers.systems import read, system_of
from flotilla.importers.verl.generation import OF_PROGRAM, SERVER
from flotilla.shared.errors import InvalidSpec
from tests.unit.importers.sources import nested

BASES: dict[str, dict[str, Any]] = {
    "main_generation": {"data.path": "test.parquet", "model.path": "m", "rollout.response_length": 1024},
    "main_generation_server": {"data.train_files": ["test.parquet"], "actor_rollout_ref.model.path": "m",
                               f"{SERVER}.response_length": 1024},
}  # fmt: skip


def imported(program: str, **values: Any) -> Imported:
    words = " ".join(f"'{name}={value}'" for name, value in {**BASES[program], **values}.items())
    given = read("verl", f"python3 -m verl.trainer.{program} {words}\n", (), {}, source="run.sh")
    system = system_of("verl", given)
    assert system is OF_PROGRAM[program]
    return build(system, given)


@pytest.mark.parametrize(
    ("program", "values", "expected"),
    [
        ("main_generation", {}, {"greedy": False, "temperature": 1.0, "top_k": 50, "top_p": 0.7, "group_size": 5}),
        ("main_generation", {"rollout.temperature": 0, "data.n_samples": 1}, {"greedy": True, "group_size": 1}),
        ("main_generation_server", {}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "group_size": 1}),
        ("main_generation_server", {f"{SERVER}.top_k": 50}, {"greedy": False, "top_k": 0}),
    ],
)  # fmt: skip
def test_answers_are_sampled_as_there(program: str, values: dict[str, Any], expected: dict[str, Any]) -> None:
    found = imported(program, **values)

    assert found.may_run(), found.report.render()
    assert found.spec is not None and found.spec.job.kind == "evaluation"
    evaluation = found.document["evaluation"]
    assert {name: evaluation.get(name, True) for name in expected} == expected
    assert evaluation["path"] == "test.parquet"
    assert found.document["rollout"]["sampling"]["max_new_tokens"] == 1024


def test_several_files_are_sets_of_their_own() -> None:
    found = imported("main_generation_server", **{"data.train_files": '["a.parquet", "b.parquet"]'})

    assert [each["name"] for each in found.document["evaluation"]["sets"]] == ["a", "b"]


def test_a_yaml_file_with_the_number_of_answers_is_one_of_problems() -> None:
    text = yaml.safe_dump(nested({**BASES["main_generation"], "data.n_samples": 2}))
    given = read("verl", text, (), {}, source="generation.yaml")

    found = build(system_of("verl", given), given)
    assert found.may_run() and found.document["evaluation"]["group_size"] == 2


@pytest.mark.parametrize("program", OF_PROGRAM)
def test_a_changed_parameter_changes_the_field_that_its_row_names(program: str) -> None:
    before = imported(program)
    assert before.spec is not None
    for row in OF_PROGRAM[program].parameters.values():
        if row.is_tree or row.verdict not in {Verdict.APPLIED, Verdict.TRANSLATED}:
            continue
        first = imported(program, **row.context) if row.name.startswith("custom_reward") and row.context else before
        after = imported(program, **{**row.context, row.name: row.example})
        assert after.spec is not None, (row.name, after.report.problems)
        for target in row.targets:
            values = [look_up(each.spec.model_dump(mode="json"), target) for each in (first, after) if each.spec]
            assert values[0] != values[1] and UNSET not in values, (row.name, target)


def test_what_no_program_reads_is_refused() -> None:
    found = imported("main_generation", **{"rollout.unknown": 1})

    assert [each.name for each in found.report.refused] == ["rollout.unknown"]


def test_a_script_that_answers_and_then_scores_is_one_evaluation_by_that_function() -> None:
    text = (
        "python3 -m verl.trainer.main_generation data.path=a/test.parquet data.n_samples=8 model.path=owner/model\n"
        "python3 -m recipe.r1.main_eval data.path=a/answers.parquet custom_reward_function.path=score.py "
        "custom_reward_function.name=grade\n"
    )
    given = read("verl", text, (), {}, source="run.sh")
    found = build(system_of("verl", given), given, rows=None)

    assert found.may_run() and found.spec is not None, found.report.render()
    assert found.spec.evaluation is not None and found.spec.evaluation.group_size == 8
    assert found.document["reward"]["components"] == [{"kind": "custom", "path": "score_grade_adapter.py:score"}]


def test_two_other_programs_of_verls_are_still_one_too_many() -> None:
    twice = "python3 -m verl.trainer.main_generation data.path=a.parquet model.path=m\n" * 2
    with pytest.raises(InvalidSpec, match="more than once"):
        read("verl", twice, (), {}, source="run.sh")
