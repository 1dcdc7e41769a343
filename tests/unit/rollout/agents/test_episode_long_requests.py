"""Long requests: what cannot fit is refused unseen, and what is tokenised for long keeps no other agent waiting."""

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from flotilla.services.rollout.agents.conversation import ContextTooLong, TooManyBranches
from flotilla.services.rollout.agents.episode import (
    MOST_AT_A_TIME,
    Asked,
    Ended,
    Endpoint,
    Episode,
    EpisodeGone,
    Threads,
)
from flotilla.shared.testing.characters import CharacterTokenizer
from tests.unit.rollout.agents.world import World, a_lone_episode, a_spec, ask, stays, user

DEADLINE_SECONDS = 10.0


class SlowTokenizer(CharacterTokenizer):
    """Takes its time for texts with ``slow`` in them: until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, text: str, **options: Any) -> Mapping[str, list[int]]:
        if "slow" in text:
            self.has_begun.set()
            assert self.may_go_on.wait(DEADLINE_SECONDS), "the loop was blocked"
        return super().__call__(text, **options)


async def slow_world(**agents: Any) -> tuple[World, SlowTokenizer]:
    tokenizer = SlowTokenizer()
    world = World(a_spec(**agents), tokenizer=tokenizer)
    await world.engine.start()
    return world, tokenizer


async def begun(tokenizer: SlowTokenizer) -> None:
    assert await asyncio.to_thread(tokenizer.has_begun.wait, DEADLINE_SECONDS)


async def test_another_agent_is_answered_while_a_long_message_is_tokenised() -> None:
    world, tokenizer = await slow_world()
    slow = asyncio.create_task(ask(a_lone_episode(world), user("slow?")))
    await begun(tokenizer)

    other = await ask(a_lone_episode(world), user("a?"))
    tokenizer.may_go_on.set()

    assert (other["content"], (await slow)["content"]) == ("yes", "yes")


async def test_an_agent_whose_message_is_tokenised_for_long_is_not_silent() -> None:
    world, tokenizer = await slow_world(lease_seconds=10, episode_seconds=1000)
    episode = a_lone_episode(world)
    slow = asyncio.create_task(ask(episode, user("slow?")))
    await begun(tokenizer)

    assert episode.ends_at == world.seconds + 1000
    tokenizer.may_go_on.set()
    await slow
    assert episode.ends_at == world.seconds + 10


async def test_requests_of_one_episode_keep_their_order_whatever_takes_long() -> None:
    world, tokenizer = await slow_world(max_branches=1)
    episode = a_lone_episode(world)
    slow = asyncio.create_task(ask(episode, user("slow?")))
    await begun(tokenizer)
    other = asyncio.create_task(ask(episode, user("a?")))
    await asyncio.sleep(0)

    tokenizer.may_go_on.set()

    assert (await slow)["content"] == "yes"
    with pytest.raises(TooManyBranches):
        await other


async def test_a_request_repeated_while_it_is_tokenised_is_one_turn() -> None:
    world, tokenizer = await slow_world()
    episode = a_lone_episode(world)
    both = [asyncio.create_task(ask(episode, user("slow?"), repeated=number > 0)) for number in range(2)]
    await begun(tokenizer)

    tokenizer.may_go_on.set()
    await asyncio.gather(*both)

    assert episode.num_turns == len(await episode.trajectories()) == 1


async def test_a_request_cancelled_while_it_is_tokenised_leaves_nothing_behind() -> None:
    world, tokenizer = await slow_world(max_branches=1, max_turns=1)
    episode = a_lone_episode(world)
    slow = asyncio.create_task(ask(episode, user("slow?")))
    await begun(tokenizer)

    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    tokenizer.may_go_on.set()

    assert (await ask(episode, user("a?")))["content"] == "yes"


async def test_an_episode_that_ends_while_a_request_is_tokenised_samples_nothing() -> None:
    world, tokenizer = await slow_world()
    episode = a_lone_episode(world)
    slow = asyncio.create_task(ask(episode, user("slow?")))
    await begun(tokenizer)

    episode.close(Ended.ABANDONED)
    tokenizer.may_go_on.set()

    with pytest.raises(EpisodeGone):
        await slow
    assert episode.num_turns == 0


async def test_work_that_was_given_up_keeps_its_place_until_it_ends() -> None:
    threads, may_end = Threads(), threading.Event()
    working = [asyncio.create_task(threads.run(lambda: may_end.wait(DEADLINE_SECONDS))) for _ in range(MOST_AT_A_TIME)]
    await asyncio.sleep(0.001)
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    another = asyncio.create_task(threads.run(lambda: "done"))

    done, _ = await asyncio.wait([another], timeout=0.01)

    assert not done
    may_end.set()
    assert await another == "done"


async def asked(episode: Episode, endpoint: Endpoint, **body: Any) -> None:
    assert await episode.answer(Asked(endpoint, json.dumps(body).encode()), stays)


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        (Endpoint.CHAT, {"messages": [user("x" * 200_000)]}, "200000 characters, and 4000 tokens.*have 4000 at most"),
        (Endpoint.CHAT, {"messages": [user("x" * 2500)] * 2}, "5000 characters, and 4000 tokens"),
        (Endpoint.TEXT, {"prompt": "x" * 4001}, "4001 characters, and 4000 tokens"),
        (Endpoint.TEXT, {"prompt": [1] * 4000}, "4000 tokens, and the engine's context holds 4000"),
        (Endpoint.RESPONSES, {"input": "x" * 4001}, "4001 characters"),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_rendered(
    endpoint: Endpoint, body: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = await slow_world()
    rendered: list[object] = []
    monkeypatch.setattr(world.tokenizer, "apply_chat_template", lambda *each, **_: rendered.append(each))
    monkeypatch.setattr(world.tokenizer, "decode", lambda *each, **_: rendered.append(each))

    with pytest.raises(ContextTooLong, match=words):
        await asked(a_lone_episode(world), endpoint, **body)

    assert (rendered, world.tokenizer.tokenised) == ([], [])


async def test_what_the_template_leaves_out_of_earlier_replies_does_not_count() -> None:
    world = World(tokenizer=CharacterTokenizer(hides_thoughts=True))
    await world.engine.start()
    thought = {"role": "assistant", "content": f"({'x' * 5000})no"}

    reply = await ask(a_lone_episode(world), user("a?"), thought, user("b?"))

    assert reply["content"] == "yes"


async def test_what_the_rendered_text_adds_is_bounded_before_it_is_tokenised() -> None:
    world = World()
    await world.engine.start()
    said = {"role": "assistant", "content": "x" * 5000}

    with pytest.raises(ContextTooLong, match="characters, and 4000 tokens"):
        await ask(a_lone_episode(world), user("a?"), said, user("b?"))

    assert world.tokenizer.tokenised == []
