"""What Anthropic's clients ask is read as a chat, and what the policy says is told in blocks."""

import json
from typing import Any

import pytest

from flotilla.services.rollout.agents.episode import Asked, Endpoint, Episode
from flotilla.services.rollout.agents.messages import MessagesReply, read_messages
from flotilla.services.rollout.agents.requests import MAX_MESSAGES, plain_messages
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.testing.characters import CharacterTokenizer
from tests.unit.rollout.agents.test_episode import text_of
from tests.unit.rollout.agents.world import World, Writes, a_lone_episode, a_spec, stays, user

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def read(**fields: Any) -> Any:
    return read_messages(json.dumps({"messages": [user("?")]} | fields).encode(), SamplingConfig())


async def ask(episode: Episode, *messages: Any, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", "max_tokens": 99, "messages": list(messages)} | fields).encode()
    reply = await episode.answer(Asked(Endpoint.MESSAGES, body), stays)
    assert isinstance(reply, MessagesReply)
    assert told_in_events(reply) == reply.body
    return dict(reply.body)


def told_in_events(reply: MessagesReply) -> dict[str, Any]:
    """Put a message together from its events, as clients do."""
    message: dict[str, Any] = {}
    arguments = ""
    for raw in reply.to_stream():
        kind, data = raw.decode().removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                arguments += delta.get("partial_json", "")
                for name in {"text", "thinking", "signature"} & delta.keys():
                    block[name] += delta[name]
            case "content_block_stop" if arguments:
                message["content"][event["index"]]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


async def an_episode(writes: Writes, **spec: Any) -> Episode:
    world = World(spec=a_spec(**spec), writes=writes)
    await world.engine.start()
    return a_lone_episode(world)


def test_blocks_become_the_messages_of_a_chat() -> None:
    calls = [{"type": "tool_use", "id": f"t{number}", "name": "add", "input": {"a": number}} for number in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
    ]
    cached = {"cache_control": {"type": "ephemeral"}}

    chat = read(
        system=[{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I add."}, *calls]},
            {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
            {"role": "system", "content": "Hurry."},
        ],
        tools=[TOOL | cached],
        tool_choice={"type": "auto"},
        stop_sequences=["END"],
        max_tokens=7,
    )

    function = [{"name": "add", "arguments": {"a": number}} for number in (1, 2)]
    assert plain_messages(chat.messages) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "1\n2"},
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [{"id": f"t{n}", "type": "function", "function": function[n - 1]} for n in (1, 2)],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "no"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "Hurry."},
    ]
    parameters = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert chat.tools == ({"type": "function", "function": parameters},)
    assert (chat.tool_choice, chat.stop, chat.max_tokens) == ("auto", ("END",), 7)


def test_what_of_the_system_prompt_is_for_the_provider_is_no_part_of_the_conversation() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b;"}

    assert read(system=[billing, {"type": "text", "text": "Be brief."}]).messages[0]["content"] == "Be brief."
    assert read(system=[billing]).messages == (user("?"),)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": 3}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\.0\.role must be user, assistant or system"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\.0\.content must be text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\.0\.content\.0 must be a block"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\.0\.content\.0\.text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "is of type image: of type text and tool_result"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]},
            r"messages\.0\.content\.0\.content\.0 is of type image",
        ),
        ({"messages": [{"role": "assistant", "content": "The"}]}, "the last of messages must not be the assistant's"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}, user("?")]},
            "an object as input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, user("?")]},
            "is of type redacted_thinking",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}] * 5000}]}, "5000 with a message for each"),
        ({"system": [IMAGE]}, r"system\.0 is of type image"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\.0 is of type web_search_20250305",
        ),
        ({"tools": [{"name": "x"}]}, "an input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice must be auto or none"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice must be auto or none"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use is not done"),
        ({"stop_sequences": ["x"] * 5}, "stop_sequences: "),
        ({"stop_sequences": [""]}, "stop_sequences has an empty string"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": 0.5}, "temperature 0.5 is not the spec's"),
        ({"top_p": 0.5}, "top_p 0.5 is not the spec's"),
        ({"top_k": 5}, "top_k 5 is not the spec's"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "not constrained"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits is not done"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not done"),
    ],
)
def test_what_would_be_trained_otherwise_than_asked_for_is_refused(fields: dict[str, Any], words: str) -> None:
    assert MAX_MESSAGES < 5000
    with pytest.raises(InvalidRequest, match=words):
        read(**fields)


@pytest.mark.parametrize(
    "signature", [None, 3, "x", "EqQBCgIYAhIM", "W10=", "WzEsIDJd", "WyIiXQ==", "e30=", "bnVsbA==", "é"]
)
def test_a_thought_of_another_model_is_refused(signature: Any) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": signature}

    with pytest.raises(InvalidRequest, match=r"messages\.0\.content\.0 is no thinking of this endpoint"):
        read(messages=[{"role": "assistant", "content": [thought]}, user("?")])


