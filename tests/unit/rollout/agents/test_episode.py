"""What agents ask becomes trajectories: tokens of the engine, appended to, branched where they cannot be."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from flotilla.services.rollout.agents.conversation import ContextTooLong, TooManyBranches
from flotilla.services.rollout.agents.episode import (
    Asked,
    Ended,
    Endpoint,
    Episode,
    EpisodeGone,
    LimitReached,
)
from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.services.rollout.engines.scripted import log_prob_of
from flotilla.services.rollout.tools.formats import split_calls
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.trajectory import FinishReason, Trajectory
from flotilla.shared.testing.characters import END, CharacterTokenizer
from tests.unit.rollout.agents.world import World, a_lone_episode, a_spec, ask, stays, user


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.engine.start()
    yield made
    await made.engine.close()


async def started(world: World) -> Episode:
    await world.engine.start()
    return a_lone_episode(world)


def text_of(trajectory: Trajectory, *, sampled: bool = False) -> str:
    chosen = trajectory.token_ids[trajectory.loss_mask.astype(bool)] if sampled else trajectory.token_ids
    return "".join(map(chr, chosen)).replace(chr(END), "~")


async def test_a_chat_of_several_turns_is_one_trajectory_of_the_engines_tokens(world: World) -> None:
    episode = a_lone_episode(world)
    chat = [user("a?")]

    for question in ("b?", "c?", None):
        chat.append(await ask(episode, *chat))
        chat += [user(question)] if question else []

    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory) == "<user>a?~\n<assistant>yes~\n<user>b?~\n<assistant>yes~\n<user>c?~\n<assistant>yes~"
    assert text_of(trajectory, sampled=True) == "yes~" * 3
    assert len(trajectory.turns) == 3
    assert trajectory.episode == episode.id
    expected = [log_prob_of(token) for token in trajectory.token_ids[trajectory.loss_mask.astype(bool)]]
    assert np.allclose(trajectory.log_probs[trajectory.loss_mask.astype(bool)], expected)
    # What the policy wrote was never tokenised.
    assert not any("yes" in text for text in world.tokenizer.tokenised)


async def test_a_reply_that_was_cut_off_is_ended_by_the_template() -> None:
    world = World(a_spec(max_new_tokens=2))
    episode = await started(world)
    reply = await ask(episode, user("a?"))

    await ask(episode, user("a?"), reply, user("b?"))

    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory) == "<user>a?~\n<assistant>ye~\n<user>b?~\n<assistant>ye"
    assert text_of(trajectory, sampled=True) == "yeye"
    assert trajectory.finish_reason is FinishReason.LENGTH


async def test_white_space_that_a_framework_strips_does_not_matter() -> None:
    world = World(writes=lambda _: "  yes \n~")
    episode = await started(world)
    reply = await ask(episode, user("a?"))

    await ask(episode, user("a?"), {**reply, "content": "yes"}, user("b?"))

    assert len(await episode.trajectories()) == 1


async def test_going_on_from_an_earlier_reply_is_a_branch_that_trains_no_token_twice(world: World) -> None:
    episode = a_lone_episode(world)
    first = await ask(episode, user("a?"))
    await ask(episode, user("a?"), first, user("b?"))

    await ask(episode, user("a?"), first, user("other?"))

    one, two = await episode.trajectories()
    assert text_of(one, sampled=True) == "yes~yes~"
    assert text_of(two) == "<user>a?~\n<assistant>yes~\n<user>other?~\n<assistant>yes~"
    assert text_of(two, sampled=True) == "yes~"


async def test_edited_replies_begin_a_conversation_of_their_own(world: World) -> None:
    episode = a_lone_episode(world)
    await ask(episode, user("a?"))

    await ask(episode, user("a?"), {"role": "assistant", "content": "no"}, user("b?"))

    _, other = await episode.trajectories()
    assert text_of(other) == "<user>a?~\n<assistant>no~\n<user>b?~\n<assistant>yes~"
    assert text_of(other, sampled=True) == "yes~"


async def test_a_template_that_hides_thoughts_makes_a_branch_not_other_tokens() -> None:
    world = World(writes=lambda _: "(hm)yes~", tokenizer=CharacterTokenizer(hides_thoughts=True))
    episode = await started(world)
    reply = await ask(episode, user("a?"))

    await ask(episode, user("a?"), reply, user("b?"))

    one, two = await episode.trajectories()
    assert text_of(one, sampled=True) == text_of(two, sampled=True) == "(hm)yes~"
    assert text_of(two) == "<user>a?~\n<assistant>yes~\n<user>b?~\n<assistant>(hm)yes~"


async def test_calls_at_the_same_time_are_branches(world: World) -> None:
    episode = a_lone_episode(world)
    first = await ask(episode, user("a?"))

    chats = [[user("a?"), first, user(f"{number}?")] for number in range(3)]
    await asyncio.gather(*(ask(episode, *chat) for chat in chats))

    sampled = sorted(text_of(each, sampled=True) for each in (await episode.trajectories()))
    assert sampled == ["yes~", "yes~", "yes~yes~"]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_tools_are_shown_called_and_answered_in_one_trajectory() -> None:
    world = World(writes=lambda prompt: f"Well.{CALL}~" if "<tool>" not in prompt else "2~")
    episode = await started(world)

    reply = await ask(episode, user("1+1?"), tools=[TOOL])
    (call,) = reply["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    last = await ask(episode, user("1+1?"), reply, result, tools=[TOOL])

    assert (reply["content"], call["function"]) == ("Well.", {"name": "add", "arguments": '{"a": 1}'})
    assert last == {"role": "assistant", "content": "2"}
    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory).startswith("<tools>['add']~\n<user>1+1?~\n<assistant>Well.<tool_call>")
    assert text_of(trajectory, sampled=True) == f"Well.{CALL}~2~"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL + CALL, 2),
        (CALL.replace("add", "other"), 0),
        ("<tool_call>{not json}</tool_call>", 0),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', 0),
        ('<tool_call>{"name": "add"}</tool_call>', 1),
        (f"<think>{CALL}</think>no", 0),
        ("plain", 0),
    ],
)
def test_what_is_no_call_stays_text(text: str, calls: int) -> None:
    rest, found = split_calls(text, {"add"})

    assert len(found) == calls
    assert rest == ("" if calls else text)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.1},
        {"top_p": 0.5},
        {"n": 2},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"content": "?"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "refused", "content": "?"}]},
        {"messages": "a"},
    ],
)
async def test_what_would_train_on_something_else_is_refused(world: World, fields: dict[str, Any]) -> None:
    episode = a_lone_episode(world)
    body = json.dumps({"messages": [user("a?")]} | fields).encode()

    with pytest.raises(InvalidRequest):
        await episode.answer(Asked(Endpoint.CHAT, body), stays)

    assert (await episode.trajectories()) == []


async def test_the_specs_own_sampling_may_be_named(world: World) -> None:
    assert (await ask(a_lone_episode(world), user("a?"), temperature=0.9, top_p=1, max_tokens=2))["content"] == "ye"


async def test_a_repeated_request_gets_the_answer_that_was_lost(world: World) -> None:
    episode = a_lone_episode(world)
    body = json.dumps({"messages": [user("a?")]}).encode()

    async def is_gone() -> bool:
        return True

    assert await episode.answer(Asked(Endpoint.CHAT, body), is_gone) is None
    assert (await episode.trajectories()) == []
    again = await ask(episode, user("a?"), repeated=True)
    await ask(episode, user("a?"), repeated=True)

    assert again["content"] == "yes"
    assert [text_of(each, sampled=True) for each in (await episode.trajectories())] == ["yes~"]


async def test_a_repeated_request_beside_the_first_records_one_turn(world: World) -> None:
    episode = a_lone_episode(world)
    body = json.dumps({"messages": [user("a?")]}).encode()

    async def stays_looked_at() -> bool:
        await asyncio.sleep(0)
        return False

    first = asyncio.create_task(episode.answer(Asked(Endpoint.CHAT, body), stays_looked_at))
    await asyncio.sleep(0)
    both = await asyncio.gather(first, episode.answer(Asked(Endpoint.CHAT, body, is_repeated=True), stays_looked_at))

    assert both[0] is both[1]
    assert [text_of(each, sampled=True) for each in (await episode.trajectories())] == ["yes~"]


async def test_a_request_beside_one_that_is_being_answered_takes_another_branch(world: World) -> None:
    episode = a_lone_episode(world)
    await ask(episode, user("a?"))
    on = [user("a?"), {"role": "assistant", "content": "yes"}, user("b?")]
    is_asked, others = asyncio.Event(), asyncio.Event()

    async def is_looked_at() -> bool:
        is_asked.set()
        await others.wait()
        return False

    first = asyncio.create_task(
        episode.answer(Asked(Endpoint.CHAT, json.dumps({"messages": on}).encode()), is_looked_at)
    )
    await is_asked.wait()
    second = asyncio.create_task(ask(episode, *on[:2], user("c?")))
    await asyncio.sleep(0)
    others.set()
    await asyncio.gather(first, second)

    texts = sorted(text_of(each) for each in (await episode.trajectories()))
    assert len(texts) == 2
    assert not any("b?" in text and "c?" in text for text in texts), "neither saw the other's question"


async def test_an_episode_that_ends_samples_nothing_more_of_the_same_question_asked_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = a_lone_episode(world)

    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(world.engine, "generate", never)
    both = [asyncio.create_task(ask(episode, user("a?"))) for _ in range(2)]
    sampling: list[asyncio.Task[Any]] = []
    while len(sampling) < 2:
        await asyncio.sleep(0.001)
        sampling = [each for each in asyncio.all_tasks() if each.get_name().startswith("turn ")]

    episode.close(Ended.LOST)
    _, still = await asyncio.wait(sampling, timeout=1)

    assert len(sampling) == 2 and not still
    for each in await asyncio.gather(*both, return_exceptions=True):
        assert isinstance(each, EpisodeGone)


async def test_the_same_question_asked_twice_is_answered_twice(world: World) -> None:
    episode = a_lone_episode(world)

    await ask(episode, user("a?"))
    await ask(episode, user("a?"))

    assert len(await episode.trajectories()) == 2


async def complete(episode: Episode, prompt: Any, **fields: Any) -> str:
    """Ask for the completion of a text."""
    reply = await episode.answer(Asked(Endpoint.TEXT, json.dumps({"prompt": prompt} | fields).encode()), stays)
    assert reply is not None
    return str(reply.body["choices"][0]["text"])


async def test_texts_are_continued_as_texts_and_as_tokens(world: World) -> None:
    episode = a_lone_episode(world)

    assert await complete(episode, "Once") == "yes"
    assert await complete(episode, "Onceyes and") == "yes"
    (trajectory,) = await episode.trajectories()
    await complete(episode, [*trajectory.token_ids.tolist(), ord("!")])

    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory) == "Onceyes~ andyes~!yes~"
    assert text_of(trajectory, sampled=True) == "yes~yes~yes~"


@pytest.mark.parametrize("shown", ["", "Obs:", "Obs:!"], ids=["without it", "with it", "as sampled"])
@pytest.mark.parametrize("behind", ["", "!"], ids=["stop at the end of a token", "stop within a token"])
async def test_a_text_that_a_stop_string_ended_is_continued_by_the_engines_tokens(
    monkeypatch: pytest.MonkeyPatch, shown: str, behind: str
) -> None:
    world = World()
    episode = await started(world)
    sampled = f"doObs:{behind}"

    async def generate(request: GenerationRequest) -> list[Completion]:
        ids = np.array([ord(each) for each in sampled], np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), ((0, 0),), FinishReason.STOP)]

    monkeypatch.setattr(world.engine, "generate", generate)
    shown = shown.removesuffix("!") if not behind else shown
    text = "Q\n"
    for number in range(3):
        reply = await complete(episode, text, stop="Obs:")
        assert reply == "do"
        text += f"{reply}{shown} {number}\n"

    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory) == f"Q\n{sampled} 0\n{sampled} 1\n{sampled}"
    assert text_of(trajectory, sampled=True) == sampled * 3
    assert world.tokenizer.tokenised == ["Q\n", " 0\n", " 1\n"]


async def test_the_prompt_of_a_completion_without_text_asked_again_is_not_continued() -> None:
    world = World(writes=lambda _: "~")
    episode = await started(world)

    assert [await complete(episode, "Q") for _ in range(2)] == ["", ""]
    await complete(episode, "Q more")

    assert sorted(map(text_of, (await episode.trajectories()))) == ["Q~", "Q~ more~"]


async def test_requests_at_the_same_time_are_sampled_with_different_seeds(world: World) -> None:
    seeds = await seeds_of(world, together=True)

    assert len(set(seeds)) == len(seeds) == 4
    # The same that requests one after another have: a run that is done again samples the same.
    assert seeds == await seeds_of(world, together=False)


async def seeds_of(world: World, *, together: bool) -> list[int]:
    """Ask the same four times in a new episode; return the seeds."""
    episode, seeds = a_lone_episode(world), list[int]()
    generate = world.engine.generate

    async def noting(request: GenerationRequest) -> Any:
        seeds.extend(request.seeds)
        return await generate(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.engine, "generate", noting)
        if together:
            await asyncio.gather(*(ask(episode, user("a?")) for _ in range(4)))
        else:
            for _ in range(4):
                await ask(episode, user("a?"))
    return seeds


async def test_turns_branches_and_context_have_limits() -> None:
    world = World(a_spec(max_turns=3, max_branches=2))
    episode = await started(world)
    await ask(episode, user("a?"))
    await ask(episode, user("b?"))

    with pytest.raises(TooManyBranches):
        await ask(episode, user("c?"))
    with pytest.raises(ContextTooLong):
        await ask(episode, user("a?"), {"role": "assistant", "content": "yes"}, user("x" * 4000))
    await ask(episode, user("a?"), {"role": "assistant", "content": "yes"}, user("d?"))
    with pytest.raises(LimitReached):
        await ask(episode, user("b?"), {"role": "assistant", "content": "yes"}, user("d?"))


async def test_conversations_under_way_count_as_branches_so_that_none_is_sampled_in_vain() -> None:
    world = World(a_spec(max_branches=2), token_seconds=0.001)
    episode = await started(world)

    answers = await asyncio.gather(*(ask(episode, user(f"{n}?")) for n in range(4)), return_exceptions=True)

    assert [isinstance(each, TooManyBranches) for each in answers] == [False, False, True, True]
    assert len(await episode.trajectories()) == episode.num_turns == 2


async def test_a_conversation_whose_client_hung_up_gives_its_place_to_another() -> None:
    world = World(a_spec(max_branches=1))
    episode = await started(world)
    is_sampling, generate = asyncio.Event(), world.engine.generate

    async def hangs_at_first(request: GenerationRequest) -> Any:
        if not is_sampling.is_set():
            is_sampling.set()
            await asyncio.Event().wait()
        return await generate(request)

    async def is_gone() -> bool:
        return True

    world.engine.generate = hangs_at_first  # type: ignore[method-assign]
    body = json.dumps({"messages": [user("a?")]}).encode()
    first = asyncio.create_task(episode.answer(Asked(Endpoint.CHAT, body), is_gone))
    await is_sampling.wait()

    reply = await ask(episode, user("b?"))

    assert (reply["content"], await first) == ("yes", None)
    assert [text_of(each) for each in (await episode.trajectories())] == ["<user>b?~\n<assistant>yes~"]
