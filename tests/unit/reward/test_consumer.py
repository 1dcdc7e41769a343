"""Groups are graded and forwarded; a failed grade is never a reward."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from flotilla.services.reward.consumer import RewardConsumer, RewardLane
from flotilla.services.reward.grading import MOST_NAMES
from flotilla.services.reward.verifiers.base import LONGEST_ANSWER
from flotilla.services.reward.verifiers.registry import Surroundings, build_verifier
from flotilla.shared.config.sections.reward import RewardConfig
from flotilla.shared.schemas.grading import Grade, GradingSample
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.streams.hop import Claim, HopName, StreamsConfig
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.testing.absence import cancel_on_claim, make_absent
from flotilla.shared.testing.builders import a_group, a_task, a_trajectory
from flotilla.shared.testing.kept import KeptInMemory

Grader = Callable[[GradingSample], Grade]


class ScriptedVerifier:
    def __init__(self, grade: Grader) -> None:
        self.grade = grade
        self.seen: list[GradingSample] = []

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        self.seen += samples
        return [self.grade(sample) for sample in samples]

    async def aclose(self) -> None:
        return None


class World:
    def __init__(self, grade: Grader, config: RewardConfig, *, is_filtered: bool = True) -> None:
        self.plane = MemoryDataPlane()
        self.tasks = self.plane.hop(HopName.TASKS, "rollout")
        self.verifier = ScriptedVerifier(grade)
        self.hop = self.plane.hop(HopName.GENERATED, "reward")
        self.kept = KeptInMemory()
        lanes = [RewardLane("train", self.hop, is_filtered)]
        self.worker = RewardConsumer(lanes, self.verifier, config, concurrency=4, kept=self.kept)

    async def generate(self, *groups: Group) -> None:
        await self.plane.admission.issue_many([group.task for group in groups], limit=1000)
        claims = await self.tasks.claim(len(groups), wait_seconds=1)
        assert all(await self.tasks.forward_many(list(zip(claims, groups, strict=True))))

    async def until(self, condition: Callable[[Ledger], bool]) -> Ledger:
        async with asyncio.timeout(3):
            while True:
                ledger = await self.plane.ledger()
                assert ledger.balanced
                if condition(ledger):
                    return ledger
                await asyncio.sleep(0.001)

    async def scored(self) -> list[Group]:
        queue = self.plane.trainer("trainer")
        await queue.take_over()
        return [claim.group() for claim in await queue.hop.claim(100, wait_seconds=0)]


@asynccontextmanager
async def a_world(grade: Grader, *, is_filtered: bool = True, **config: object) -> AsyncIterator[World]:
    world = World(grade, RewardConfig.model_validate(config), is_filtered=is_filtered)
    async with grading(world):
        yield world


@asynccontextmanager
async def grading(world: World) -> AsyncIterator[None]:
    world.worker.resume()
    task = asyncio.create_task(world.worker.run())
    try:
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def by_index(sample: GradingSample) -> Grade:
    return Grade.scored(float(sample.id.endswith("/1")))


async def test_a_group_of_another_schema_fails_and_the_next_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(by_index, RewardConfig())
    with monkeypatch.context() as earlier:
        earlier.setattr("flotilla.shared.schemas.trajectory.GROUP_SCHEMA", 1)
        await world.generate(a_group(0))
    await world.generate(a_group(1))

    async with grading(world):
        ledger = await world.until(lambda ledger: ledger.waiting.scored == 1)

    assert ledger.failed == {"unreadable": 1}


async def test_a_group_whose_episodes_all_failed_is_no_failure_of_a_grader() -> None:
    failed = [a_trajectory().graded(GradeStatus.ERROR, None, reason="the environment was killed")] * 2
    async with a_world(by_index) as world:
        await world.generate(replace(a_group(0), trajectories=tuple(failed)))
        await world.generate(replace(a_group(1), trajectories=(failed[0], a_trajectory())))
        ledger = await world.until(lambda ledger: sum(ledger.failed.values()) + ledger.waiting.scored == 2)

    assert ledger.failed == {"episode_failed": 1}
    assert [sample.id for sample in world.verifier.seen] == ["1/1"]


async def test_rewards_are_written_onto_their_trajectories() -> None:
    async with a_world(by_index) as world:
        await world.generate(a_group(0), a_group(1))
        await world.until(lambda ledger: ledger.waiting.scored == 2)

        groups = await world.scored()

    assert [group.rewards() for group in groups] == [[0.0, 1.0], [0.0, 1.0]]
    assert [sample.label for sample in world.verifier.seen[:2]] == ["1", "1"]


async def test_a_sample_whose_grade_failed_has_no_reward() -> None:
    def grade(sample: GradingSample) -> Grade:
        return Grade.error("grader is unavailable") if sample.id.endswith("/0") else Grade.scored(1.0)

    async with a_world(grade) as world:
        await world.generate(a_group(0))
        await world.until(lambda ledger: ledger.waiting.scored == 1)
        (group,) = await world.scored()

    assert [t.status for t in group.trajectories] == [GradeStatus.ERROR, GradeStatus.SCORED]
    assert [t.reward for t in group.trajectories] == [None, 1.0]
    assert group.trajectories[0].reason == "grader is unavailable"


async def test_a_group_that_nobody_could_grade_fails() -> None:
    async with a_world(lambda sample: Grade.error("away"), max_consecutive_failures=2) as world:
        await world.generate(a_group(0), a_group(1))

        ledger = await world.until(lambda ledger: sum(ledger.failed.values()) == 2)

    assert ledger.failed == {"grading_error": 2}
    assert sorted(world.kept.groups) == [(number, SampleKind.FAILED, "grading_error") for number in (0, 1)]
    assert world.worker.why_hopeless is not None
    assert "away" in world.worker.why_hopeless


async def test_one_graded_group_ends_a_row_of_failures() -> None:
    def grade(sample: GradingSample) -> Grade:
        return Grade.scored(1.0) if sample.id.startswith("1/") else Grade.error("away")

    async with a_world(grade, max_consecutive_failures=2) as world:
        for number in range(3):
            await world.generate(a_group(number))
            await world.until(lambda ledger, n=number: ledger.waiting.generated + ledger.claimed.generated == 0)

    assert world.worker.why_hopeless is None


async def test_a_group_that_teaches_nothing_is_filtered_on_request() -> None:
    async with a_world(lambda sample: Grade.scored(1.0), filter_zero_spread=True) as world:
        await world.generate(a_group(0))

        ledger = await world.until(lambda ledger: bool(ledger.filtered))

    assert ledger.filtered == {"zero_spread": 1}
    assert world.kept.groups == [(0, SampleKind.FILTERED, "zero_spread")]


async def test_evaluation_is_never_filtered() -> None:
    async with a_world(lambda sample: Grade.scored(1.0), is_filtered=False, filter_zero_spread=True) as world:
        await world.generate(a_group(0))

        await world.until(lambda ledger: ledger.waiting.scored == 1)

    assert world.kept.groups == []


async def test_an_aborted_completion_is_not_graded() -> None:
    group = Group(
        a_task(0), (a_trajectory(finish_reason=FinishReason.ABORTED), a_trajectory()), prompt="What is 0 plus 1?"
    )
    async with a_world(lambda sample: Grade.scored(1.0)) as world:
        await world.generate(group)
        await world.until(lambda ledger: ledger.waiting.scored == 1)
        (read,) = await world.scored()

    assert [t.status for t in read.trajectories] == [GradeStatus.ABSTAINED, GradeStatus.SCORED]
    assert [sample.id for sample in world.verifier.seen] == ["0/1"]


async def test_a_group_whose_claim_is_lost_is_graded_no_longer() -> None:
    class Endless(ScriptedVerifier):
        ended = 0

        async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
            try:
                self.seen += samples
                if len(self.seen) == len(samples):
                    await asyncio.Event().wait()
                return [self.grade(sample) for sample in samples]
            except asyncio.CancelledError:
                self.ended += 1
                raise

    world = World(by_index, RewardConfig())
    plane = world.plane = MemoryDataPlane(config=StreamsConfig(lease_seconds=0.2))
    world.tasks = plane.hop(HopName.TASKS, "rollout")
    hop, verifier = plane.hop(HopName.GENERATED, "reward"), Endless(by_index)
    world.worker = RewardConsumer([RewardLane("train", hop, True)], verifier, RewardConfig(), concurrency=4)
    async with grading(world):
        await world.generate(a_group(0))
        await world.until(lambda ledger: ledger.claimed.generated == 1 and bool(verifier.seen))

        await plane.release([hop.consumer])

        await world.until(lambda ledger: ledger.waiting.scored == 1 and verifier.ended == 1)
        assert world.worker.in_work == 0


@pytest.mark.parametrize("method", ["forward", "resolve"])
async def test_what_is_graded_waits_for_the_data_plane_and_is_not_graded_again(method: str) -> None:
    world = World(by_index if method == "forward" else lambda _: Grade.abstained(), RewardConfig())
    hop = world.worker._lanes[0].hop
    refused = make_absent(hop, method, 3)
    await world.generate(a_group(0))

    async with grading(world):
        ledger = await world.until(lambda ledger: ledger.claimed.generated + ledger.waiting.generated == 0)

    assert (len(refused), len(world.verifier.seen)) == (3, 2)
    assert (ledger.waiting.scored, ledger.filtered) == ((1, {}) if method == "forward" else (0, {"all_abstained": 1}))


@pytest.mark.parametrize(("scores", "is_kept"), [((0.0, 1.0), True), ((1.0, 1.0), False)])
async def test_a_filter_that_names_a_metric_judges_it_of_what_the_grader_said(
    scores: tuple[float, float], is_kept: bool
) -> None:
    def grade(sample: GradingSample) -> Grade:
        score = scores[int(sample.id.rpartition("/")[2]) % 2]
        return Grade.scored(5.0, components={"remote": 5.0}, metrics={"remote/score": score})

    async with a_world(
        grade,
        components=[{"kind": "remote", "url": "http://grader:1"}],
        group_filter={"kind": "mean_in_range", "metric": "remote/score"},
    ) as world:
        await world.generate(a_group(0))
        ledger = await world.until(lambda ledger: bool(ledger.filtered) or ledger.waiting.scored == 1)

    assert (ledger.waiting.scored == 1) is is_kept


async def test_what_a_grader_said_reaches_the_trainer_and_is_bounded() -> None:
    many = {f"remote/{number}": float(number) for number in range(100)}
    by_name = [{"kind": "exact"}, {"kind": "remote", "url": "http://grader:1"}]

    def grade(sample: GradingSample) -> Grade:
        return Grade.scored(1.0, components=many | {"exact": 1.0}, metrics=many, answer="7" * 1000)

    async with a_world(
        grade, components=by_name, group_filter={"kind": "spread_above", "metric": "remote/99"}
    ) as world:
        await world.generate(a_group(a_task(0, group_size=1)))
        await world.until(lambda ledger: ledger.waiting.scored == 1)
        trajectory = (await world.scored())[0].trajectories[0]

    assert len(trajectory.components) == MOST_NAMES + 2
    assert trajectory.components["exact"] == 1.0
    assert len(trajectory.metrics) == MOST_NAMES + 1
    assert trajectory.metrics["remote/99"] == 99.0
    assert trajectory.answer == "7" * LONGEST_ANSWER


async def test_a_claim_whose_grading_is_cancelled_before_it_begins_is_handed_back() -> None:
    world = World(lambda _: Grade.scored(1.0), RewardConfig())
    await world.generate(a_group(a_task(0)))
    world.worker.resume()
    running = asyncio.create_task(world.worker.run())
    cancel_on_claim(world.hop, running)

    with pytest.raises(asyncio.CancelledError):
        await running

    ledger = await world.plane.ledger()
    assert (ledger.waiting.generated, ledger.claimed.generated) == (1, 0)
    assert world.verifier.seen == []


async def test_a_group_that_carries_other_weights_is_graded_by_them_alone() -> None:
    components = [
        {"kind": "constant", "value": 1.0},
        {"kind": "constant", "name": "other", "value": 1.0, "weight": 0.5},
    ]
    config = RewardConfig.model_validate({"components": components})
    world = World(lambda _: Grade.scored(0.0), config)
    combined = build_verifier(config, Surroundings("e"))
    world.worker = RewardConsumer([RewardLane("train", world.hop, True)], combined, config, concurrency=1)
    async with grading(world):
        carrying = a_task(1, settings={"reward.components.1.weight": 4.0, "rollout.sampling.temperature": 0.5})
        await world.generate(a_group(a_task(0)), a_group(carrying), a_group(a_task(2)))
        await world.until(lambda ledger: ledger.waiting.scored == 3)
        found = {group.task.group_id: group.trajectories[0].reward for group in await world.scored()}

    assert found == {0: 1.5, 1: 5.0, 2: 1.5}
    assert combined.graders["other"].samples == sum(3 * [len(a_group(carrying).trajectories)]), "counted together"


async def test_a_group_is_filtered_by_the_rules_that_it_carries() -> None:
    base = {"group_filter": {"kind": "mean_in_range", "low": 0.6}}
    carried = [
        {},
        {"reward.group_filter": None},
        {"reward.group_filter.low": 0.4, "rollout.sampling.temperature": 0.5},
        # As they come over the wire, in whatever order.
        {"reward.group_filter.threshold": 2.0, "reward.group_filter": {"kind": "spread_above"}},
        {"reward.group_filter": None, "reward.filter_zero_spread": True},
    ]
    async with a_world(by_index, **base) as world:
        await world.generate(*(a_group(a_task(number, settings=each)) for number, each in enumerate(carried)))
        ledger = await world.until(lambda ledger: sum(ledger.filtered.values()) + ledger.waiting.scored == len(carried))
        trained = {group.task.group_id for group in await world.scored()}

    assert trained == {1, 2, 4}
    assert ledger.filtered == {"mean_in_range": 1, "spread_above": 1}
    assert {group_id: reason for group_id, _, reason in world.kept.groups} == {0: "mean_in_range", 3: "spread_above"}


class HeldUp(World):
    """Eight groups wait to be graded, and each is held up until it may go on: while it is graded, or sent on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, in_grading: bool) -> None:
        super().__init__(by_index, RewardConfig())
        self.may_go = [asyncio.Event() for _ in range(8)]
        self.held: list[int] = []
        self.claimed: list[int] = []
        score, forward, claim = self.verifier.score, self.hop.forward, self.hop.claim

        async def scoring(samples: Sequence[GradingSample]) -> list[Grade]:
            if in_grading:
                await self._pass(int(samples[0].id.partition("/")[0]))
            return await score(samples)

        async def forwarding(claimed: Claim, group: Group) -> bool:
            if not in_grading:
                await self._pass(group.task.group_id)
            return await forward(claimed, group)

        async def claiming(count: int = 1, *, wait_seconds: float) -> list[Claim]:
            self.claimed.append(count)
            return await claim(count, wait_seconds=wait_seconds)

        monkeypatch.setattr(self.verifier, "score", scoring)
        monkeypatch.setattr(self.hop, "forward", forwarding)
        monkeypatch.setattr(self.hop, "claim", claiming)

    async def _pass(self, group_id: int) -> None:
        self.held.append(group_id)
        await self.may_go[group_id].wait()

    async def ends(self, number: int) -> None:
        """Let one go on, and wait until it is scored."""
        self.may_go[number].set()
        await self.until(lambda ledger: ledger.waiting.scored == number + 1)
        for _ in range(20):
            await asyncio.sleep(0)


async def test_groups_that_are_on_their_way_make_room_for_one_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    world = HeldUp(monkeypatch, in_grading=False)
    await world.generate(*map(a_group, range(8)))
    async with grading(world):
        await world.until(lambda _: len(world.held) == 4)
        await world.ends(0)
        assert world.claimed == [4], "three others make room in a moment"
        await world.ends(1)
        await world.until(lambda _: len(world.held) == 6)

        assert world.claimed == [4, 2], "half of the room is free, and the other half sends"


async def test_room_beside_groups_that_are_being_graded_is_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = HeldUp(monkeypatch, in_grading=True)
    await world.generate(*map(a_group, range(8)))
    async with grading(world):
        await world.until(lambda _: len(world.held) == 4)
        await world.ends(0)
        await world.until(lambda _: len(world.held) == 5)

        assert world.claimed == [4, 1], "nobody knows how long the others take"