@pytest.mark.parametrize(
    "written", ["<think>\nhm  </think>\n\nyes", "hm</think>yes", "<think></think>", f"</think>\n{CALL}"]
)
@pytest.mark.parametrize("thinking", [None, THINKING, {"type": "adaptive", "display": "omitted"}])
async def test_a_thought_that_is_sent_back_as_it_came_continues_the_recorded_reply(
    written: str, thinking: dict[str, Any] | None
) -> None:
    episode = await an_episode(lambda _: f"{written}~")
    asked = {"tools": [TOOL], "thinking": thinking}

    first = await ask(episode, user("?"), **asked)
    await ask(episode, user("?"), {"role": "assistant", "content": first["content"]}, user("more?"), **asked)

    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory, sampled=True) == f"{written}~" * 2
    thoughts = [block for block in first["content"] if block["type"] == "thinking"]
    assert len(thoughts) == (thinking is not None)
    if thinking == THINKING:
        assert thoughts[0]["thinking"] == ("hm" if "hm" in written else "")
        assert not [block for block in first["content"] if "think" in block.get("text", "")]


@pytest.mark.parametrize(
    ("written", "fields", "content", "reason"),
    [
        ("yes~", {}, [{"type": "text", "text": "yes"}], ("end_turn", None)),
        ("~", {}, [{"type": "text", "text": ""}], ("end_turn", None)),
        (
            "yes END no~",
            {"stop_sequences": ["END", "no"]},
            [{"type": "text", "text": "yes "}],
            ("stop_sequence", "END"),
        ),
        ("yes" * 9, {"max_tokens": 3}, [{"type": "text", "text": "yes"}], ("max_tokens", None)),
        (f"{CALL}~", {}, [{"type": "text", "text": CALL}], ("end_turn", None)),
        (
            f"So: {CALL}~",
            {"tools": [TOOL]},
            [{"type": "text", "text": "So:"}, {"type": "tool_use", "name": "add", "input": {"a": 1}}],
            ("tool_use", None),
        ),
        (
            f"{CALL}~",
            {"tools": [TOOL], "tool_choice": {"type": "none"}},
            [{"type": "text", "text": CALL}],
            ("end_turn", None),
        ),
    ],
)
async def test_a_reply_is_told_in_blocks_and_says_why_it_ended(
    written: str, fields: dict[str, Any], content: list[Any], reason: tuple[str, str | None]
) -> None:
    episode = await an_episode(lambda _: written)

    message = await ask(episode, user("?"), **fields)

    assert [{name: block[name] for name in block if name != "id"} for block in message["content"]] == content
    assert (message["stop_reason"], message["stop_sequence"]) == reason
    assert message["usage"]["output_tokens"] == (await episode.trajectories())[0].loss_mask.sum()


async def test_a_call_and_its_result_continue_one_trajectory_of_the_engines_tokens() -> None:
    episode = await an_episode(lambda prompt: "2.~" if "<tool>" in prompt else f"{CALL}~")

    first = await ask(episode, user("1 + 1?"), tools=[TOOL])
    (call,) = first["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "2"}
    chat = [user("1 + 1?"), {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    last = await ask(episode, *chat, tools=[TOOL])

    assert last["content"] == [{"type": "text", "text": "2."}]
    (trajectory,) = await episode.trajectories()
    assert text_of(trajectory, sampled=True) == f"{CALL}~2.~"
    assert text_of(trajectory).endswith(f"{CALL}~\n<tool>2~\n<assistant>2.~")


async def test_counting_tokens_is_what_the_message_then_has_and_no_turn() -> None:
    episode = await an_episode(lambda _: "yes~", max_turns=2)
    chat: list[Any] = [user("a?")]

    for _ in range(2):
        body = json.dumps({"model": "m", "messages": chat, "system": "Be brief."}).encode()
        counts = [await episode.answer(Asked(Endpoint.COUNT_TOKENS, body), stays) for _ in range(3)]
        message = await ask(episode, *chat, system="Be brief.")
        chat += [{"role": "assistant", "content": message["content"]}, user("b?")]

        assert [each and each.body for each in counts] == [{"input_tokens": message["usage"]["input_tokens"]}] * 3
    assert episode.num_turns == 2
    assert len(await episode.trajectories()) == 1


async def test_a_message_and_a_chat_are_turns_of_the_same_conversation() -> None:
    world = World(tokenizer=CharacterTokenizer())
    await world.engine.start()
    episode = a_lone_episode(world)
    said = await ask(episode, user("a?"))

    chat = [user("a?"), {"role": "assistant", "content": said["content"][0]["text"]}, user("b?")]
    await episode.answer(Asked(Endpoint.CHAT, json.dumps({"messages": chat}).encode()), stays)

    (trajectory,) = await episode.trajectories()
    assert len(trajectory.turns) == 2
