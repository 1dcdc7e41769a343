"""A grader that looks answers up in a dump."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.locations.allowed import Places
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.sample_kinds import SampleFile
from flotilla.shared.schemas.trajectory import GradeStatus
from tests.unit.samples.builders import a_step
from tests.unit.samples.test_dump import a_run


async def grades(run: Path, samples: list[GradingSample], **component: Any) -> list[Grade]:
    section = {"components": [{"kind": "recorded", "dump": str(run), "weight": 2.0, **component}]}
    verifier = build_verifier(RewardConfig.model_validate(section), Surroundings("e"))
    await verifier.start()
    try:
        return await verifier.score(samples)
    finally:
        await verifier.aclose()


def with_texts(step: SampleFile) -> SampleFile:
    """Let the members of a group write different texts."""
    groups = [
        replace(kept.group, trajectories=tuple(replace(t, text=str(n)) for n, t in enumerate(kept.group.trajectories)))
        for kept in step.groups
    ]
    return replace(step, groups=[replace(kept, group=group) for kept, group in zip(step.groups, groups, strict=True)])


def samples_of(step: SampleFile) -> list[GradingSample]:
    return [
        GradingSample(id=f"{number}/{member}", prompt=kept.group.prompt, response=trajectory.text)
        for number, kept in enumerate(step.groups)
        for member, trajectory in enumerate(kept.group.trajectories)
    ]


async def test_an_answer_has_the_reward_that_was_recorded(tmp_path: Path) -> None:
    step = with_texts(a_step(rewards=(0.25, 1.0)))
    asked = samples_of(step)
    assert len({(each.prompt, each.response) for each in asked}) == 4

    found = await grades(a_run(tmp_path / "run", step), asked)

    assert [each.reward for each in found] == [0.5, 2.0, 0.5, 2.0], "times the component's weight"


async def test_an_answer_that_was_never_graded_is_an_error_and_no_reward(tmp_path: Path) -> None:
    asked = [GradingSample(id="1/0", prompt="?", response="!")]
    run = a_run(tmp_path / "run", a_step(rewards=(0.25, 1.0)))

    [refused], [drawn], [again] = [await grades(run, asked, **each) for each in ({}, *2 * [{"others": "drawn"}])]

    assert (refused.status, refused.reward) == (GradeStatus.ERROR, None)
    assert "has no such answer to this prompt" in str(refused.reason)
    assert drawn.reward in {0.5, 2.0}
    assert drawn == again, "the same one each time"


async def test_what_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="has no groups that were trained or evaluated"):
        await grades(tmp_path, [])


async def test_a_dump_that_is_where_no_data_may_be_is_not_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", a_step(rewards=(0.25, 1.0)))
    section = {"components": [{"kind": "recorded", "dump": str(run)}]}
    around = Surroundings("e", places=Places(data=(tmp_path / "ok",)))

    with pytest.raises(InvalidSpec, match="is in no folder that this fleet reads data from"):
        await build_verifier(RewardConfig.model_validate(section), around).start()
