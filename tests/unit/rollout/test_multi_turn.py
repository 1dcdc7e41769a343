"""Episodes of many turns: exact tokens, limits, interruption and replay, errors that are no rewards."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from flotilla.services.rollout.engines.base import (
    UNMIXED,
    Completion,
    Engine,
    GenerationRequest,
    PromptImage,
    ResumeRule,
)
from flotilla.services.rollout.engines.scripted import ScriptedEngine, rolling_token
from flotilla.services.rollout.environments.conversation import EnvironmentConversation
from flotilla.services.rollout.episodes import single_turn
from flotilla.services.rollout.episodes.conversation import Conversation
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.rendering import ANY_MESSAGE
from flotilla.services.rollout.episodes.single_turn import SingleTurnEpisodes
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import CannotBeShown, EnvironmentDiverged, PromptTooLong
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import GradeStatus, Group
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task

END = 1
SAMPLING = SamplingConfig(max_new_tokens=8)
MIXED = ResumeRule(mixes_versions=True, max_lag=3)


class Characters:
    """A token is a character; a message is framed by 200 and 1."""

    stop_token_ids: tuple[int, ...] = (END,)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (200, *(token for each in messages for token in (*each.content.encode(), END)), 201)

    def continuation_ids(self, messages: Sequence[Message], last: int) -> tuple[int, ...]:
        closing = () if last == END else (END,)
        return (*closing, *self.prompt_ids(messages))

    def check_continuation(self, message: Message = ANY_MESSAGE) -> None: ...

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


class Echo:
    """Shows how many actions it got, and the length of the last; ends after some."""

    def __init__(self, num_steps: int = 3) -> None:
        self.num_steps = num_steps
        self.actions: list[str] = []

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self.actions = []
        return f"seed {seed % 100}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.actions.append(text)
        count = len(self.actions)
        info = {"metrics": {"success": float(count == self.num_steps)}, "state": count}
        return f"{count}: {len(text)}", float(count), count == self.num_steps, False, info


def a_conversation(make: Callable[[], Any] = Echo) -> Callable[[Task, int], Conversation]:
    return lambda task, member: EnvironmentConversation(make, task, 5.0, is_quick=True)


def episodes(
    engine: Engine,
    make: Callable[[], Any] = Echo,
    *,
    max_turns: int = 10,
    max_tokens: int = 500,
    most: int | None = None,
    **options: Any,
) -> MultiTurnEpisodes:
    turns = options.pop("turns", Turns(SAMPLING, SAMPLING))
    resume = options.pop("resume", MIXED)
    return MultiTurnEpisodes(
        engine, Characters(), turns, Limits(max_turns, max_tokens, most), a_conversation(make), resume, **options
    )


async def played(engine: ScriptedEngine, task: Task, make: Callable[[], Any] = Echo, **options: Any) -> Group:
    await engine.start()
    try:
        return await episodes(engine, make, **options).run(task)
    finally:
        await engine.close()


async def test_one_turn_of_an_episode_is_a_single_turn_token_by_token() -> None:
    engine = ScriptedEngine(eos_token_id=END, version=3)
    await engine.start()
    task = a_task(4, group_size=3, messages=(Message("user", "seed 4"),), metadata={"seed": 4})
    asked = a_task(4, group_size=3, messages=(Message("user", ""),), metadata={"seed": 4})

    single = await SingleTurnEpisodes(engine, Characters(), Turns(SAMPLING, SAMPLING), UNMIXED).run(task)
    several = await episodes(engine, lambda: Echo(1)).run(asked)
    await engine.close()

    for one, other in zip(single.trajectories, several.trajectories, strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert other.loss_mask.tolist() == one.loss_mask.tolist()
        assert other.log_probs.tolist() == one.log_probs.tolist()
        assert (other.versions, other.text) == (one.versions, one.text)
        assert len(other.turns) == 1
    assert several.prompt == single.prompt


class OffTheLoop(Characters):
    """Refuses to work on the thread of the event loop."""

    def __init__(self) -> None:
        self.loops_thread = threading.get_ident()

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        assert threading.get_ident() != self.loops_thread
        return super().prompt_ids(messages)

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str:
        assert threading.get_ident() != self.loops_thread
        return super().text(token_ids)


async def test_texts_are_tokenised_and_decoded_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_turn, "FEW_TOKENS", 0)  # short ones are made at once
    engine, task, turns = ScriptedEngine(eos_token_id=END), a_task(0, group_size=2), Turns(SAMPLING, SAMPLING)
    await engine.start()

    one = await SingleTurnEpisodes(engine, OffTheLoop(), turns, UNMIXED).run(task)
    several = await MultiTurnEpisodes(
        engine, OffTheLoop(), turns, Limits(max_turns=3, max_tokens=500), a_conversation(), MIXED
    ).run(task)
    await engine.close()

    assert len(one.trajectories) == len(several.trajectories) == 2
    assert all(len(each.turns) == 3 for each in several.trajectories)


async def test_each_turn_sees_all_tokens_before_it_and_has_seeds_of_its_own() -> None:
    group = await played(ScriptedEngine(eos_token_id=END), a_task(0, group_size=2))

    for trajectory in group.trajectories:
        assert [turn.reward for turn in trajectory.turns] == [1.0, 2.0, 3.0]
        assert trajectory.finish_reason is FinishReason.STOP
        assert trajectory.metrics["environment/success"] == 1.0
        assert trajectory.metrics["episode/turns"] == 3.0
        for number, turn in enumerate(trajectory.turns[1:], start=1):
            shown = trajectory.token_ids[turn.start : turn.sampled].tolist()
            before = trajectory.turns[number - 1]
            last = int(trajectory.token_ids[before.end - 1])
            expected = Characters().continuation_ids([Message("user", f"{number}: {len(before.text)}")], last)
            assert tuple(shown) == expected
            assert turn.state is not None
    first, second = group.trajectories
    assert first.turns[0].state == second.turns[0].state
    sampled = [[t.token_ids[turn.sampled : turn.end].tolist() for turn in t.turns] for t in group.trajectories]
    assert sampled[0] != sampled[1]
    assert sampled[0][1] != sampled[0][2]


class Shortsighted(ScriptedEngine):
    """Refuses a member's later turns, as a server that would take a sampled token for one more image, or all turns."""

    def __init__(self, refuses: Callable[[str], bool]) -> None:
        super().__init__(eos_token_id=END)
        self._refuses = refuses

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if self._refuses(request.request_id):
            raise CannotBeShown("one more image")
        return await super().generate(request)


