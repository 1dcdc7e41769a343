"""Agents from outside, with the real OpenAI client, against a gateway and rollouts behind sockets."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, Omit, OpenAI, omit
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from flotilla.services.gateway.datasets.dataset import Dataset
from flotilla.services.gateway.episodes.episodes import EpisodeName
from flotilla.services.gateway.evaluation.evaluator import Evaluator
from flotilla.services.reward.grading import grading_samples
from flotilla.services.reward.verifiers.given import AgentVerifier
from flotilla.services.rollout.engines.scripted import log_prob_of
from flotilla.shared.errors import DeadlineExceeded
from flotilla.shared.net.authorisation.token_records import Quota
from flotilla.shared.schemas.service import ObservedState, ServiceKind, WorkState
from flotilla.shared.schemas.task import Lane
from flotilla.shared.schemas.trajectory import GradeStatus, Trajectory
from flotilla.shared.streams.hop import HopName
from flotilla.shared.streams.plane import DataPlane
from flotilla.shared.testing.characters import END
from tests.agent_fleet import EXPERIMENT, TOKEN, AgentFleet, agent_fleet, begin
from tests.unit.gateway.builders import a_registration, say
from tests.unit.rollout.agents.world import a_spec

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PATIENCE_SECONDS = 3.0
"""For an episode that somebody has left: some leases of a second. Who finds none then leaves."""
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


def talk(episode: dict[str, Any], temperature: float | Omit = omit) -> list[str]:
    """Two turns with the synchronous client, the second one streamed."""
    with OpenAI(base_url=episode["base_url"], api_key=episode["key"]) as client:
        assert [model.id for model in client.models.list()] == [episode["model"]]
        chat: list[Any] = list(episode["task"]["messages"])
        first = client.chat.completions.create(
            model=episode["model"], messages=chat, logprobs=True, temperature=temperature
        )
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


def respond(episode: dict[str, Any]) -> list[str]:
    """Three turns of the responses API, by items, by the id of the one before, and streamed."""
    with OpenAI(base_url=episode["base_url"], api_key=episode["key"]) as client:
        ask = partial(client.responses.create, model="m", instructions="Be brief.")
        first = ask(input="1?", include=["message.output_text.logprobs"])
        assert first.usage is not None and first.usage.output_tokens == len("reply 1~")
        (message,) = first.output
        assert isinstance(message, ResponseOutputMessage) and isinstance(message.content[0], ResponseOutputText)
        assert (message.content[0].logprobs or [])[0].logprob == pytest.approx(log_prob_of(ord("r")))
        # What was said before, as items: the client's own objects, sent back.
        items: Any = [{"role": "user", "content": "1?"}, *first.output, {"role": "user", "content": "2?"}]
        second = ask(input=items)
        third = ask(input="3?", previous_response_id=second.id, stream=True)
        events = list(third)
        assert [each.type for each in events[:2]] == ["response.created", "response.in_progress"]
        assert [each.sequence_number for each in events] == list(range(len(events)))
        deltas = "".join(each.delta for each in events if each.type == "response.output_text.delta")
        last = events[-1]
        assert last.type == "response.completed" and last.response.output_text == deltas
        return [first.output_text, second.output_text, deltas]


async def respond_with_tools(episode: dict[str, Any]) -> str:
    """Call a function by the responses API, the second turn by the id of the first."""
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"]) as client:
        tool: Any = {"type": "function", **TOOL["function"], "strict": False}
        first = await client.responses.create(model="m", input="1 + 1?", tools=[tool])
        (call,) = first.output
        assert isinstance(call, ResponseFunctionToolCall) and (call.name, call.arguments) == ("add", '{"a": 1}')
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        last = await client.responses.create(model="m", input=result, tools=[tool], previous_response_id=first.id)
        return last.output_text


async def test_the_responses_api_is_recorded_as_chats_are(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    await fleet.issue(1)
    one, two = await begin(fleet, http), await begin(fleet, http)

    replies, last = await asyncio.gather(asyncio.to_thread(respond, one), respond_with_tools(two))
    ended = [await complete(fleet, http, each, reward=1.0) for each in (one, two)]
    await fleet.until(lambda ledger: ledger.waiting.generated == 1)

    assert (replies, last) == (["reply 1", "reply 2", "reply 3"], "It is 2.")
    assert [(each.json()["num_turns"], each.json()["num_trajectories"]) for each in ended] == [(3, 1), (2, 1)]
    (group,) = await fleet.groups()
    assert text_of(group.trajectories[0], sampled=True) == "reply 1~reply 2~reply 3~"
    assert text_of(group.trajectories[0], sampled=False).startswith("<system>Be brief.~")
    assert text_of(group.trajectories[1], sampled=True) == f"{CALL}~It is 2.~"


class Messages:
    """Speaks the wire of Anthropic's messages, as its clients do."""

    def __init__(self, fleet: AgentFleet, http: httpx.AsyncClient, key: str, *, is_bearer: bool = False) -> None:
        credentials = {"authorization": f"Bearer {key}"} if is_bearer else {"x-api-key": key}
        self._headers = credentials | {"anthropic-version": "2023-06-01"}
        self._http, self._url = http, f"{fleet.url}/v1/messages"

    async def post(self, *messages: Any, path: str = "", **fields: Any) -> httpx.Response:
        body = {"model": "claude", "max_tokens": 99, "messages": messages} | fields
        return await self._http.post(self._url + path, json=body, headers=self._headers, params={"beta": "true"})

    async def streamed(self, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
        answer = await self.post(*messages, stream=True, **fields)
        assert (answer.status_code, answer.headers["content-type"][:17]) == (200, "text/event-stream")
        events = []
        for each in filter(None, answer.text.split("\n\n")):
            name, data = each.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


ADD: Any = {"name": "add", "input_schema": {"type": "object"}}


async def test_the_messages_api_is_recorded_as_chats_are(fleet: AgentFleet, http: httpx.AsyncClient) -> None:
    await fleet.issue(1)
    one, two = await begin(fleet, http), await begin(fleet, http)
    chat: list[Any] = [{"role": "user", "content": "1?"}]
    talking, calling = Messages(fleet, http, one["key"]), Messages(fleet, http, two["key"], is_bearer=True)

    first = (await talking.post(*chat, system="Be brief.")).json()
    chat += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "2?"}]
    counted = await talking.post(*chat, system="Be brief.", path="/count_tokens")
    events = await talking.streamed(*chat, system="Be brief.")
    ask: list[Any] = [{"role": "user", "content": "1 + 1?"}]
    begun = await calling.streamed(*ask, tools=[ADD])
    call = next(each["content_block"] for each in begun if each["type"] == "content_block_start")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "2"}
    said = {"role": "assistant", "content": [call | {"input": {"a": 1}}]}
    last = (await calling.post(*ask, said, {"role": "user", "content": [result]}, tools=[ADD])).json()
    ended = [await complete(fleet, http, each, reward=1.0) for each in (one, two)]
    await fleet.until(lambda ledger: ledger.waiting.generated == 1)

    assert (first["content"], first["stop_reason"]) == ([{"type": "text", "text": "reply 1"}], "end_turn")
    kinds = ["message_start", "content_block_start", "content_block_delta", "content_block_stop"]
    assert [each["type"] for each in events] == [*kinds, "message_delta", "message_stop"]
    assert events[2]["delta"] == {"type": "text_delta", "text": "reply 2"}
    assert events[4]["usage"]["input_tokens"] == counted.json()["input_tokens"]
    assert "".join(each["delta"].get("partial_json", "") for each in begun if "delta" in each) == '{"a": 1}'
    assert begun[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["content"] == [{"type": "text", "text": "It is 2."}]
    assert [(each.json()["num_turns"], each.json()["num_trajectories"]) for each in ended] == [(2, 1), (2, 1)]
    (group,) = await fleet.groups()
    sampled = [text_of(each, sampled=True) for each in group.trajectories]
    assert sampled == ["reply 1~reply 2~", f"{CALL}~It is 2.~"]


async def test_errors_of_the_messages_api_are_those_that_its_clients_know(
    fleet: AgentFleet, http: httpx.AsyncClient
) -> None:
    await fleet.issue(1)
    episode = await begin(fleet, http)
    client, forged = Messages(fleet, http, episode["key"]), Messages(fleet, http, "flp_forged")
    chat: Any = {"role": "user", "content": "?"}

    refused = [
        await client.post(chat, temperature=0.1),
        await client.post({"role": "user", "content": "x" * 5000}),
        await client.post({"role": "user", "content": "x" * 9_000_000}),
        await Messages(fleet, http, TOKEN).post(chat),
        await forged.post(chat),
        await forged.post(chat, path="/count_tokens"),
    ]
    told = [(each.status_code, each.json()["type"], each.json()["error"]["type"]) for each in refused]
    assert told == [
        (422, "error", "invalid_request_error"),
        (400, "error", "invalid_request_error"),
        (413, "error", "request_too_large"),
        (422, "error", "invalid_request_error"),
        (401, "error", "authentication_error"),
        (401, "error", "authentication_error"),
    ]
    assert "not the spec's 0.9" in refused[0].json()["error"]["message"]
    (event,) = await client.streamed(chat, temperature=0.1)
    assert (event["type"], event["error"]["type"]) == ("error", "invalid_request_error")
    elsewhere = await http.get(f"{fleet.url}/v1/models", headers={"x-api-key": episode["key"]})
    assert elsewhere.status_code == 401, "the header is read on its own routes alone"
    await complete(fleet, http, episode)
    await fleet.rollouts[0].consumer.interrupt()
    gone = await client.post(chat)
    assert (gone.status_code, gone.json()["code"], gone.json()["type"]) == (410, "episode_gone", "error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_messages_client_that_hangs_up_leaves_no_turn_behind(
    fleet: AgentFleet, http: httpx.AsyncClient, *, stream: bool
) -> None:
    await fleet.issue(1)
    episode = await begin(fleet, http)
    engine = fleet.rollouts[0].engine
    engine.pause()
    client = Messages(fleet, http, episode["key"])
    asking = asyncio.create_task(client.post({"role": "user", "content": "?"}, stream=stream))
    while not engine.request_ids:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    engine.resume()

    ended = await complete(fleet, http, episode, reward=1.0)

    assert (ended.status_code, ended.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": "?", "temperature": 0.1}, r"not the spec's 0\.9"),
        ({"input": "?", "previous_response_id": "resp_x"}, "no stored response of this episode"),
        ({"input": "?", "tools": [{"type": "web_search"}]}, "must be a function"),
        ({"input": "?", "text": {"format": {"type": "json_object"}}}, "not constrained"),
        ({"input": "?", "truncation": "auto"}, "truncation must be disabled"),
        ({"input": "?", "background": True}, "background is not done"),
        ({"input": []}, "no message"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "is of type image_generation_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "must be text"),
        ({"input": [{"role": "user", "content": "?"}] * 5000}, "fewer than 4096"),
        ({"input": 3}, "input"),
    ],
)
async def test_what_of_the_responses_api_is_not_done_is_refused(
    fleet: AgentFleet, http: httpx.AsyncClient, fields: dict[str, Any], words: str
) -> None:
    await fleet.issue(1)
    episode = await begin(fleet, http)
    async with AsyncOpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=0) as client:
        with pytest.raises(openai.UnprocessableEntityError, match=words):
            await client.responses.create(model="m", **fields)


