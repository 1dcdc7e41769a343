"""What an experiment may ask of the fleet; what the fields do is tested with the scheduler."""

from typing import Any

import pytest

from flotilla.shared.config.load.live import changed_live
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec
from tests.unit.config.test_spec_text import a_document


def test_an_experiment_asks_for_one_of_each_unless_told_otherwise() -> None:
    resources = validate_spec(a_document()).resources

    assert (resources.rollouts.min, resources.rollouts.max) == (1, None)
    assert (resources.rewards.min, resources.rewards.max) == (1, None)
    assert (resources.sandboxes, resources.weight, resources.priority) == (None, 1.0, 0)


@pytest.mark.parametrize(
    ("section", "path", "words"),
    [
        ({"rollouts": {"min": 0}}, "resources.rollouts.min", "greater than or equal to 1"),
        ({"rollouts": {"min": 3, "max": 2}}, "resources.rollouts", "max 2 is below min 3"),
        ({"sandboxes": {"min": 1}}, "resources.sandboxes", "no reward component and no tool runs code"),
        ({"weight": 0}, "resources.weight", "greater than 0"),
        (
            {"weight": 2, "rollouts": {"max": 1}, "rewards": {"max": 1}},
            "resources",
            "weight 2 has no effect while every max equals its min",
        ),
        ({"priority": 101}, "resources.priority", "less than or equal to 100"),
        ({"stream_bytes": 5}, "resources.stream_bytes", "greater than or equal to 1048576"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(section: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as error:
        validate_spec(a_document(resources=section))

    assert [entry["path"] for entry in error.value.errors] == [path]
    assert words in error.value.detail


def test_sandboxes_are_for_those_that_run_code() -> None:
    spec = validate_spec(a_document(reward={"components": [{"kind": "code"}]}, resources={"sandboxes": {"min": 2}}))

    assert spec.runs_code and spec.resources.sandboxes is not None


def test_the_key_that_moved_is_answered_with_its_new_place() -> None:
    with pytest.raises(InvalidSpec, match=r"rollout\.num_rollouts.*it is resources\.rollouts\.min now"):
        validate_spec(a_document(rollout={"num_rollouts": 2}))


def test_a_live_change_keeps_what_it_does_not_name() -> None:
    spec = validate_spec(a_document(resources={"rollouts": {"min": 2, "max": 6}, "weight": 2.0}))

    changed = changed_live(spec, {"resources": {"rollouts": {"max": None}}})

    assert (changed.resources.rollouts.min, changed.resources.rollouts.max, changed.resources.weight) == (2, None, 2.0)
    assert changed.model_copy(update={"resources": spec.resources}) == spec


@pytest.mark.parametrize(
    ("before", "section"),
    [
        ({}, {"sharing": "time"}),
        ({}, {"lending": {"over_steps": 8}}),
        ({"lending": {}}, {"lending": None}),
        ({"lending": {}}, {"lending": {"when_waiting": 0.9}}),
    ],
)
def test_whose_the_devices_are_cannot_change_while_services_are_at_work(
    before: dict[str, Any], section: dict[str, Any]
) -> None:
    spec = validate_spec(a_document(resources=before, rollout={"engine": {"threads": 1}}))

    with pytest.raises(InvalidSpec, match="which were assigned these devices at their start"):
        changed_live(spec, {"resources": section})
