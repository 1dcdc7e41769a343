"""What graders see of a group, and what is written of their grades onto it."""

import pytest
from pydantic import ValidationError

from flotilla.services.reward.grading import grading_samples, with_grades
from flotilla.shared.schemas.grading import Grade, GradingMessage, GradingSample, GradingTurn
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.trajectory import FinishReason, Group
from flotilla.shared.schemas.turns import Turn
from flotilla.shared.testing.builders import a_task, a_trajectory


def a_varied_group() -> Group:
    turns = (Turn(0, 3, 8, FinishReason.STOP, "left \ud800", observation="a lake", reward=0.5),)
    members = (
        a_trajectory(text="an answer"),
        a_trajectory(text="ein Wörtchen \udfff", finish_reason=FinishReason.LENGTH),
        a_trajectory(text="left \ud800", turns=turns, metrics={"environment/success": 1}, episode="e-1"),
    )
    facts = {"metadata": {"chain": ["1+1", {"depth": 1}]}, "data_source": "sums", "label": "2 \ud800"}
    task = a_task(7, group_size=3, messages=(Message("system", "Be brief."), Message("user", "1+1? \ud800")), **facts)
    return Group(task, members, "1+1? \ud800")


def test_each_sample_is_what_the_schema_makes_of_its_trajectory() -> None:
    group = a_varied_group()
    task = group.task
    whole = [
        GradingSample(
            id=f"7/{index}",
            prompt=group.prompt,
            messages=tuple(GradingMessage(role=each.role, content=each.content) for each in task.messages),
            response=member.text,
            label=task.label,
            data_source=task.data_source,
            metadata=dict(task.metadata),
            turns=tuple(
                GradingTurn(observation=turn.observation, response=turn.text, reward=turn.reward)
                for turn in member.turns
            ),
            finish_reason=member.finish_reason.value,
            measured=dict(member.metrics),
            episode=member.episode,
        )
        for index, member in enumerate(group.trajectories)
    ]

    assert [each.model_dump_json() for each in grading_samples(group)] == [each.model_dump_json() for each in whole]


def test_what_was_measured_is_a_finite_number() -> None:
    member = a_trajectory(metrics={"environment/success": float("nan")})
    with pytest.raises(ValidationError):
        grading_samples(Group(a_task(0), (member, a_trajectory())))


def test_how_long_ago_a_task_was_issued_is_recorded_with_its_grades() -> None:
    members = (a_trajectory(timings={"generation_seconds": 1.0}), a_trajectory())
    grades = [Grade.scored(1.0), Grade.error("boom")]
    issued, unknown = (Group(a_task(0, issued_at=at), members) for at in (100.0, 0.0))

    graded = with_grades(issued, grades, 0.25, now=102.0)
    apart = with_grades(issued, grades, 0.25).timed("graded_after_seconds", 102.0)

    assert [dict(each.timings) for each in graded.trajectories] == [
        {"generation_seconds": 1.0, "grading_seconds": 0.25, "graded_after_seconds": 2.0},
        {"grading_seconds": 0.25, "graded_after_seconds": 2.0},
    ]
    assert graded.grades_to_wire() == apart.grades_to_wire()
    assert dict(with_grades(unknown, grades, 0.25, now=102.0).trajectories[1].timings) == {"grading_seconds": 0.25}