async def test_a_turn_that_cannot_be_shown_to_the_engine_ends_its_own_episode() -> None:
    group = await played(Shortsighted(lambda name: name.endswith("-1.1")), a_task(0, group_size=2))
    whole = await played(ScriptedEngine(eos_token_id=END), a_task(0, group_size=2))

    first, second = group.trajectories
    assert first.token_ids.tolist() == whole.trajectories[0].token_ids.tolist()
    assert (second.finish_reason, second.status) == (FinishReason.TOKENS, GradeStatus.PENDING)
    [turn] = second.turns
    assert turn.reward == 1.0
    assert second.token_ids.tolist() == whole.trajectories[1].token_ids[: turn.end].tolist()


async def test_a_first_prompt_that_cannot_be_shown_to_the_engine_is_told_of() -> None:
    with pytest.raises(CannotBeShown, match="one more image"):
        await played(Shortsighted(lambda name: True), a_task(0, group_size=2))


async def test_limits_end_an_episode_with_their_own_reason() -> None:
    few = await played(ScriptedEngine(eos_token_id=END), a_task(0), lambda: Echo(9), max_turns=2)
    short = await played(ScriptedEngine(eos_token_id=END), a_task(0), lambda: Echo(9), max_tokens=70)

    for trajectory in few.trajectories:
        assert (len(trajectory.turns), trajectory.finish_reason) == (2, FinishReason.TURNS)
        assert trajectory.turns[-1].reward == 2.0, "the last turn has its reward, and nothing is shown behind it"
        assert trajectory.loss_mask[-1] == 1
    for trajectory in short.trajectories:
        assert trajectory.finish_reason is FinishReason.TOKENS
        assert len(trajectory.token_ids) <= 70
    with pytest.raises(PromptTooLong):
        await played(ScriptedEngine(eos_token_id=END), a_task(0), max_tokens=10)


async def test_answers_and_what_is_shown_between_them_have_a_bound_of_their_own_whatever_the_prompt_takes() -> None:
    group = await played(ScriptedEngine(eos_token_id=END), a_task(0), lambda: Echo(9), most=60)

    for trajectory in group.trajectories:
        first = trajectory.turns[0].sampled
        assert trajectory.finish_reason is FinishReason.TOKENS
        assert 30 < len(trajectory.token_ids) - first <= 60


class Broken(Echo):
    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if len(self.actions) == 1:
            raise ConnectionError("the server is gone")
        return super().step(text)


class Unopened(Echo):
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        raise OSError("no such device")


