"""Groups that are held open: handed out, finished, abandoned, lost; every episode and every group is accounted for."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from flotilla.services.rollout.agents.episode import EpisodeGone
from flotilla.services.rollout.agents.episodes import NoTask
from flotilla.services.rollout.engines.base import Completion, GenerationRequest
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.episode import EpisodeReward
from flotilla.shared.schemas.routing import Ids, RoutedExperts
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.mailbox import Delivery
from tests.unit.rollout.agents.world import World, a_spec, ask, user

REWARD = EpisodeReward(reward=0.5)


async def forwarded(world: World) -> list[Group]:
    hop = world.plane.hop(HopName.GENERATED, "reward")
    return [claim.group() for claim in await hop.claim(100, wait_seconds=0)]


async def finish(world: World, reward: EpisodeReward | None = REWARD) -> str:
    episode = await world.begin()
    await ask(episode, user("a?"))
    await world.episodes.complete(episode.id, reward)
    return episode.id


async def test_episodes_of_one_task_make_its_group() -> None:
    async with World(a_spec(group_size=3)).running() as world:
        await world.issue(2)
        names = [await finish(world) for _ in range(3)]
        await world.until(lambda ledger: ledger.waiting.generated == 1)

        (group,) = await forwarded(world)

    assert [each.episode for each in group.trajectories] == names
    assert group.prompt == "<user>What is 0 plus 1?\x03\n<assistant>"


async def test_without_a_task_an_agent_is_told_to_ask_again() -> None:
    async with World().running() as world:
        with pytest.raises(NoTask):
            await world.episodes.open(0.0)
        waiting = asyncio.create_task(world.episodes.open(5.0))
        await world.issue()

        assert (await waiting).task.label == "1"


async def test_branches_are_trajectories_of_one_episode() -> None:
    async with World(a_spec(group_size=1)).running() as world:
        await world.issue()
        episode = await world.begin()
        await ask(episode, user("a?"))
        await ask(episode, user("b?"))
        ended = await world.episodes.complete(episode.id, REWARD)
        await world.until(lambda ledger: ledger.waiting.generated == 1)

        (group,) = await forwarded(world)

    assert (ended.num_turns, ended.num_trajectories) == (2, 2)
    assert {each.episode for each in group.trajectories} == {episode.id}


async def test_ending_an_episode_again_is_answered_as_the_first_time() -> None:
    async with World().running() as world:
        await world.issue()
        name = await finish(world)

        again = await world.episodes.complete(name, REWARD)

        assert again.has_reward
        assert world.episodes.counts.opened == 1
        with pytest.raises(EpisodeGone):
            await world.episodes.complete("rollout-1.0-0-unknown", REWARD)


async def test_an_episode_without_a_reply_cannot_be_completed() -> None:
    async with World().running() as world:
        await world.issue()
        episode = await world.begin()

        with pytest.raises(InvalidRequest, match="nothing was sampled"):
            await world.episodes.complete(episode.id, REWARD)


async def test_episodes_of_claimed_tasks_that_wait_for_an_agent_are_counted() -> None:
    async with World(a_spec(group_size=2)).running() as world:
        await world.issue()
        seen = []
        for _ in range(2):
            await world.begin()
            seen.append(world.episodes.to_load()["episodes_waiting"])

        assert seen == [1, 0]


async def test_a_silent_agents_episode_is_handed_out_again() -> None:
    async with World(a_spec(group_size=1, lease_seconds=0.1)).running() as world:
        await world.issue()
        silent = await world.begin()
        await ask(silent, user("a?"))
        world.seconds += 1

        other = await world.begin()

        assert other.id != silent.id
        with pytest.raises(EpisodeGone, match="abandoned"):
            await ask(silent, user("b?"))
        with pytest.raises(EpisodeGone):
            await world.episodes.complete(silent.id, REWARD)
        counts = world.episodes.counts.to_load()
        assert (counts["episodes_opened"], counts["episodes_abandoned"], counts["episodes_open"]) == (2, 1, 1)


async def test_an_agent_that_waits_for_a_reply_is_not_silent() -> None:
    async with World(a_spec(group_size=1, lease_seconds=0.05)).running() as world:
        await world.issue()
        episode = await world.begin()
        world.engine.pause()
        waiting = asyncio.create_task(ask(episode, user("a?")))
        await asyncio.sleep(0.01)
        world.seconds += 10
        await asyncio.sleep(0.05)
        world.engine.resume()

        assert (await waiting)["content"] == "yes"


async def test_a_group_goes_on_without_an_episode_that_is_abandoned_too_often() -> None:
    async with World(a_spec(group_size=2, lease_seconds=0.1, max_attempts=2)).running() as world:
        await world.issue()
        done = await finish(world)
        for _ in range(2):
            await world.begin()
            world.seconds += 1
        await world.until(lambda ledger: ledger.waiting.generated == 1)

        (group,) = await forwarded(world)

    assert [each.episode for each in group.trajectories] == [done]


async def test_a_task_that_no_agent_finishes_fails_with_a_reason() -> None:
    async with World(a_spec(group_size=1, lease_seconds=0.1, max_attempts=1)).running() as world:
        await world.issue()
        await world.begin()
        world.seconds += 1

        ledger = await world.until(lambda ledger: bool(ledger.failed))

    assert ledger.failed == {"episodes_abandoned": 1}


async def test_a_group_that_takes_too_long_goes_on_with_what_it_has() -> None:
    async with World(a_spec(group_size=3, lease_seconds=1000, group_seconds=100)).running() as world:
        await world.issue()
        await finish(world)
        slow = await world.begin()
        world.seconds += 101
        other = world.episodes._offers[0]
        other.changed.set()

        await world.until(lambda ledger: ledger.waiting.generated == 1)

        with pytest.raises(EpisodeGone):
            await ask(slow, user("a?"))


async def test_a_rollout_that_leaves_hands_finished_episodes_over() -> None:
    async with World(a_spec(group_size=2)).running() as world:
        await world.issue()
        done = await finish(world)
        lost = await world.begin()

        await world.consumer.interrupt()
        await world.until(lambda ledger: ledger.waiting.tasks == 1)
        with pytest.raises(EpisodeGone):
            await ask(lost, user("a?"))
        world.consumer.resume()
        last = await finish(world)
        await world.until(lambda ledger: ledger.waiting.generated == 1)

        (group,) = await forwarded(world)

    assert [each.episode for each in group.trajectories] == [done, last]


async def test_a_dead_engine_ends_the_episodes_and_gives_the_task_back() -> None:
    async with World().running() as world:
        await world.issue()
        episode = await world.begin()
        world.consumer.pause()
        world.engine.die()

        with pytest.raises(Exception, match="begin another one"):
            await ask(episode, user("a?"))
        await world.until(lambda ledger: ledger.waiting.tasks == 1)

    assert world.episodes.counts.to_load()["episodes_lost"] == 1


async def test_rewards_are_left_where_they_are_looked_for() -> None:
    async with World(a_spec(group_size=2, window_seconds=60)).running() as world:
        await world.issue()
        at_once, later = await finish(world), await finish(world, None)
        mailbox = world.plane.mailbox

        found = await mailbox.find(at_once)
        assert found is not None and found.answer is not None
        assert EpisodeReward.model_validate_json(found.answer) == REWARD
        assert await mailbox.deliver(later, b'{"reward": 1}') is Delivery.TAKEN


async def test_a_reward_that_nothing_uses_is_refused() -> None:
    spec = a_spec()
    unused = spec.model_copy(update={"reward": spec.reward.model_copy(update={"components": ()})})
    async with World(unused).running() as world:
        await world.issue()
        episode = await world.begin()
        await ask(episode, user("a?"))

        with pytest.raises(InvalidRequest, match="kind agent"):
            await world.episodes.complete(episode.id, REWARD)


async def test_a_call_that_is_made_again_by_its_key_gets_the_episode_that_it_began() -> None:
    async with World(a_spec(group_size=3)).running() as world:
        await world.issue()
        first = await world.episodes.open(1.0, "call-1")

        assert await world.episodes.open(1.0, "call-1") == first
        assert await world.episodes.open(0.0, "call-1", only_known=True) == first
        with pytest.raises(NoTask, match="by this key"):
            await world.episodes.open(1.0, "call-2", only_known=True)
        assert (await world.episodes.open(1.0, "call-2")).episode_id != first.episode_id

        await ask(world.episodes.find(first.episode_id), user("a?"))
        await world.episodes.complete(first.episode_id, REWARD)
        third = await world.episodes.open(1.0, "call-1")
        assert third.episode_id != first.episode_id, "an episode that has ended is handed out to nobody"


async def test_two_calls_of_one_key_that_wait_begin_one_episode() -> None:
    async with World(a_spec(group_size=2)).running() as world:
        waiting = [asyncio.create_task(world.episodes.open(5.0, "call-1")) for _ in range(2)]
        await asyncio.sleep(0)
        await world.issue()

        first, second = [(await each).episode_id for each in waiting]

    assert first == second


async def test_records_of_experts_are_cut_and_laid_out_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers, read = set[int](), RoutedExperts.ids

    def watched(experts: RoutedExperts) -> Ids:
        readers.add(threading.get_ident())
        return read(experts)

    def record(num_tokens: int) -> RoutedExperts:
        return RoutedExperts.of(np.arange(num_tokens).reshape(-1, 1, 1) % 7, 7)

    monkeypatch.setattr(RoutedExperts, "ids", watched)
    async with World(a_spec(group_size=1)).running() as world:
        generate = world.engine.generate

        async def routed(request: GenerationRequest) -> tuple[Completion, ...]:
            (found,) = await generate(request)
            return (replace(found, experts=record(len(request.prompt_ids) + len(found.token_ids) - 1)),)

        monkeypatch.setattr(world.engine, "generate", routed)
        await world.issue()
        episode, chat = await world.begin(), [user("a?")]
        for question in ("b?", "c?"):
            chat += [await ask(episode, *chat), user(question)]
        await ask(episode, *chat)
        await world.episodes.complete(episode.id, REWARD)
        await world.until(lambda ledger: ledger.waiting.generated == 1)
        ((trajectory,),) = [group.trajectories for group in await forwarded(world)]

    assert readers and threading.get_ident() not in readers
    assert trajectory.experts is not None and len(trajectory.turns) == 3
    expected = record(len(trajectory.token_ids) - 1)
    assert read(trajectory.experts).tolist() == read(expected).tolist()


async def test_what_is_said_while_an_episode_is_ended_is_not_in_what_is_made_of_it() -> None:
    async with World(a_spec(group_size=1)).running() as world:
        await world.issue()
        episode = await world.begin()
        chat = [user("a?"), await ask(episode, user("a?")), user("b?")]
        build = episode._conversations.building(episode=episode.id)
        await ask(episode, *chat)

        (before,), (after,) = build(), await episode.trajectories()

    assert len(before.turns) == 1 and len(after.turns) == 2
    assert before.token_ids.tolist() == after.token_ids[: len(before.token_ids)].tolist()


DEAD, OTHER = "a-holder-that-ended", "a-holder-that-lives"


async def test_what_a_dead_agent_held_is_handed_out_at_once_and_it_is_refused_from_then_on() -> None:
    async with World(a_spec(group_size=3, lease_seconds=3600.0)).running() as world:
        await world.issue()
        held = [await world.episodes.open(1.0, f"call-{number}", holder=DEAD) for number in range(2)]
        others = await world.episodes.open(1.0, holder=OTHER)
        await ask(world.episodes.find(held[0].episode_id), user("a?"))
        successor = asyncio.create_task(world.episodes.open(5.0, holder=OTHER))

        given = await world.episodes.give_back(DEAD)

        assert sorted(given) == sorted(each.episode_id for each in held)
        taken = await successor
        assert taken.task.group_id == held[0].task.group_id
        with pytest.raises(EpisodeGone, match="was given back, since who had begun it has ended"):
            world.episodes.find(held[0].episode_id)
        with pytest.raises(EpisodeGone, match="was given back"):
            await world.episodes.complete(held[0].episode_id, REWARD)
        with pytest.raises(EpisodeGone, match="this holder"):
            await world.episodes.open(1.0, "call-0", holder=DEAD)
        assert await world.episodes.give_back(DEAD) == []
        for opened in (taken, others, await world.episodes.open(1.0, holder=OTHER)):
            await ask(world.episodes.find(opened.episode_id), user("a?"))
            await world.episodes.complete(opened.episode_id, REWARD)
        await world.until(lambda ledger: ledger.waiting.generated == 1)
        (group,) = await forwarded(world)

    assert len({each.episode for each in group.trajectories}) == 3
    assert not {each.episode_id for each in held} & {each.episode for each in group.trajectories}


async def test_an_agent_that_dies_while_its_call_waits_gets_no_episode() -> None:
    async with World().running() as world:
        waiting = asyncio.create_task(world.episodes.open(5.0, holder=DEAD))
        await asyncio.sleep(0.01)
        await world.episodes.give_back(DEAD)
        await world.issue()

        with pytest.raises(EpisodeGone, match="gets no other one"):
            await waiting
        assert world.episodes.counts.opened == 0


async def test_a_death_in_the_middle_of_an_end_leaves_what_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with World(a_spec(group_size=1)).running() as world:
        await world.issue()
        opened = await world.episodes.open(1.0, holder=DEAD)
        episode = world.episodes.find(opened.episode_id)
        await ask(episode, user("a?"))
        going_on = asyncio.Event()
        trajectories = episode.trajectories

        async def slowly() -> object:
            await going_on.wait()
            return await trajectories()

        monkeypatch.setattr(episode, "trajectories", slowly)
        ending = asyncio.create_task(world.episodes.complete(opened.episode_id, REWARD))
        await asyncio.sleep(0.01)
        given = await world.episodes.give_back(DEAD)
        going_on.set()

        assert (given, (await ending).has_reward) == ([], True)
        await world.until(lambda ledger: ledger.waiting.generated == 1)


async def test_deaths_of_agents_cost_an_episode_no_attempt_until_they_are_too_many() -> None:
    async with World(a_spec(group_size=1, max_attempts=2)).running() as world:
        await world.issue()
        for number in range(3):
            await world.episodes.open(1.0, holder=f"{DEAD}-{number}")
            await world.episodes.give_back(f"{DEAD}-{number}")
        assert world.episodes.to_load()["episodes_waiting"] == 1.0
        await world.episodes.open(1.0, holder=f"{DEAD}-last")
        await world.episodes.give_back(f"{DEAD}-last")

        await world.until(lambda ledger: ledger.dropped == 1 or not world.episodes.to_load()["episodes_waiting"])
        assert world.episodes.counts.opened == 4
