"""The hidden second grade is never part of the reward, is counted once, and holds up nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flotilla.services.reward.audit import Auditor, compare, is_audited
from flotilla.services.reward.verifiers.registry import CombinedVerifier
from flotilla.shared.config.sections.reward import AuditConfig, ConstantConfig, RewardConfig
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.testing.builders import a_group
from tests.unit.reward.test_consumer import Grader, ScriptedVerifier, World, by_index, grading


class AuditedWorld(World):
    def __init__(self, grade: Grader, second: Grader, **audit: object) -> None:
        section = {"components": [{"kind": "constant"}], "share": 1.0} | audit
        config = RewardConfig.model_validate({"audit": section})
        super().__init__(grade, config)
        assert config.audit is not None
        self.second = ScriptedVerifier(second)
        auditor = Auditor(config.audit, CombinedVerifier([(ConstantConfig(), self.second)]))
        self.worker._auditor = auditor

    async def until_audited(self, count: int) -> None:
        async with asyncio.timeout(3):
            while self.worker.tally.audited_groups + self.worker.tally.failed_audits < count:
                await asyncio.sleep(0.001)


@asynccontextmanager
async def audited(grade: Grader, second: Grader, **audit: object) -> AsyncIterator[AuditedWorld]:
    world = AuditedWorld(grade, second, **audit)
    async with grading(world):
        yield world


def zero(_: GradingSample) -> Grade:
    return Grade.scored(0.0)


async def test_the_second_grade_is_compared_and_is_no_part_of_what_is_trained() -> None:
    async with audited(by_index, zero) as world:
        await world.generate(a_group(0), a_group(1))
        await world.until_audited(2)
        groups = await world.scored()

    assert len(groups) == 2
    for trajectories in (group.trajectories for group in groups):
        assert [each.reward for each in trajectories] == [0.0, 1.0]
        assert all(set(each.components) <= {"numeric"} and not each.metrics for each in trajectories)
    report = world.worker.tally.report()
    assert (report.audited_groups, report.audit_disagreement, report.audit_higher) == (2, 1.0, 1.0)
    assert [(each.reward, each.audit_reward) for each in report.audited_samples] == [(1.0, 0.0)] * 2


async def test_a_group_that_is_lost_between_the_grades_is_counted_by_whoever_sends_it_on() -> None:
    held = asyncio.Event()

    class Waiting(ScriptedVerifier):
        async def score(self, samples: list[GradingSample]) -> list[Grade]:  # type: ignore[override]
            held.set()
            await asyncio.Event().wait()
            raise AssertionError

    world = AuditedWorld(by_index, zero)
    killed = AuditedWorld(by_index, zero)
    killed.plane, killed.hop = world.plane, world.hop
    killed.worker._lanes = world.worker._lanes
    assert killed.worker._auditor is not None
    killed.worker._auditor._verifier = CombinedVerifier([(ConstantConfig(), Waiting(zero))])
    async with grading(killed):
        await world.generate(a_group(0))
        async with asyncio.timeout(3):
            await held.wait()
    async with grading(world):
        await world.until_audited(1)
        ledger = await world.until(lambda each: each.waiting.scored == 1)

    assert ledger.issued == 1
    assert (killed.worker.tally.audited_groups, world.worker.tally.audited_groups) == (0, 1)
    assert len(world.second.seen) == 2


async def test_a_claim_that_was_lost_is_counted_by_nobody_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> bool:
        return False

    world = AuditedWorld(by_index, zero)
    monkeypatch.setattr(world.hop, "forward", lost)
    async with grading(world):
        await world.generate(a_group(0))
        async with asyncio.timeout(3):
            while not world.worker.tally.num_groups or world.worker.in_work:
                await asyncio.sleep(0.001)

    assert len(world.second.seen) == 2
    assert world.worker.tally.audited_groups == 0


async def test_a_second_grader_that_hangs_or_raises_costs_its_deadline_and_no_group() -> None:
    class Hanging(ScriptedVerifier):
        async def score(self, samples: list[GradingSample]) -> list[Grade]:  # type: ignore[override]
            if samples[0].id.startswith("0/"):
                raise RuntimeError("boom")
            await asyncio.Event().wait()
            raise AssertionError

    world = AuditedWorld(by_index, zero, deadline_seconds=0.01)
    assert world.worker._auditor is not None
    world.worker._auditor._verifier = CombinedVerifier([(ConstantConfig(), Hanging(zero))])
    async with grading(world):
        await world.generate(a_group(0), a_group(1))
        ledger = await world.until(lambda each: each.waiting.scored == 2)
        await world.until_audited(2)

    assert ledger.issued == 2
    tally = world.worker.tally
    assert (tally.failed_audits, tally.audited_groups, tally.audit_missing) == (2, 0, 2.0)
    assert tally.last_audit_error is not None and tally.last_audit_error.startswith("audit: ")


def test_samples_that_either_grader_left_without_a_reward_are_not_compared() -> None:
    group = a_group(1, rewards=[1.0, None, 0.5, 0.0])
    seconds = [Grade.scored(0.0), Grade.scored(0.0), Grade.error("no"), None]

    audit = compare(group, seconds, 1e-6)

    assert (audit.num_compared, audit.differing, audit.num_higher, audit.has_failed) == (1, ((0, 0.0),), 1, False)
    assert compare(group, [Grade.error("no")] * 4, 1e-6).has_failed
    assert compare(group, [Grade.scored(0.9)] * 4, 0.2).disagreement == 2 / 3


def test_the_same_groups_are_chosen_everywhere_and_as_many_as_the_share_says() -> None:
    groups = [a_group(number) for number in range(2000)]
    chosen = [is_audited(group, 0.1) for group in groups]

    assert chosen == [is_audited(group, 0.1) for group in groups]
    assert 150 < sum(chosen) < 250
    assert all(is_audited(group, 1.0) for group in groups)


def test_an_audit_that_could_never_conclude_or_ask_again_is_refused() -> None:
    with pytest.raises(ValueError, match=r"audit\.window 4 is less"):
        AuditConfig.model_validate({"components": [{"kind": "exact"}], "window": 4})
    with pytest.raises(ValueError, match="given once"):
        AuditConfig.model_validate({"components": [{"kind": "agent"}]})