@pytest.mark.parametrize(("make", "words"), [(Broken, "the server is gone"), (Unopened, "no such device")])
async def test_what_breaks_in_an_environment_is_an_error_and_no_reward(make: Callable[[], Any], words: str) -> None:
    group = await played(ScriptedEngine(eos_token_id=END), a_task(0), make)

    for trajectory in group.trajectories:
        assert trajectory.status is GradeStatus.ERROR
        assert trajectory.reward is None
        assert words in (trajectory.reason or "")
        assert trajectory.finish_reason is not FinishReason.ABORTED


async def interrupted(engine: ScriptedEngine, task: Task, at_tokens: int) -> Group:
    """Play a group and interrupt it once every member has sampled some tokens."""
    playing = episodes(engine)
    running = asyncio.create_task(playing.run(task))
    while (await engine.load()).generated_tokens < at_tokens:
        await asyncio.sleep(0.001)
    await playing.interrupt()
    return await running


def never_ending(prompt_ids: Sequence[int], seed: int, position: int, version: int) -> int:
    return max(2, rolling_token(prompt_ids, seed, position, 0))


@pytest.mark.parametrize("at_tokens", [1, 9, 17, 30])
async def test_an_interrupted_episode_goes_on_elsewhere_as_if_nothing_had_been(at_tokens: int) -> None:
    task = a_task(7, group_size=2)
    whole = await played(ScriptedEngine(never_ending, eos_token_id=END), task)
    slow = ScriptedEngine(never_ending, eos_token_id=END, token_seconds=0.002)
    await slow.start()
    left = await interrupted(slow, task, at_tokens)
    await slow.close()
    assert any(member.finish_reason is FinishReason.ABORTED for member in left.trajectories)

    other = ScriptedEngine(never_ending, eos_token_id=END, version=1)
    await other.start()
    again = await episodes(other).run(task, left.trajectories, 1)
    await other.close()

    for found, expected, before in zip(again.trajectories, whole.trajectories, left.trajectories, strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.turns == expected.turns
        assert found.finish_reason is expected.finish_reason
        kept = before.num_sampled
        assert found.resumed_tokens == kept
        assert found.sampled_versions().tolist() == [0] * kept + [1] * (expected.num_sampled - kept)


async def test_tokens_that_are_too_old_are_not_kept() -> None:
    task = a_task(7, group_size=1)
    slow = ScriptedEngine(never_ending, eos_token_id=END, token_seconds=0.002)
    await slow.start()
    left = await interrupted(slow, task, 9)
    await slow.close()
    other = ScriptedEngine(never_ending, eos_token_id=END, version=9)
    await other.start()

    again = await episodes(other).run(task, left.trajectories, 9)
    await other.close()

    assert set(again.trajectories[0].sampled_versions().tolist()) == {9}


class Moody(Echo):
    """Shows something else each time it is made."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Moody.made += 1

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        shown, *others = super().step(text)
        return (f"{shown} by {Moody.made}", *others)  # type: ignore[return-value]


async def test_an_environment_that_shows_something_else_ends_the_group_with_a_reason() -> None:
    task = a_task(7, group_size=1)
    slow = ScriptedEngine(never_ending, eos_token_id=END, token_seconds=0.002)
    await slow.start()
    playing = episodes(slow, Moody)
    running = asyncio.create_task(playing.run(task))
    while (await slow.load()).generated_tokens < 12:
        await asyncio.sleep(0.001)
    await playing.interrupt()
    left = await running
    await slow.close()
    assert len(left.trajectories[0].turns) > 1
    other = ScriptedEngine(never_ending, eos_token_id=END)
    await other.start()

    with pytest.raises(EnvironmentDiverged):
        await episodes(other, Moody).run(task, left.trajectories, 0)
    await other.close()


async def test_an_update_between_turns_leaves_every_token_its_version() -> None:
    engine = ScriptedEngine(never_ending, eos_token_id=END, token_seconds=0.002)
    await engine.start()
    running = asyncio.create_task(episodes(engine).run(a_task(3, group_size=2)))
    while (await engine.load()).generated_tokens < 18:
        await asyncio.sleep(0.001)
    engine.version = 5
    group = await running
    await engine.close()

    for trajectory in group.trajectories:
        versions = trajectory.sampled_versions().tolist()
        assert set(versions) == {0, 5}
        assert versions == sorted(versions)


async def test_a_greedy_member_plays_beside_the_group() -> None:
    group = await played(
        ScriptedEngine(eos_token_id=END), a_task(0), turns=Turns(SAMPLING, SAMPLING, greedy_baseline=True)
    )

    assert [member.is_baseline for member in group.trajectories] == [False, False, True]


class Slow(Echo):
    """The first ones that are made never answer, until they are let go."""

    made = 0

    def __init__(self, slow: int, release: asyncio.Event | None = None, ended: list[int] | None = None) -> None:
        super().__init__()
        Slow.made += 1
        self.number, self.is_slow = Slow.made, Slow.made <= slow
        self.release = asyncio.Event() if release is None else release
        self.ended = [] if ended is None else ended

    async def step(self, text: str) -> Any:  # type: ignore[override]
        if self.is_slow:
            await self.release.wait()
        return super().step(text)

    def close(self) -> None:
        self.ended.append(self.number)


async def test_a_group_is_made_of_the_members_that_are_finished_first() -> None:
    Slow.made, ended = 0, list[int]()
    task = a_task(0, group_size=3)
    everyone = await played(ScriptedEngine(eos_token_id=END), a_task(0, group_size=6))

    group = await played(ScriptedEngine(eos_token_id=END), task, lambda: Slow(2, ended=ended), redundant=2)

    assert [member.finish_reason for member in group.trajectories] == [FinishReason.STOP] * 3
    found = [member.token_ids.tolist() for member in group.trajectories]
    expected = [member.token_ids.tolist() for member in everyone.trajectories]
    assert found == [expected[4], expected[5], expected[2]], "each by its own seed; 3 would be the baseline's number"
    assert sorted(ended) == [1, 2, 3, 4, 5], "the environments of those who were late are closed, too"


async def test_what_fails_is_replaced_by_a_redundant_member() -> None:
    Slow.made = 0

    class Fails(Slow):
        async def step(self, text: str) -> Any:
            if self.number == 2:
                raise ConnectionError("the server is gone")
            return await super().step(text)

    group = await played(ScriptedEngine(eos_token_id=END), a_task(0, group_size=2), lambda: Fails(0), redundant=1)

    assert all(member.status is GradeStatus.PENDING for member in group.trajectories)


async def test_evaluation_and_baselines_have_no_redundant_members() -> None:
    Slow.made = 0
    await played(
        ScriptedEngine(eos_token_id=END), a_task(0, group_size=2, pinned_version=0), lambda: Slow(0), redundant=2
    )
    assert Slow.made == 2

    turns = Turns(SAMPLING, SAMPLING, greedy_baseline=True)
    group = await played(
        ScriptedEngine(eos_token_id=END), a_task(0, group_size=2), lambda: Slow(0), redundant=2, turns=turns
    )
    assert [member.is_baseline for member in group.trajectories] == [False, False, True]


async def test_an_interrupted_group_keeps_what_redundant_members_have_finished() -> None:
    Slow.made = 0
    task = a_task(0, group_size=2)
    engine = ScriptedEngine(eos_token_id=END)
    await engine.start()
    playing = episodes(engine, lambda: Slow(2), redundant=1)
    running = asyncio.create_task(playing.run(task))
    while (await engine.load()).running or Slow.made < 3:
        await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0.001)
    await playing.interrupt()
    left = await running
    assert [member.finish_reason for member in left.trajectories] == [FinishReason.STOP, FinishReason.ABORTED]

    again = await episodes(engine, redundant=1).run(task, left.trajectories, 0)
    await engine.close()

    assert [member.finish_reason for member in again.trajectories] == [FinishReason.STOP] * 2
    assert again.trajectories[0].token_ids.tolist() == left.trajectories[0].token_ids.tolist()


IMAGE = 250


class Illustrated(Characters):
    """Writes two tokens for each image, at the beginning."""

    def illustrated(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        images = [image for each in messages for image in each.images]
        token_ids = (IMAGE, IMAGE) * len(images) + self.prompt_ids(messages)
        return token_ids, self.placed(token_ids, images)

    def check_row(self, task: Task) -> None:
        """Every text leaves room for images."""

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PromptImage, ...]:
        return tuple(PromptImage(2 * number, 2, image) for number, image in enumerate(images))


class Watched(ScriptedEngine):
    """Remembers the images of its requests."""

    seen: ClassVar[list[tuple[PromptImage, ...]]] = []

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        self.seen.append(request.images)
        return await super().generate(request)


async def test_every_turn_is_sampled_with_the_images_of_the_task() -> None:
    engine, turns = Watched(eos_token_id=END), Turns(SAMPLING, SAMPLING)
    await engine.start()
    limits = Limits(max_turns=3, max_tokens=500)
    several = MultiTurnEpisodes(engine, Illustrated(), turns, limits, a_conversation(), MIXED)

    group = await several.run(replace(a_task(0, group_size=2), images=(b"one", b"two")))
    await engine.close()

    assert len(engine.seen) == 6
    assert set(engine.seen) == {(PromptImage(0, 2, b"one"), PromptImage(2, 2, b"two"))}
    assert [each.token_ids[:4].tolist() for each in group.trajectories] == [[IMAGE] * 4] * 2
    assert group.prompt.split().count(str(IMAGE)) == 2
