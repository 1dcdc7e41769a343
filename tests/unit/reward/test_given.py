"""Rewards that agents give: at once, later, never."""

import asyncio

import pytest

from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.shared.config.load.spec_text import validate_spec
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.streams.memory.plane import MemoryMailbox
from tests.unit.gateway.builders import spec_document
from tests.unit.reward.builders import a_sample


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_branches_have_the_reward_of_their_episode_and_late_ones_are_waited_for() -> None:
    mailbox = MemoryMailbox(Clock())
    for name in ("a", "b"):
        await mailbox.expect(name, seconds=60)
    await mailbox.deliver("a", b'{"reward": 0.5, "metrics": {"steps": 3}}')
    samples = [a_sample("x", episode="a"), a_sample("y", episode="a"), a_sample("z", episode="b")]
    scoring = asyncio.create_task(AgentVerifier(mailbox).score(samples))
    await asyncio.sleep(0)
    assert not scoring.done()

    await mailbox.deliver("b", b'{"reward": 1}')

    grades = await scoring
    assert [grade.reward for grade in grades] == [0.5, 0.5, 1.0]
    assert grades[0].metrics == {"steps": 3.0}


async def test_an_episode_without_a_reward_is_no_zero() -> None:
    clock = Clock()
    mailbox = MemoryMailbox(clock)
    await mailbox.expect("late", seconds=10)
    await mailbox.expect("odd", seconds=10)
    await mailbox.deliver("odd", b'{"reward": "much"}')
    clock.seconds = 11

    samples = [a_sample("x", episode=name) for name in ("late", "odd", "unknown", None)]
    grades = await AgentVerifier(mailbox).score(samples)

    assert [grade.status for grade in grades] == [
        GradeStatus.ABSTAINED,
        GradeStatus.ERROR,
        GradeStatus.ABSTAINED,
        GradeStatus.ABSTAINED,
    ]
    assert {grade.reward for grade in grades} == {None}


def test_rewards_of_agents_are_refused_where_there_are_none() -> None:
    with pytest.raises(InvalidSpec, match=r"rollout\.agents"):
        validate_spec(spec_document(reward={"components": [{"kind": "agent"}]}))