async def test_the_agents_answer_held_out_tasks_and_their_accuracy_is_recorded() -> None:
    evaluation = {"path": "/nowhere/heldout.jsonl", "temperature": 0.5, "greedy": False}
    spec = a_spec(group_size=2, window_seconds=60, evaluation=evaluation, lease_seconds=5.0)
    async with agent_fleet(spec, writes) as fleet, httpx.AsyncClient(trust_env=False, timeout=30) as http:
        gateway = fleet.gateway
        experiment = gateway.repository.get(EXPERIMENT)
        dataset = Dataset([{"prompt": f"p{n}", "label": str(n)} for n in range(3)], spec.data, 0)
        evaluator = Evaluator(experiment, dataset, gateway.repository, gateway.events, gateway.clock)
        await fleet.issue(1)
        evaluating = asyncio.create_task(evaluator.evaluate(0))
        plane = fleet.planes[Lane.EVALUATION]
        while (await plane.ledger()).claimed.tasks < 3:
            await asyncio.sleep(0.01)

        abandoned = await begin(fleet, http)
        episodes = []
        while len(episodes) < 3:
            episode = await begin(fleet, http)
            if episode["task"]["split"] == "train":
                continue  # every held-out task is with an agent; one of them is silent
            assert await asyncio.to_thread(talk, episode, spec.rollout.sampling.temperature)
            # An agent that branches counts once.
            await asyncio.to_thread(talk, episode, 0.5)
            reward = float(episode["task"]["label"] != "2")
            assert (await complete(fleet, http, episode, reward=reward)).status_code == 200
            episodes.append(episode)
        await grade(fleet, plane)
        await evaluating

        assert abandoned["task"]["split"] == "evaluation"
        assert sorted(each["task"]["label"] for each in episodes) == ["0", "1", "2"]
        points = await gateway.store.metrics(EXPERIMENT, names=[], after=0, limit=99)
        found = {point.name: point.value for _, point in points}
        assert found["evaluation/accuracy"] == pytest.approx(2 / 3)
        assert found["evaluation/num_scored"] == 3
        ledger = await plane.ledger()
        assert (ledger.balanced, ledger.trained, ledger.outstanding) == (True, 3, 0)
        assert (await fleet.plane.ledger()).waiting.generated == 0, "nothing of it is trained"
        assert fleet.counts()["episodes_abandoned"] >= 1


