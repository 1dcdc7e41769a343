"""Tasks become groups; versions are respected; what cannot be finished is handed back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from flotilla.services.rollout.consumer import LaneConfig, RolloutConsumer
from flotilla.services.rollout.failed_samples import FailedSamples
from flotilla.services.rollout.weights.version import VersionGate
from flotilla.shared.errors import DataError, InvalidRequest, PromptTooLong, Unavailable, WorkerDied
from flotilla.shared.schemas.sample_kinds import SampleKind
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import FinishReason, GradeStatus, Group
from flotilla.shared.streams.hop import HopName, StreamsConfig
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.memory.plane import MemoryDataPlane
from flotilla.shared.streams.partials import Partials
from flotilla.shared.testing.absence import cancel_on_claim, make_absent
from flotilla.shared.testing.builders import a_group, a_task


class ScriptedEpisodes:
    """Answers at once, or as ``answer`` says; remembers what it was asked and when."""

    def __init__(self, answer: Callable[[Task], Group] | None = None) -> None:
        self.answer = answer or a_group
        self.asked: list[Task] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def run(self, task: Task, partials: Partials, serving: int, *, delivery: str) -> Group:
        self.asked.append(task)
        await self.may_finish.wait()
        return self.answer(task)


class World:
    def __init__(
        self,
        episodes: ScriptedEpisodes,
        *,
        task_seconds: float = 5.0,
        failed: FailedSamples | None = None,
        max_lag: int | None = None,
    ) -> None:
        self.plane = MemoryDataPlane()
        self.gate = VersionGate()
        self.deaths: list[WorkerDied] = []
        self.hop = self.plane.hop(HopName.TASKS, "rollout")
        lanes = [(LaneConfig("train", 4, task_seconds, max_lag), self.hop)]
        self.worker = RolloutConsumer(
            lanes,
            episodes,  # type: ignore[arg-type]
            self.gate,
            self.deaths.append,
            failed=failed,
            max_failures=3,
        )

    async def issue(self, *tasks: Task) -> None:
        await self.plane.admission.issue_many(tasks, limit=1000)

    async def until(self, condition: Callable[[Ledger], bool]) -> Ledger:
        async with asyncio.timeout(15):
            while True:
                ledger = await self.plane.ledger()
                assert ledger.balanced
                if condition(ledger):
                    return ledger
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def running(self, version: int | None = 0) -> AsyncIterator["World"]:
        await self.gate.set(version)
        self.worker.resume()
        task = asyncio.create_task(self.worker.run())
        try:
            yield self
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_every_task_is_answered_and_forwarded() -> None:
    async with World(ScriptedEpisodes()).running() as world:
        await world.issue(*(a_task(n) for n in range(10)))

        ledger = await world.until(lambda ledger: ledger.waiting.generated == 10)

    assert ledger.outstanding == 10


async def test_no_more_than_the_lanes_groups_are_in_work() -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    async with World(episodes).running() as world:
        await world.issue(*(a_task(n) for n in range(10)))

        ledger = await world.until(lambda ledger: ledger.claimed.tasks == 4)
        await asyncio.sleep(0.02)

        assert len(episodes.asked) == 4
        assert ledger.waiting.tasks == 6


async def test_a_task_whose_engine_is_unavailable_is_held_for_a_moment_and_then_handed_back() -> None:
    def answer(task: Task) -> Group:
        raise Unavailable("the server answers with 503")

    episodes = ScriptedEpisodes(answer)
    world = World(episodes)
    async with world.running():
        await world.issue(a_task(0))
        await world.until(lambda ledger: ledger.claimed.tasks == 1 and bool(episodes.asked))
        await asyncio.sleep(0.05)

        assert len(episodes.asked) == 1, "it is not asked again in a loop"

    ledger = await world.plane.ledger()
    assert (ledger.waiting.tasks, ledger.failed) == (1, {})


async def test_a_paused_worker_claims_nothing_and_finishes_what_it_has() -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    async with World(episodes).running() as world:
        await world.issue(a_task(0))
        await world.until(lambda ledger: ledger.claimed.tasks == 1)

        world.worker.pause()
        episodes.may_finish.set()
        await world.until(lambda ledger: ledger.waiting.generated == 1)

    assert world.worker.answered == 1


async def test_a_task_waits_for_the_version_it_needs() -> None:
    episodes = ScriptedEpisodes()
    async with World(episodes).running(version=1) as world:
        await world.issue(a_task(0, min_version=2))
        await world.until(lambda ledger: ledger.claimed.tasks == 1)
        await asyncio.sleep(0.02)
        assert episodes.asked == []

        await world.gate.set(2)

        await world.until(lambda ledger: ledger.waiting.generated == 1)


async def test_a_task_pinned_to_an_older_version_is_handed_back() -> None:
    episodes = ScriptedEpisodes()
    async with World(episodes).running(version=3) as world:
        await world.issue(a_task(0, pinned_version=2))

        await world.until(lambda ledger: ledger.claimed.tasks == 1)
        await world.until(lambda ledger: ledger.waiting.tasks == 1)

    assert episodes.asked == []


async def test_what_another_version_than_the_pinned_one_has_sampled_is_no_answer() -> None:
    sampled_by = iter((3, 2))
    episodes = ScriptedEpisodes(lambda task: a_group(task, version=next(sampled_by)))
    async with World(episodes).running(version=2) as world:
        await world.issue(a_task(0, pinned_version=2))

        ledger = await world.until(lambda ledger: ledger.waiting.generated == 1)

    assert len(episodes.asked) == 2, "the engine was given other weights before it began the first time"
    assert ledger.issued == 1 and not ledger.failed


async def test_a_cancelled_worker_hands_its_claims_back() -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    async with World(episodes).running() as world:
        await world.issue(a_task(0), a_task(1))
        await world.until(lambda ledger: ledger.claimed.tasks == 2)

    ledger = await world.plane.ledger()
    assert (ledger.waiting.tasks, ledger.claimed.tasks) == (2, 0)


async def test_a_prompt_that_does_not_fit_fails_with_its_reason() -> None:
    def refuse(task: Task) -> Group:
        raise PromptTooLong("too long")

    async with World(ScriptedEpisodes(refuse)).running() as world:
        await world.issue(a_task(0))

        ledger = await world.until(lambda ledger: bool(ledger.failed))

    assert ledger.failed == {"prompt_too_long": 1}


async def test_a_row_whose_image_cannot_be_shown_fails_and_does_not_come_back() -> None:
    def refuse(task: Task) -> Group:
        raise DataError("an image of 9 bytes cannot be decoded")

    async with World(ScriptedEpisodes(refuse)).running() as world:
        await world.issue(a_task(0))

        ledger = await world.until(lambda ledger: bool(ledger.failed))

    assert ledger.failed == {"data_error": 1}


@pytest.mark.parametrize(("fits", "is_hopeless"), [((), True), ((1,), False)])
async def test_tasks_that_cannot_be_answered_one_after_the_other_are_hopeless(
    fits: tuple[int, ...], is_hopeless: bool
) -> None:
    def refuse(task: Task) -> Group:
        if task.group_id in fits:
            return a_group(task)
        raise PromptTooLong("a prompt of 1210 tokens")

    async with World(ScriptedEpisodes(refuse)).running() as world:
        for number in range(3):
            await world.issue(a_task(number))
            await world.until(lambda ledger: not ledger.waiting.tasks and not ledger.claimed.tasks)

    assert (world.worker.why_hopeless is not None) == is_hopeless
    if is_hopeless:
        assert world.worker.why_hopeless == (
            "3 tasks in a row could not be answered; the last error: a prompt of 1210 tokens"
        )


async def test_an_answer_that_takes_too_long_fails_with_its_reason() -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    async with World(episodes, task_seconds=0.01).running() as world:
        await world.issue(a_task(0))

        ledger = await world.until(lambda ledger: bool(ledger.failed))

    assert ledger.failed == {"rollout_timeout": 1}


async def test_an_engines_death_is_told_and_the_task_handed_back() -> None:
    def die(task: Task) -> Group:
        world.worker.pause()
        raise WorkerDied("killed by SIGKILL")

    world = World(ScriptedEpisodes(die))
    async with world.running():
        await world.issue(a_task(0))

        await world.until(lambda ledger: ledger.waiting.tasks == 1 and bool(world.deaths))

    assert world.deaths[0].detail == "killed by SIGKILL"


async def test_a_finished_group_waits_for_the_data_plane_and_is_not_sampled_again() -> None:
    episodes = ScriptedEpisodes()
    world = World(episodes)
    ((_, hop),) = world.worker._lanes
    refused = make_absent(hop, "forward", 3)
    async with world.running():
        await world.issue(a_task(0))

        await world.until(lambda ledger: ledger.waiting.generated == 1)

    assert (len(refused), len(episodes.asked)) == (3, 1)


async def test_a_finished_group_is_held_while_it_waits_for_the_data_plane() -> None:
    """What is not renewed is taken over by others, who sample it again."""
    episodes = ScriptedEpisodes()
    world = World(episodes)
    world.plane._config = StreamsConfig(lease_seconds=0.2)
    ((config, _),) = world.worker._lanes
    hop = world.plane.hop(HopName.TASKS, "rollout")
    world.worker._lanes = [(config, hop)]
    other = world.plane.hop(HopName.TASKS, "other")
    make_absent(hop, "forward", 5)  # for 0.4 to 0.75 s
    async with world.running():
        await world.issue(a_task(0))
        await world.until(lambda ledger: ledger.claimed.tasks == 1)

        taken = await other.claim(wait_seconds=0.35)

        await world.until(lambda ledger: ledger.waiting.generated == 1)
    assert (taken, len(episodes.asked)) == ([], 1)


@pytest.mark.parametrize("reason", ["rollout_timeout", "prompt_too_long"])
async def test_a_failure_waits_for_the_data_plane_and_ends_nothing_else(reason: str) -> None:
    def too_long(task: Task) -> Group:
        raise PromptTooLong("the prompt is too long")

    episodes = ScriptedEpisodes(too_long if reason == "prompt_too_long" else None)
    if reason == "rollout_timeout":
        episodes.may_finish.clear()
    world = World(episodes, task_seconds=0.05)
    ((_, hop),) = world.worker._lanes
    refused = make_absent(hop, "resolve", 3)
    async with world.running():
        await world.issue(a_task(0))

        ledger = await world.until(lambda ledger: sum(ledger.failed.values()) == 1)

    assert (ledger.failed, len(refused), len(episodes.asked)) == ({reason: 1}, 3, 1)


async def test_a_claim_whose_task_is_cancelled_before_it_begins_is_handed_back() -> None:
    world = World(ScriptedEpisodes())
    await world.gate.set(0)
    await world.issue(a_task(0))
    world.worker.resume()
    running = asyncio.create_task(world.worker.run())
    cancel_on_claim(world.hop, running)

    with pytest.raises(asyncio.CancelledError):
        await running

    ledger = await world.plane.ledger()
    assert (ledger.waiting.tasks, ledger.claimed.tasks) == (1, 0)


class Kept:
    def __init__(self) -> None:
        self.groups: list[tuple[Group, SampleKind, str]] = []

    def ended(self, group: Group, kind: SampleKind, reason: str) -> None:
        self.groups.append((group, kind, reason))


class Letters:
    """A renderer whose tokens are characters."""

    stop_token_ids = (0,)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(each) for message in messages for each in message.content)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


class Refusing(Letters):
    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        raise InvalidRequest("the template does not know the role 'critic'")


@pytest.mark.parametrize("renderer", [Letters(), Refusing()])
async def test_of_a_task_that_fails_the_prompt_is_kept_and_why(renderer: Letters) -> None:
    def refuse(task: Task) -> Group:
        raise PromptTooLong("the prompt has 9 tokens, 8 are allowed")

    kept = Kept()
    async with World(ScriptedEpisodes(refuse), failed=FailedSamples(kept, renderer)).running() as world:
        await world.issue(a_task(0))
        await world.until(lambda ledger: ledger.failed == {"prompt_too_long": 1})

    ((group, kind, reason),) = kept.groups
    (member,) = group.trajectories
    assert (kind, reason, group.task.group_id) == (SampleKind.FAILED, "prompt_too_long", 0)
    assert group.prompt == a_task(0).messages[0].content
    assert (member.status, member.reason) == (GradeStatus.ERROR, "the prompt has 9 tokens, 8 are allowed")
    assert member.num_sampled == 0


async def test_of_a_task_that_takes_too_long_is_kept_what_was_handed_over() -> None:
    kept = Kept()
    had = a_group(a_task(0)).trajectories[0]
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    world = World(episodes, task_seconds=0.01, failed=FailedSamples(kept, Letters()))
    await world.issue(a_task(0))
    earlier = world.plane.hop(HopName.TASKS, "earlier")
    (claim,) = await earlier.claim(count=1, wait_seconds=1)
    assert await earlier.hand_over(claim, (replace(had, finish_reason=FinishReason.ABORTED), None))

    async with world.running():
        await world.until(lambda ledger: ledger.failed == {"rollout_timeout": 1})

    ((group, _, reason),) = kept.groups
    (member,) = group.trajectories
    assert (reason, member.reason) == ("rollout_timeout", "not sampled within 0.01 s")
    assert member.token_ids.tolist() == had.token_ids.tolist()


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_redundant_group_is_ended_by_the_version_that_makes_it_too_old(max_lag: int) -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    async with World(episodes, max_lag=max_lag).running(version=1) as world:
        await world.issue(a_task(0), a_task(1))
        await world.until(lambda ledger: ledger.claimed.tasks == 2)
        for version in range(2, 2 + max_lag):
            await world.gate.set(version)
        await world.issue(a_task(2, min_version=1))
        await world.until(lambda ledger: ledger.claimed.tasks == 3)
        await asyncio.sleep(0.02)
        assert (await world.plane.ledger()).dropped == {}

        # It does not serve yet: the engine may be waiting for these very samples.
        await world.gate.announce(2 + max_lag)

        ledger = await world.until(lambda ledger: ledger.dropped != {})
        ledger = await world.until(lambda ledger: ledger.dropped == {"redundant": 2 if max_lag else 3})
        episodes.may_finish.set()
        ledger = await world.until(lambda ledger: ledger.waiting.generated == (1 if max_lag else 0))

    assert ledger.outstanding == (1 if max_lag else 0)
    assert world.worker.failures_in_a_row == 0


async def test_a_group_that_began_with_older_tokens_is_as_old_as_these() -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    world = World(episodes, max_lag=1)
    await world.issue(a_task(0, group_size=1))
    (claim,) = await world.hop.claim(1, wait_seconds=1.0)
    old = replace(a_group(claim.task(), version=1).trajectories[0], finish_reason=FinishReason.ABORTED)
    assert await world.hop.hand_over(claim, (old,))
    async with world.running(version=2):
        await world.until(lambda ledger: ledger.claimed.tasks == 1)

        await world.gate.announce(3)

        await world.until(lambda ledger: ledger.dropped == {"redundant": 1})


async def test_a_cancellation_from_outside_stays_one_where_groups_are_ended_for_their_age() -> None:
    episodes = ScriptedEpisodes()
    episodes.may_finish.clear()
    world = World(episodes, max_lag=0)
    async with world.running(version=1):
        await world.issue(a_task(0))
        await world.until(lambda ledger: ledger.claimed.tasks == 1)

    ledger = await world.plane.ledger()
    assert (ledger.waiting.tasks, ledger.dropped) == (1, {}), "it is handed back"
