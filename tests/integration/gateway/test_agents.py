"""Agents from outside, with the real OpenAI client, against a gateway and rollouts behind sockets."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from services.rollout.engines.scripted import log_prob_of
from shared.schemas.trajectory import Trajectory
from shared.testing.characters import END
from tests.agent_fleet import EXPERIMENT, TOKEN, AgentFleet, agent_fleet, begin
from tests.unit.rollout.agents.world import a_spec

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def writes(prompt: str) -> str:
    if "<tools>" in prompt:
        return "It is 2.~" if "<tool>" in prompt else f"{CALL}~"
    return f"reply {prompt.count('<assistant>')}~"


@pytest.fixture
async def fleet() -> AsyncIterator[AgentFleet]:
    async with agent_fleet(a_spec(group_size=2, window_seconds=60), writes) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield client


async def complete(fleet: AgentFleet, http: httpx.AsyncClient, episode: dict[str, Any], **body: Any) -> httpx.Response:
    url = f"{fleet.url}/v1/episodes/{episode['episode_id']}/complete"
    return await http.post(url, json=body, headers={"Authorization": f"Bearer {episode['key']}"})


def text_of(trajectory: Trajectory, *, sampled: bool) -> str:
    chosen = trajectory.token_ids[trajectory.loss_mask.astype(bool)] if sampled else trajectory.token_ids
    return "".join(map(chr, chosen)).replace(chr(END), "~")


def talk(episode: dict[str, Any]) -> list[str]:
    """Two turns with the synchronous client, the second one streamed."""
    with OpenAI(base_url=episode["base_url"], api_key=episode["key"]) as client:
        assert [model.id for model in client.models.list()] == [episode["model"]]
        chat: list[Any] = list(episode["task"]["messages"])
        first = client.chat.completions.create(model=episode["model"], messages=chat, logprobs=True)
        content = first.choices[0].message.content or ""
        assert first.choices[0].logprobs is not None
        assert (first.choices[0].logprobs.content or [])[0].logprob == pytest.approx(log_prob_of(ord(content[0])))
        chat += [{"role": "assistant", "content": content}, {"role": "user", "content": "more?"}]
        stream = client.chat.completions.create(
            model="any", messages=chat, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len("reply 2~")
        return [content, "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)]


async def use_tools(episode: dict[str, Any]) -> str | None:
    """Call a tool with the asynchronous client."""
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"]) as client:
        chat: list[Any] = [{"role": "user", "content": "1 + 1?"}]
        reply = (await client.chat.completions.create(model="m", messages=chat, tools=[TOOL])).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.tool_calls
        (call,) = reply.message.tool_calls
        chat += [reply.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        stream = await client.chat.completions.create(model="m", messages=chat, tools=[TOOL], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_the_openai_client_drives_a_group_whose_tokens_are_the_engines(
    fleet: AgentFleet, http: httpx.AsyncClient
) -> None:
    await fleet.issue(1)
    one, two = await begin(fleet, http), await begin(fleet, http)

    replies, last = await asyncio.gather(asyncio.to_thread(talk, one), use_tools(two))
    ended = [await complete(fleet, http, one, reward=1.0), await complete(fleet, http, two)]
    await fleet.until(lambda ledger: ledger.waiting.generated == 1)

    assert (replies, last) == (["reply 1", "reply 2"], "It is 2.")
    assert [answer.json()["num_turns"] for answer in ended] == [2, 2]
    (group,) = await fleet.groups()
    assert [each.episode for each in group.trajectories] == [one["episode_id"], two["episode_id"]]
    assert text_of(group.trajectories[0], sampled=True) == "reply 1~reply 2~"
    assert text_of(group.trajectories[1], sampled=True) == f"{CALL}~It is 2.~"
    assert one["task"] | {"index": 1} == two["task"] | {"index": 1}


async def test_a_reward_may_come_later_and_once(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    await fleet.issue(1)
    episode = await begin(fleet, http)
    await asyncio.to_thread(talk, episode)
    await complete(fleet, http, episode)
    url = f"{fleet.url}/v1/episodes/{episode['episode_id']}/reward"

    async def reward(value: float, key: str = episode["key"], name: str = url) -> int:
        answer = await http.post(name, json={"reward": value}, headers={"Authorization": f"Bearer {key}"})
        return answer.status_code

    other = await begin(fleet, http)
    assert await reward(0.5, key=other["key"]) == 403
    assert [await reward(0.5), await reward(0.5, TOKEN), await reward(0.7)] == [204, 204, 409]
    assert await reward(0.5, other["key"], f"{fleet.url}/v1/episodes/{other['episode_id']}/reward") == 410


async def test_keys_open_their_own_episode_and_nothing_else(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    await fleet.issue(1)
    one, two = await begin(fleet, http), await begin(fleet, http)

    async def status(key: str, path: str, method: str = "POST") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return (await http.request(method, f"{fleet.url}{path}", headers=headers, json={})).status_code

    assert await status(one["key"], f"/v1/episodes/{two['episode_id']}/complete") == 403
    assert await status(one["key"], f"/v1/experiments/{EXPERIMENT}/episodes") == 403
    assert await status(one["key"], f"/v1/experiments/{EXPERIMENT}", "GET") == 403
    assert await status("flp_forged", "/v1/chat/completions") == 401
    assert await status(TOKEN, "/v1/chat/completions") == 422
    assert await status(TOKEN, "/v1/episodes/x.gone-1.y/complete") == 404


async def test_errors_are_those_that_the_client_knows(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    await fleet.issue(1)
    episode = await begin(fleet, http)
    client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0)
    chat: list[Any] = [{"role": "user", "content": "?"}]

    async with client:
        with pytest.raises(openai.UnprocessableEntityError, match=r"not the spec's 0\.9"):
            await client.chat.completions.create(model="m", messages=chat, temperature=0.1)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 5000}])
        assert refused.value.code == "context_length_exceeded"
        fleet.rollouts[0].engine.pause()
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=chat))
        while not fleet.rollouts[0].engine.request_ids:
            await asyncio.sleep(0.01)
        await fleet.rollouts[0].consumer.interrupt()
        with pytest.raises(openai.APIStatusError) as gone:
            await asking
        assert (gone.value.status_code, gone.value.code) == (410, "episode_gone")


async def test_a_client_that_hangs_up_leaves_no_turn_behind(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    await fleet.issue(1)
    episode = await begin(fleet, http)
    engine = fleet.rollouts[0].engine
    engine.pause()
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0, timeout=0.2) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    engine.resume()

    ended = await complete(fleet, http, episode, reward=1.0)

    assert (ended.status_code, ended.json()["code"]) == (422, "invalid_request")


async def test_an_ended_experiment_says_so(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    url = f"{fleet.url}/v1/experiments/{EXPERIMENT}/episodes"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    none = await http.post(url, json={"wait_seconds": 0.1}, headers=headers)
    await fleet.gateway.commands.fail(fleet.gateway.repository.get(EXPERIMENT), "test", "a cause")
    over = await http.post(url, json={}, headers=headers)

    assert (none.status_code, none.json()["code"]) == (503, "no_task")
    assert over.status_code == 409


async def one_agent(fleet: AgentFleet, http: httpx.AsyncClient, dice: random.Random, ends: Counter[str]) -> None:
    """Work on one episode, and die at a random point of it."""
    fate = dice.choice(["before", "turn", "silent", "done", "done"])
    try:
        episode = await begin(fleet, http, 20)
    except AssertionError:
        ends["no episode"] += 1
        return
    ends[fate] += 1
    if fate == "before":
        return
    headers = {"Authorization": f"Bearer {episode['key']}"}
    chat = [{"role": "user", "content": "?"}]
    for _ in range(dice.randint(1, 3)):
        asking = asyncio.create_task(
            http.post(f"{fleet.url}/v1/chat/completions", json={"messages": chat}, headers=headers)
        )
        if fate == "turn":
            await asyncio.sleep(dice.random() * 0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return
        answer = await asking
        if answer.status_code != 200:
            ends["told it was gone"] += 1
            return
        chat += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more?"}]
    if fate == "done":
        ends[f"complete {(await complete(fleet, http, episode, reward=0.5)).status_code}"] += 1


@pytest.mark.parametrize("num_agents", [40, pytest.param(200, marks=pytest.mark.long)])
async def test_agents_that_die_anywhere_leave_every_episode_and_every_group_accounted_for(num_agents: int) -> None:
    spec = a_spec(group_size=4, lease_seconds=1.0, max_attempts=50, max_new_tokens=16)
    dice = random.Random(num_agents)
    ends: Counter[str] = Counter()
    async with (
        agent_fleet(spec, writes, num_rollouts=2, max_groups=4, token_seconds=0.002) as fleet,
        httpx.AsyncClient(
            trust_env=False, timeout=60, limits=httpx.Limits(max_connections=64, keepalive_expiry=2)
        ) as http,
    ):
        await fleet.issue(num_agents // 8)
        at_once = asyncio.Semaphore(32)

        async def agent() -> None:
            async with at_once:
                await one_agent(fleet, http, dice, ends)

        async with asyncio.timeout(120):
            await asyncio.gather(*(agent() for _ in range(num_agents)))
            # Those that live finish what is left.
            while (await fleet.plane.ledger()).waiting.generated < num_agents // 8:
                await asyncio.gather(*(one_agent(fleet, http, random.Random(0), ends) for _ in range(4)))
        ledger = await fleet.until(lambda ledger: ledger.waiting.generated == num_agents // 8)
        groups, counts = await fleet.groups(), fleet.counts()

    assert ledger.issued == ledger.waiting.generated == num_agents // 8
    completed = ends["complete 200"]
    assert completed == counts["episodes_completed"] == 4 * len(groups)
    assert counts["episodes_opened"] == sum(
        counts[f"episodes_{end}"] for end in ("open", "completed", "abandoned", "lost")
    )
    names = [each.episode for group in groups for each in group.trajectories]
    assert len(set(names)) == completed, "each completed episode is in one group, once"
    assert ends["before"] and ends["turn"] and ends["silent"]
