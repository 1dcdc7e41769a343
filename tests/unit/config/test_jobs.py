"""Jobs on finished answers need no graders, and refuse what they do not use."""

from typing import Any

import pytest

from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.config.spec import other_models
from flotilla.shared.errors import InvalidSpec

MINIMAL: dict[str, Any] = {
    "name": "job",
    "model": {"path": "/nowhere"},
    "data": {"path": "rows.jsonl"},
    "optimisation": {"steps": 30},
}
SFT: dict[str, Any] = MINIMAL | {"job": {"kind": "sft"}}


def test_a_job_without_sampled_answers_names_no_graders_and_can_be_sent_on() -> None:
    spec = validate_spec(SFT)

    assert validate_spec(spec.model_dump(mode="json")) == spec
    assert (spec.samples_answers, spec.steps_per_version, spec.runs_code) == (False, 20, False)
    assert not spec.needs_reference


def test_reinforcement_learning_still_needs_its_graders() -> None:
    with pytest.raises(InvalidSpec, match="reward"):
        validate_spec(MINIMAL)
    with pytest.raises(InvalidSpec, match="reward"):
        validate_spec(SFT | {"evaluation": {"path": "held_out.jsonl"}})


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"reward": {"components": [{"kind": "exact"}]}}, "reward.components"),
        ({"rollout": {"group_size": 4}}, "rollout.group_size"),
        ({"algorithm": {"entropy_coefficient": 0.1}}, "algorithm.entropy_coefficient"),
        ({"asynchrony": {"staleness_threshold": 0.5}}, "asynchrony.staleness_threshold"),
        ({"asynchrony": {"publication": {"transport": "pull"}}}, "asynchrony.publication"),
        ({"resources": {"rollouts": {"min": 2}}}, "resources.rollouts"),
        ({"data": {"path": "rows.jsonl", "max_prompt_tokens": 9}}, "data.max_prompt_tokens"),
        ({"optimisation": {"steps": 3, "shuffle": True}}, "optimisation.shuffle"),
        ({"job": {"kind": "sft", "response_column": "prompt"}}, "job.response_column"),
        ({"job": {"kind": "preference", "rejected_column": "chosen"}}, "job.chosen_column"),
        ({"job": {"kind": "sft"}, "data": {"path": "a.jsonl", "input_template": "{}"}}, "data.input_template"),
        ({"job": {"kind": "kto"}, "data": {"path": "a.jsonl", "input_template": "{}"}}, "data.input_template"),
        ({"job": {"kind": "kto", "response_column": "prompt"}}, "job.response_column"),
        ({"job": {"kind": "kto", "response_column": "answer", "label_column": "answer"}}, "job.label_column"),
        ({"job": {"kind": "kto"}, "optimisation": {"steps": 3, "groups_per_mini_batch": 1}}, "job.reference_point"),
        ({"job": {"kind": "sft", "distillation": {"path": "/t", "revision": "main"}}}, "revision"),
    ],
)
def test_what_has_no_effect_is_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        validate_spec(SFT | sections)


def test_a_reward_model_answers_nothing() -> None:
    graded = {"evaluation": {"path": "held_out.jsonl"}, "reward": {"components": [{"kind": "exact"}]}}
    with pytest.raises(InvalidSpec, match="a reward model does not give"):
        validate_spec(MINIMAL | graded | {"job": {"kind": "reward_model"}})
    assert validate_spec(SFT | graded).samples_answers


def test_answers_with_a_label_are_held_to_the_policy_as_it_began() -> None:
    spec = validate_spec(MINIMAL | {"job": {"kind": "kto", "response_column": "completion"}})
    alone = {
        "job": {"kind": "kto", "reference_point": "zero"},
        "optimisation": {"steps": 3, "groups_per_mini_batch": 1},
    }

    assert spec.needs_reference and not spec.samples_answers
    assert validate_spec(MINIMAL | alone).needs_reference


def test_a_teacher_of_written_answers_is_a_model_of_the_spec() -> None:
    spec = validate_spec(
        MINIMAL | {"job": {"kind": "sft", "distillation": {"path": "owner/teacher", "revision": "v1"}}}
    )

    assert {name: (model.path, model.revision) for name, model in other_models(spec).items()} == {
        "job.distillation.path": ("owner/teacher", "v1")
    }
    assert not spec.needs_reference
