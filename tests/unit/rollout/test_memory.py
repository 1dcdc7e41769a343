"""Turns with prompts of their own: what the policy is shown, and what it samples behind."""

import asyncio
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flotilla.services.rollout.engines.base import GenerationRequest
from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.environments.conversation import EnvironmentConversation
from flotilla.services.rollout.environments.frozen_lake import FrozenLake
from flotilla.services.rollout.environments.memory import TurnMemory, filled
from flotilla.services.rollout.episodes.multi_turn import Limits, MultiTurnEpisodes
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.shared.config.sections.episodes import (
    EnvironmentConfig,
    EnvironmentEpisodesConfig,
    MemoryConfig,
    check_sequences,
)
from flotilla.shared.schemas.routing import Ids, RoutedExperts
from flotilla.shared.schemas.task import Message, Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task
from tests.unit.rollout.test_multi_turn import END, MIXED, SAMPLING, Characters, Echo, never_ending

TEMPLATE = "{instruction};{turns_taken}/{turns_left};{turns_remembered}[{history}]{observation}"
MEMORY = MemoryConfig(turns=2, template="({turn} {observation} {action} {reward})", separator=", ")


class Watched(ScriptedEngine):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(eos_token_id=END)
        self.prompts: dict[str, tuple[int, ...]] = {}

    async def generate(self, request: GenerationRequest) -> Any:
        self.prompts[request.request_id] = tuple(request.prompt_ids)
        return await super().generate(request)


