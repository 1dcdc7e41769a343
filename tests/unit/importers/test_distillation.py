"""verl's on-policy distillation, where the teacher is a reward of each token."""

from typing import Any

import pytest

from tests.unit.importers.sources import BASES, import_flat
from tests.unit.importers.verl.test_launch import field, refused

ON = {
    "distillation.enabled": True,
    "distillation.distillation_loss.loss_mode": "k1",
    "distillation.distillation_loss.use_policy_gradient": True,
    "distillation.teacher_model.model_path": "/teacher",
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"path": "/teacher", "coefficient": 1.0, "pure": False}),
        (
            {"distillation.distillation_loss.distillation_loss_coef": 0.3},
            {"path": "/teacher", "coefficient": 0.3, "pure": False},
        ),
        (
            {
                "distillation.distillation_loss.distillation_loss_coef": 0.3,
                "distillation.distillation_loss.use_task_rewards": False,
            },
            {"path": "/teacher", "coefficient": 1.0, "pure": True},
        ),
        ({"distillation.distillation_loss.loss_max_clamp": 5.0}, {"value_clamp": 5.0}),
        ({}, {"value_clamp": None}),
    ],
)
def test_a_teacher_that_is_a_reward_becomes_one(given: dict[str, Any], expected: dict[str, Any]) -> None:
    found = import_flat("verl", {**BASES["verl"], **ON, **given})

    section = field(found, "algorithm.distillation")
    assert {name: section[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"distillation.distillation_loss.loss_mode": "k3"}, "distillation.distillation_loss.loss_mode"),
        (
            {"distillation.distillation_loss.use_policy_gradient": False},
            "distillation.distillation_loss.use_policy_gradient",
        ),
        ({"distillation.teacher_model.model_path": None}, "distillation.teacher_model.model_path"),
    ],
)
def test_another_distance_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    assert name in refused(import_flat("verl", {**BASES["verl"], **ON, **changes}))


def test_a_file_that_switches_it_off_asks_for_nothing() -> None:
    off = {"distillation.enabled": False, "distillation.distillation_loss.loss_mode": "k3"}
    found = import_flat("verl", {**BASES["verl"], **off})

    assert not refused(found)
    assert found.spec is not None and found.spec.algorithm.distillation is None


SEVERAL: dict[str, Any] = {
    **{name: value for name, value in ON.items() if not name.endswith("teacher_model.model_path")},
    "distillation.teacher_key": "data_source",
    "distillation.teacher_models.gsm8k.key": "openai/gsm8k",
    "distillation.teacher_models.gsm8k.model_path": "owner/maths",
    "distillation.teacher_models.gsm8k.num_replicas": 1,
    "distillation.teacher_models.gsm8k.inference.name": "vllm",
    "distillation.teacher_models.law.key": "law",
    "distillation.teacher_models.law.model_path": "owner/law",
}


def test_several_teachers_have_a_data_source_each() -> None:
    found = import_flat("verl", {**BASES["verl"], **SEVERAL})

    assert found.may_run(), found.report.render()
    teachers = field(found, "algorithm.distillation.teachers")
    assert [(each["path"], each["data_sources"]) for each in teachers] == [
        ("owner/maths", ["openai/gsm8k"]),
        ("owner/law", ["law"]),
    ]
    assert field(found, "data.data_source_column") == "data_source"
    aside = {entry.name for entry in found.report.unsupported}
    assert {each for each in aside if "gsm8k" in each} == {
        f"distillation.teacher_models.gsm8k.{each}" for each in ("num_replicas", "inference.name")
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"distillation.teacher_models.law.key": None},
        {"distillation.teacher_models.law.temperature": 0.5},
        {"distillation.teacher_model.model_path": "owner/third"},
    ],
)
def test_what_several_teachers_lack_or_have_besides_is_refused(changes: dict[str, Any]) -> None:
    assert not import_flat("verl", {**BASES["verl"], **SEVERAL, **changes}).may_run()
