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
        ({"distillation.distillation_loss.loss_max_clamp": 5.0}, "distillation.distillation_loss.loss_max_clamp"),
    ],
)
def test_another_distance_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    assert name in refused(import_flat("verl", {**BASES["verl"], **ON, **changes}))


def test_a_file_that_switches_it_off_asks_for_nothing() -> None:
    off = {"distillation.enabled": False, "distillation.distillation_loss.loss_mode": "k3"}
    found = import_flat("verl", {**BASES["verl"], **off})

    assert not refused(found)
    assert found.spec is not None and found.spec.algorithm.distillation is None