class Told(Echo):
    """Calls every second text no action, and what it reads by one letter."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return super().reset(seed)[0], {"instruction": "play", "remembered": "start"}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, is_over, is_cut, info = super().step(text)
        is_valid = len(self.actions) % 2 == 0
        return observation, reward, is_over, is_cut, {**info, "action": "x", "is_valid": is_valid}


def episodes_of(
    engine: ScriptedEngine, make: Any = Told, *, memory: MemoryConfig = MEMORY, template: str | None = TEMPLATE,
    most: int = 500,
) -> MultiTurnEpisodes:  # fmt: skip
    def opened(task: Task, member: int) -> EnvironmentConversation:
        return EnvironmentConversation(make, task, 5.0, is_quick=True, template=template, memory=memory, max_turns=9)

    return MultiTurnEpisodes(engine, Characters(), Turns(SAMPLING, SAMPLING), Limits(9, most), opened, MIXED)


TASK = a_task(0, group_size=1, messages=(Message("system", "be good"), Message("user", "")), metadata={"seed": 4})


async def played(engine: ScriptedEngine, task: Task = TASK, **options: Any) -> Group:
    await engine.start()
    try:
        return await episodes_of(engine, **options).run(task)
    finally:
        await engine.close()


def prompt(text: str) -> tuple[int, ...]:
    return Characters().prompt_ids((Message("system", "be good"), Message("user", text)))


async def test_each_turn_is_sampled_behind_a_prompt_of_its_own() -> None:
    engine = Watched()

    (found,) = (await played(engine, make=lambda: Told(4))).trajectories

    lengths = [len(turn.text) for turn in found.turns]
    first, second, third = (f"({at + 1} {seen} x {at + 1.0})" for at, seen in
                            enumerate(["start", f"1: {lengths[0]}", f"2: {lengths[1]}"]))  # fmt: skip
    expected = [
        prompt("play;0/9;0[]seed 4"),
        prompt(f"play;1/8;1[{first}]1: {lengths[0]}"),
        prompt(f"play;2/7;2[{first}, {second}]2: {lengths[1]}"),
        prompt(f"play;3/6;2[{second}, {third}]3: {lengths[2]}"),
    ]
    asked = [shown for _, shown in sorted(engine.prompts.items())]
    assert asked == expected
    for turn, shown in zip(found.turns, expected, strict=True):
        assert tuple(found.token_ids[turn.start : turn.sampled].tolist()) == shown
    assert [turn.is_fresh for turn in found.turns] == [False, True, True, True]
    assert [turn.reward for turn in found.turns] == [1.0, 2.0, 3.0, 4.0]
    assert found.finish_reason is FinishReason.STOP


async def test_turns_whose_text_was_no_action_are_told_of_in_other_words() -> None:
    engine = Watched()
    memory = MemoryConfig(turns=9, template="", invalid_template="{turn}: {action}!", separator=" ")

    await played(engine, make=lambda: Told(4), memory=memory, template="{history}/{observation}")

    last = sorted(engine.prompts.items())[-1][1]
    # The environment's instruction is not shown, since the template has no place for it.
    start = len(prompt("")) - 2
    assert bytes(last[start:-2]).decode().startswith("1: x! 3: x!/3: ")


async def test_the_bound_of_tokens_is_each_turns_own() -> None:
    memory = MemoryConfig()
    most = len(prompt("seed 4")) + 12

    (found,) = (await played(Watched(), make=lambda: Echo(5), memory=memory, template=None, most=most)).trajectories

    assert len(found.turns) == 5
    assert len(found.token_ids) > 2 * most
    assert all(turn.end - turn.start <= most for turn in found.turns)


async def test_a_prompt_that_leaves_no_room_ends_the_episode() -> None:
    memory = MemoryConfig(turns=9, template="{observation}{observation}{observation}")

    (found,) = (await played(Watched(), make=lambda: Echo(9), memory=memory, template="{history}{observation}",
                             most=60)).trajectories  # fmt: skip

    assert found.finish_reason is FinishReason.TOKENS
    assert all(turn.end - turn.start <= 60 for turn in found.turns)


@pytest.mark.parametrize("at_tokens", [1, 9, 17, 30])
async def test_an_interrupted_episode_goes_on_elsewhere_as_if_nothing_had_been(at_tokens: int) -> None:
    whole = await played(ScriptedEngine(never_ending, eos_token_id=END), make=lambda: Told(5))
    slow = ScriptedEngine(never_ending, eos_token_id=END, token_seconds=0.002)
    await slow.start()
    stopped = episodes_of(slow, lambda: Told(5))
    running = asyncio.create_task(stopped.run(TASK))
    while (await slow.load()).generated_tokens < at_tokens:
        await asyncio.sleep(0.001)
    await stopped.interrupt()
    left = await running
    await slow.close()
    assert left.trajectories[0].finish_reason is FinishReason.ABORTED

    (again,) = (await resumed(left)).trajectories

    (expected,) = whole.trajectories
    kept = left.num_sampled
    assert again.token_ids.tolist() == expected.token_ids.tolist()
    assert again.turns == expected.turns
    assert again.sampled_versions().tolist() == [0] * kept + [1] * (expected.num_sampled - kept)


async def resumed(left: Group) -> Group:
    other = ScriptedEngine(never_ending, eos_token_id=END, version=1)
    await other.start()
    try:
        return await episodes_of(other, lambda: Told(5)).run(TASK, left.trajectories, 1)
    finally:
        await other.close()


@pytest.mark.parametrize(("turns", "kept"), [(0, 0), (2, 2), (10**30, 50)])
def test_turns_that_are_not_told_of_any_more_take_no_memory(turns: int, kept: int) -> None:
    memory = TurnMemory(MemoryConfig(turns=turns))
    tracemalloc.start()
    try:
        for _ in range(50):
            memory.seen("x" * 10_000)
            memory.answered("left", 0.0, {})
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken < (kept + 2) * 11_000
    places = memory.places()
    assert (places["{turns_taken}"], places["{turns_remembered}"]) == ("50", str(kept))
    assert len(places["{history}"]) >= kept * 10_000


def test_what_a_value_says_is_no_place() -> None:
    assert filled("{a}{b}", {"{a}": "{b}", "{b}": "2"}) == "{b}2"


def test_our_environments_say_what_they_read() -> None:
    lake = FrozenLake(action_pattern="<answer>(.*?)</answer>")
    lake.reset(1)

    assert lake.step("<answer> Fly </answer>")[4]["action"] == "Fly"
    assert lake.step("Left")[4] == {**lake.step("Left")[4], "action": "", "is_valid": False}
    assert lake.step("<answer>Left</answer>")[4]["is_valid"] is True


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"turn_template": "{history}{observation}"}, "without memory"),
        ({"turn_template": "{observation}", "memory": {"turns": 2}}, "no {history}"),
        ({"memory": {"turns": 1}}, "no {history}"),
    ],
)
def test_a_template_and_a_memory_that_miss_each_other_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EnvironmentConfig(environment="frozen_lake", **given)


MEMORY: dict[str, Any] = {"environments": (EnvironmentConfig(environment="frozen_lake", memory=MemoryConfig()),)}
BRANCHES: dict[str, Any] = {"environments": (EnvironmentConfig(environment="frozen_lake"),), "history": "branch"}


@pytest.mark.parametrize("several", [MEMORY, BRANCHES])
@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("gae", {}, "advantage.kind gae"),
        ("gigpo", {"most": 100}, "max_response_tokens"),
        ("grpo", {"asks_teachers": True}, "distillation.servers"),
    ],
)
def test_what_does_not_go_with_several_sequences_is_refused(
    kind: str, given: dict[str, Any], words: str, several: dict[str, Any]
) -> None:
    told = {"asks_teachers": False, "cuts": False} | given
    most = told.pop("most", None)
    episodes = EnvironmentEpisodesConfig(kind="environment", max_response_tokens=most, **several)

    with pytest.raises(ValueError, match=words) as caught:
        check_sequences(episodes, kind, **told)

    assert ("history branch" in str(caught.value)) is (several is BRANCHES)
    check_sequences(episodes.model_copy(update={"max_response_tokens": None}), "gigpo",
                    asks_teachers=False, cuts=False)  # fmt: skip


def test_a_memory_and_branches_are_refused_beside_each_other() -> None:
    episodes = EnvironmentEpisodesConfig(kind="environment", **{**MEMORY, "history": "branch"})

    with pytest.raises(ValueError, match=r"history branch has no effect beside .*environments.0.memory"):
        check_sequences(episodes, "grpo", asks_teachers=False, cuts=False)


def test_a_prompt_that_is_cut_would_be_whole_again_in_a_branch() -> None:
    told = {"asks_teachers": False, "cuts": True}

    with pytest.raises(ValueError, match=r"history branch .* data.overlong.kind truncate"):
        check_sequences(EnvironmentEpisodesConfig(kind="environment", **BRANCHES), "grpo", **told)
    check_sequences(EnvironmentEpisodesConfig(kind="environment", **MEMORY), "grpo", **told)


class Routed(ScriptedEngine):
    """Records experts; the second turn is aborted once, behind a token and without a record."""

    def __init__(self) -> None:
        super().__init__(never_ending, eos_token_id=END)
        self.is_interrupted = False

    async def generate(self, request: GenerationRequest) -> Any:
        [made] = await super().generate(request)
        if request.request_id.endswith(".1") and not self.is_interrupted:
            self.is_interrupted = True
            cut = {"token_ids": made.token_ids[:1], "log_probs": made.log_probs[:1]}
            return [replace(made, **cut, finish_reason=FinishReason.ABORTED)]
        num_read = len(request.prompt_ids) + len(made.token_ids) - 1
        return [replace(made, experts=RoutedExperts.of(np.tile([[[0, 1]]], (num_read, 1, 1)), 4))]


async def test_an_answer_that_was_interrupted_without_experts_is_sampled_again_and_no_loop_reads_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, readers, ids = Routed(), set[int](), RoutedExperts.ids

    def watched(experts: RoutedExperts) -> Ids:
        readers.add(threading.get_ident())
        return ids(experts)

    monkeypatch.setattr(RoutedExperts, "ids", watched)
    left = await played(engine, make=lambda: Told(5))
    [partial] = left.trajectories
    assert partial.finish_reason is FinishReason.ABORTED

    again = Routed()
    again.is_interrupted = True
    await again.start()
    [found] = (await episodes_of(again, lambda: Told(5)).run(TASK, left.trajectories, 0)).trajectories
    await again.close()

    assert len(found.turns) > 2
    assert found.experts is not None
    assert readers and threading.get_ident() not in readers