async def grade(fleet: AgentFleet, plane: DataPlane) -> None:
    """Do what the reward service does in the evaluation lane: a reward is in the mailbox under its episode."""
    verifier, hop = AgentVerifier(fleet.plane.mailbox), plane.hop(HopName.GENERATED, "reward")
    num_graded = 0
    while num_graded < 3:
        for claim in await hop.claim(3, wait_seconds=1.0):
            group = claim.group()
            grades = await verifier.score(grading_samples(group))
            pairs = zip(group.trajectories, grades, strict=True)
            graded = [each.graded(GradeStatus.SCORED, grade.reward) for each, grade in pairs]
            await hop.forward(claim, replace(group, trajectories=tuple(graded)))
            num_graded += 1


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


@pytest.mark.parametrize("is_another_gateway", [False, True])
async def test_a_call_for_an_episode_that_is_repeated_with_its_key_begins_no_second_one(
    is_another_gateway: bool,
) -> None:
    async with (
        agent_fleet(a_spec(group_size=2), writes, num_rollouts=2, max_groups=4) as fleet,
        httpx.AsyncClient(trust_env=False, timeout=30) as http,
    ):
        await fleet.issue(4)
        url = f"{fleet.url}/v1/experiments/{EXPERIMENT}/episodes"

        async def call(key: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": key}
            answer = await http.post(url, json={"wait_seconds": 5}, headers=headers)
            assert answer.status_code == 201, answer.text
            found: dict[str, Any] = answer.json()
            return found

        first = [await call(f"call {number}") for number in range(3)]
        gateway = fleet.gateway
        if is_another_gateway:
            # It knows nothing of the calls of the one before.
            gateway.episodes._calls.clear()
        else:
            gateway.episodes._recalls_until = 0.0
        again = [await call(f"call {number}") for number in range(3)]
        await complete(fleet, http, first[0])
        other = await call("call 3")

        assert [each["episode_id"] for each in again] == [each["episode_id"] for each in first]
        assert [each["task"] for each in again] == [each["task"] for each in first]
        assert other["episode_id"] not in {each["episode_id"] for each in first}
        assert fleet.counts()["episodes_opened"] == 4


async def call_with(
    fleet: AgentFleet, http: httpx.AsyncClient, key: str, wait_seconds: float, **options: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": key}
    url = f"{fleet.url}/v1/experiments/{EXPERIMENT}/episodes"
    return await http.post(url, json={"wait_seconds": wait_seconds}, headers=headers, **options)


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_call_that_is_repeated_while_the_first_still_waits_begins_one_episode(
    http: httpx.AsyncClient, *, is_early: bool
) -> None:
    async with agent_fleet(a_spec(group_size=2), writes, num_rollouts=2, max_groups=4) as fleet:
        if not is_early:
            fleet.gateway.episodes._recalls_until = 0.0
        with pytest.raises(httpx.ReadTimeout):
            await call_with(fleet, http, "k", 20, timeout=0.5)
        repeated = asyncio.create_task(call_with(fleet, http, "k", 20))
        too_short = await call_with(fleet, http, "k", 0.1)
        await fleet.issue(8)

        answer = await repeated
        again = await call_with(fleet, http, "k", 0)

        assert (too_short.status_code, too_short.json()["code"]) == (503, "no_task")
        assert answer.status_code == 201, answer.text
        assert again.json()["episode_id"] == answer.json()["episode_id"]
        assert fleet.counts()["episodes_opened"] == 1
        assert not fleet.gateway.episodes._turns


async def test_the_gateway_begins_no_episode_for_an_agent_that_has_gone(
    fleet: AgentFleet, http: httpx.AsyncClient
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"{fleet.url}/v1/experiments/{EXPERIMENT}/episodes"
    with pytest.raises(httpx.ReadTimeout):
        await http.post(url, json={"wait_seconds": 20}, headers=headers, timeout=0.3)
    async with asyncio.timeout(5):
        while any(fleet.gateway.episodes._handed._beginning.values()):
            await asyncio.sleep(0.01)
        while fleet.rollouts[0].episodes._offered._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    await fleet.issue(1)

    await begin(fleet, http)

    assert fleet.counts()["episodes_opened"] == 1


async def test_a_repeated_call_begins_no_second_episode_while_the_rollout_that_has_it_is_silent(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent_fleet(a_spec(group_size=2), writes, num_rollouts=2, max_groups=4) as fleet:
        await fleet.issue(8)  # Each of them holds some.
        episodes, call = fleet.gateway.episodes, fleet.gateway.episodes.rollouts.call
        first = (await call_with(fleet, http, "k", 5)).json()
        holder = EpisodeName.parse(first["episode_id"]).service_id

        async def silent(service: Any, *given: Any) -> Any:
            if service.id == holder:
                raise DeadlineExceeded(f"{holder} does not answer")
            return await call(service, *given)

        monkeypatch.setattr(episodes.rollouts, "call", silent)
        none = await call_with(fleet, http, "k", 0.3)
        other = await call_with(fleet, http, "another", 5)
        monkeypatch.setattr(episodes.rollouts, "call", call)
        again = await call_with(fleet, http, "k", 5)

        assert (none.status_code, none.json()["code"]) == (503, "no_task")
        assert f"{holder} has the episode of this call" in none.json()["detail"]
        assert again.json()["episode_id"] == first["episode_id"]
        assert other.json()["episode_id"] != first["episode_id"]
        assert fleet.counts()["episodes_opened"] == 2


async def test_a_call_begins_no_second_episode_where_the_first_rollout_begins_one_and_falls_silent(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent_fleet(a_spec(group_size=2), writes, num_rollouts=2, max_groups=4) as fleet:
        await fleet.issue(8)
        rollouts, call, begun = fleet.gateway.episodes.rollouts, fleet.gateway.episodes.rollouts.call, dict[str, Any]()

        async def silent(service: Any, path: str, body: Any, *given: Any) -> Any:
            if not begun and not body["only_known"]:
                begun[service.id] = await call(service, path, body, *given)
            elif service.id not in begun:
                return await call(service, path, body, *given)
            raise DeadlineExceeded(f"{service.id} does not answer")

        monkeypatch.setattr(rollouts, "call", silent)
        none = await call_with(fleet, http, "k", 2)
        monkeypatch.setattr(rollouts, "call", call)
        again = await call_with(fleet, http, "k", 5)

        [(holder, opened)] = begun.items()
        assert (none.status_code, none.json()["code"]) == (503, "no_task")
        assert f"{holder} has the episode of this call" in none.json()["detail"]
        assert again.json()["episode_id"] == opened["episode_id"]
        assert fleet.counts()["episodes_opened"] == 1


async def test_a_call_begins_no_second_episode_where_the_connection_to_the_rollout_that_began_one_broke(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with agent_fleet(a_spec(group_size=2), writes, num_rollouts=2, max_groups=4) as fleet:
        await fleet.issue(8)
        client, begun = fleet.gateway.episodes.rollouts._http, list[Any]()
        post = client.post

        async def breaks_once(*given: Any, **how: Any) -> httpx.Response:
            answer = await post(*given, **how)
            if answer.is_success and not begun:
                begun.append(answer.json())
                raise httpx.ReadError("connection reset by peer")
            return answer

        monkeypatch.setattr(client, "post", breaks_once)
        opened = (await call_with(fleet, http, "k", 5)).json()

        assert opened["episode_id"] == begun[0]["episode_id"]
        assert fleet.counts()["episodes_opened"] == 1


@pytest.mark.parametrize("is_another_gateway", [False, True])
async def test_a_call_that_is_repeated_by_who_hung_up_on_a_silent_rollout_begins_no_second_episode(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, *, is_another_gateway: bool
) -> None:
    async with agent_fleet(a_spec(group_size=2), writes, num_rollouts=2, max_groups=4) as fleet:
        await fleet.issue(8)
        episodes, begun = fleet.gateway.episodes, dict[str, Any]()
        call = episodes.rollouts.call

        async def silent(service: Any, path: str, body: Any, *given: Any) -> Any:
            if not begun and not body["only_known"]:
                begun[service.id] = await call(service, path, body, *given)
            elif service.id not in begun and (body["only_known"] or not is_another_gateway):
                return await call(service, path, body, *given)
            if not body["only_known"]:
                await asyncio.Event().wait()
            raise DeadlineExceeded(f"{service.id} does not answer")

        if is_another_gateway:
            # The one before was told, and this one hears nothing of it before another rollout is asked.
            opened = (await call_with(fleet, http, "k", 5)).json()
            begun[EpisodeName.parse(opened["episode_id"]).service_id] = opened
            episodes._calls.clear()
        else:
            episodes._recalls_until = 0.0
        monkeypatch.setattr(episodes.rollouts, "call", silent)
        with pytest.raises(httpx.ReadTimeout):
            await call_with(fleet, http, "k", 20, timeout=0.5)
        if not is_another_gateway:
            none = await call_with(fleet, http, "k", 0)
            assert (none.status_code, none.json()["code"]) == (503, "no_task")
        monkeypatch.setattr(episodes.rollouts, "call", call)
        [(holder, opened)] = begun.items()
        # It is the other one's turn.
        episodes._turn = [each.service_id for each in fleet.rollouts].index(holder)
        again = await call_with(fleet, http, "k", 5)

        assert again.json()["episode_id"] == opened["episode_id"]
        assert fleet.counts()["episodes_opened"] == 1


async def test_a_rollout_begins_no_episode_for_a_caller_that_has_gone(
    fleet: AgentFleet, http: httpx.AsyncClient
) -> None:
    rollout = fleet.rollouts[0]
    headers = {"Authorization": f"Bearer {fleet.gateway.tokens.peer_of(ServiceKind.ROLLOUT)}"}
    body = {"wait_seconds": 20, "key": "k"}
    url = f"{rollout.address}/v1/experiments/{EXPERIMENT}/episodes"
    with pytest.raises(httpx.ReadTimeout):
        await http.post(url, json=body, headers=headers, timeout=0.3)
    async with asyncio.timeout(5):
        while rollout.episodes._offered._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    await fleet.issue(1)

    episode = await http.post(url, json=body | {"key": "another"}, headers=headers)

    assert episode.status_code == 201, episode.text
    assert fleet.counts()["episodes_opened"] == 1


async def test_the_quota_lets_a_repeated_call_have_what_it_began(
    fleet: AgentFleet, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.gateway.tokens, "quota_of", lambda _whose: Quota(episodes=1))
    waiting = [asyncio.create_task(call_with(fleet, http, "k", 10)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await fleet.issue(1)

    answers = [*(await asyncio.gather(*waiting)), await call_with(fleet, http, "k", 1)]
    other = await call_with(fleet, http, "another", 1)

    assert [each.status_code for each in answers] == [201, 201, 201], [each.text for each in answers]
    assert len({each.json()["episode_id"] for each in answers}) == 1
    assert (other.status_code, other.json()["code"]) == (429, "quota_exceeded")


async def test_rollouts_that_do_not_answer_hold_no_call_with_a_key_up(
    fleet: AgentFleet, http: httpx.AsyncClient
) -> None:
    async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    gateway = fleet.gateway
    async with await asyncio.start_server(is_silent, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for number in range(3):
            name = f"silent{number}"
            registration = a_registration(ServiceKind.ROLLOUT, name, address=address)
            service_id = (await gateway.fleet.register(registration)).service_id
            await gateway.registry.assign(gateway.registry.get(service_id), EXPERIMENT)
            observed = ObservedState(experiment_id=EXPERIMENT, state=WorkState.RUNNING, policy_version=0)
            await say(gateway, service_id, observed)
        clock = asyncio.get_running_loop().time
        began = clock()
        none = await call_with(fleet, http, "k", 0)
        until_none = clock() - began
        await fleet.issue(1)
        # Of the rollout that has it, at once; of those that are silent, never.
        first = await call_with(fleet, http, "k", 5)
        taken = clock() - began

    assert (none.status_code, first.status_code) == (503, 201), (none.text, first.text)
    assert until_none < 5.0 and taken < 9.0, "one of them alone takes 10 s"


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
        assert "5000 characters, and 4000 tokens" in refused.value.message
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
        episode = await begin(fleet, http, PATIENCE_SECONDS)
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
