"""Tools: calls as models write them, results that are told, failures that are the tool's and failures that are ours."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import pytest

from flotilla.services.rollout.engines.scripted import ScriptedEngine
from flotilla.services.rollout.episodes.conversation import Reply
from flotilla.services.rollout.episodes.special_tokens import SamplingTally
from flotilla.services.rollout.episodes.turns import Turns
from flotilla.services.rollout.episodes_of import open_episodes
from flotilla.services.rollout.tools.base import Tool, ToolFailed, schema_of
from flotilla.services.rollout.tools.conversation import ToolConversation
from flotilla.services.rollout.tools.formats import read_calls
from flotilla.services.rollout.tools.opening import HttpTool, open_tools
from flotilla.services.rollout.tools.python_tool import PythonTool
from flotilla.shared.config.sections.episodes import ToolEpisodesConfig, ToolFormat
from flotilla.shared.errors import EpisodeFailed, InvalidSpec, ModelError, Unavailable
from flotilla.shared.models.prompts import PromptTemplate
from flotilla.shared.schemas.task import Message
from flotilla.shared.schemas.turns import FinishReason
from flotilla.shared.testing.builders import a_task
from tests.unit.gateway.builders import a_spec
from tests.unit.rollout.test_rendering import renderer_of

OWN = '''
import asyncio
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b
async def slow(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"
def absent(name: str) -> str:
    raise ConnectionError("no route")
def divide(a: float, b: float) -> float:
    return a / b
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", "hello", []),
        ("hermes", f"I add. {call('add', a=1)}\n{call('add', a=2)}", [("add", {"a": 1}), ("add", {"a": 2})]),
        ("qwen", f"<think>{call('no')}</think>{call('add', a=[1, '}'])}<|im_end|>", [("add", {"a": [1, "}"]})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
        ("llama", '{"name": "add", "parameters": {"a": 1}}<|eot_id|>', [("add", {"a": 1})]),
        (
            "llama",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}<|eom_id|>',
            [("add", {"a": 1}), ("sub", {})],
        ),
        ("llama", "The answer is {4}.", []),
        ("llama", '{"answer": 4}', []),
    ],
)
def test_calls_are_read_in_each_format(form: ToolFormat, text: str, expected: list[tuple[str, Any]]) -> None:
    assert [(each.name, each.arguments) for each in read_calls(text, form) if each.problem is None] == expected
    assert all(each.problem is None for each in read_calls(text, form))


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        ("hermes", "<tool_call>{name: add}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "not JSON"),
        ("qwen", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("qwen", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ("llama", '<|python_tag|>print("x")', "not JSON"),
        ("llama", '{"name": "add", "parameters": {"a": 1}', "not JSON"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_told(form: ToolFormat, text: str, words: str) -> None:
    (found,) = read_calls(text, form)

    assert words in (found.problem or "")


def test_a_function_describes_itself() -> None:
    def search(
        query: str, *, limit: int = 3, kind: Literal["web", "news"] = "web", tags: list[str] | None = None
    ) -> str:
        """Search for something."""
        return query

    assert schema_of(search)["function"] == {
        "name": "search",
        "description": "Search for something.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "kind": {"type": "string", "enum": ["web", "news"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["query"],
        },
    }


async def test_functions_are_loaded_by_path_and_their_refusals_are_told(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(OWN)

    assert await PythonTool(f"{tmp_path}/own.py:add").call({"a": 2}) == "3"
    with pytest.raises(ToolFailed, match="missing a required argument: 'a'"):
        await PythonTool(f"{tmp_path}/own.py:add").call({})
    with pytest.raises(ToolFailed, match="ZeroDivisionError"):
        await PythonTool(f"{tmp_path}/own.py:divide").call({"a": 1, "b": 0})
    with pytest.raises(EpisodeFailed, match="no route"):
        await PythonTool(f"{tmp_path}/own.py:absent").call({"name": "x"})
    with pytest.raises(InvalidSpec, match="no function 'sub'"):
        PythonTool(f"{tmp_path}/own.py:sub")


async def test_a_function_with_a_parameter_row_is_given_that_of_each_task(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(
        'def check(answer: str, *, row: dict) -> str:\n    return f\'{answer} {row["label"]} {row["extra"]}\'\n'
    )
    config = ToolEpisodesConfig.model_validate(
        {"kind": "tools", "tools": [{"kind": "python", "path": f"{tmp_path}/own.py:check"}]}
    )
    box = await open_tools(config)
    (schema,) = box.schemas

    async def told(label: str, **arguments: Any) -> str:
        task = a_task(label=label, metadata={"extra": 7})
        conversation = ToolConversation(box.for_episode(task), task, config)
        await conversation.begin()
        (message,) = (await conversation.answer(call("check", **arguments), is_cut=False)).messages
        return message.content

    assert list(schema["function"]["parameters"]["properties"]) == ["answer"]
    assert [await told("4", answer="a"), await told("5", answer="b")] == ["a 4 7", "b 5 7"]
    assert "unexpected keyword argument 'row'" in await told("4", answer="a", row={})
    await box.aclose()


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [
        (200, {"result": "4"}, "4"),
        (200, {"sum": 4}, '{"sum": 4}'),
        (200, [1, 2], "[1, 2]"),
        (422, {"error": "no such city"}, ToolFailed),
        (500, {}, EpisodeFailed),
        (429, {}, Unavailable),
    ],
)
async def test_a_tool_behind_a_url_answers_refuses_or_is_absent(status: int, body: Any, found: Any) -> None:
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return httpx.Response(status, json=body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        tool = HttpTool("http://tools.example.org/add", {"function": {"name": "add"}}, client)
        if isinstance(found, str):
            assert await tool.call({"a": 1}) == found
        else:
            with pytest.raises(found):
                await tool.call({"a": 1})
    assert asked[0] == {"name": "add", "arguments": {"a": 1}}
    assert len(asked) == (3 if found in {EpisodeFailed, Unavailable} else 1)


BOMB = gzip.compress(b"0" * (64 << 20))
HOSTILE_ANSWERS = {
    "endless": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
    "bomb": (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB) + BOMB, b""),
    "elsewhere": (b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 2\r\n\r\nno", b""),
    "nested": (b"HTTP/1.1 200 OK\r\ncontent-length: 200000\r\n\r\n" + b"[" * 200_000, b""),
    "surrogate": (b'HTTP/1.1 200 OK\r\ncontent-length: 23\r\n\r\n{"result": "a\\ud83d b"}', b""),
}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("endless", EpisodeFailed("the answer is longer than 1048576 bytes")),
        ("bomb", EpisodeFailed("compressed")),
        ("elsewhere", "error: no"),
        ("nested", "[[[["),
        ("surrogate", "a? b"),
    ],
)
async def test_whatever_a_tool_answers_is_bounded_and_text(kind: str, told: Any) -> None:
    head, again = HOSTILE_ANSWERS[kind]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"}}")
            writer.write(head)
            while again:
                writer.write(again)
                await writer.drain()
            await writer.drain()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    given = {"type": "function", "function": {"name": "one", "parameters": {"type": "object"}}}
    config = ToolEpisodesConfig.model_validate(
        {"kind": "tools", "tools": [{"kind": "http", "url": url, "tool_schema": given}]}
    )
    box = await open_tools(config)
    conversation = ToolConversation(box.for_episode(a_task()), a_task(), config)
    try:
        await conversation.begin()
        if isinstance(told, EpisodeFailed):
            with pytest.raises(EpisodeFailed, match=told.detail):
                await conversation.answer(call("one", a={}), is_cut=False)
        else:
            reply = await conversation.answer(call("one", a={}), is_cut=False)
            assert reply.messages[0].content.startswith(told)
            assert len(reply.messages[0].content) < 10_000
            reply.messages[0].content.encode()
    finally:
        await box.aclose()
        server.close()


class Named:
    """Answers with its name and what it is given; waits for another where asked to."""

    def __init__(self, name: str) -> None:
        self.schema = {"function": {"name": name}}
        self.others: asyncio.Event = asyncio.Event()

    async def call(self, arguments: Mapping[str, Any]) -> str:
        if arguments.get("waits"):
            await self.others.wait()
        self.others.set()
        return f"{self.schema['function']['name']} {dict(arguments)}"


class Given:
    def __init__(self, *tools: Tool) -> None:
        self._tools = {str(tool.schema["function"]["name"]): tool for tool in tools}

    async def open(self) -> Mapping[str, Tool]:
        return self._tools

    async def close(self) -> None: ...


async def talked(*texts: str, form: ToolFormat = "hermes", **options: Any) -> tuple[list[Reply], ToolConversation]:
    config = ToolEpisodesConfig.model_validate(
        {"kind": "tools", "format": form, "tools": [{"kind": "python", "path": "x.py:y"}], **options}
    )
    conversation = ToolConversation(Given(Named("one"), Named("two")), a_task(), config)
    await conversation.begin()
    return [await conversation.answer(text, is_cut=False) for text in texts], conversation


async def test_calls_of_one_answer_are_made_at_once_and_told_in_their_order() -> None:
    (reply,), conversation = await talked(f"{call('one', waits=True)}{call('one')}{call('three')}")

    assert reply.finish is None
    assert [message.role for message in reply.messages] == ["tool"] * 3
    told = [message.content for message in reply.messages]
    assert told == ["one {'waits': True}", "one {}", "error: there is no tool 'three'; there are: one, two"]
    assert (conversation.metrics["tools/calls"], conversation.metrics["tools/failures"]) == (3.0, 1.0)


async def test_an_answer_without_a_call_ends_the_episode() -> None:
    (reply,), conversation = await talked("It is 4.")
    cut = await conversation.answer("It is", is_cut=True)

    assert (reply.finish, cut.finish) == (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize(("texts", "rewards"), [(["one", "end"], [None, 0.5]), (["one", "one"], [None, 0.5])])
async def test_a_tool_grades_what_the_episode_leaves_once_at_its_end(
    texts: list[str], rewards: list[float | None]
) -> None:
    class Graded(Named):
        async def check(self) -> float | None:
            return 0.5

    config = ToolEpisodesConfig.model_validate(
        {"kind": "tools", "tools": [{"kind": "python", "path": "x.py:y"}], "max_turns": 2}
    )
    conversation = ToolConversation(Given(Graded("one"), Named("two")), a_task(), config)
    await conversation.begin()

    said = [call("one") if text == "one" else "It is 4." for text in texts]
    assert [(await conversation.answer(text, is_cut=False)).reward for text in said] == rewards


async def test_too_many_calls_and_long_results_are_cut() -> None:
    (reply,), _ = await talked(
        call("one", text="x" * 500) + call("two"), max_parallel_calls=1, max_result_characters=100
    )

    assert "characters left out" in reply.messages[0].content
    assert reply.messages[1] == Message("tool", "error: only 1 calls at a time are made")


async def test_a_tool_that_takes_too_long_is_an_error_of_the_episode() -> None:
    config = ToolEpisodesConfig.model_validate(
        {"kind": "tools", "tools": [{"kind": "python", "path": "x.py:y"}], "step_seconds": 0.02}
    )
    conversation = ToolConversation(Given(Named("one")), a_task(), config)
    await conversation.begin()

    with pytest.raises(EpisodeFailed, match="longer than"):
        await conversation.answer(call("one", waits=True), is_cut=False)


async def test_a_call_that_ends_the_episode_ends_those_beside_it() -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    class Slow(Named):
        async def call(self, arguments: Mapping[str, Any]) -> str:
            waiting.set()
            try:
                return await super().call({"waits": True})
            finally:
                ended.set()

    class Absent(Named):
        async def call(self, arguments: Mapping[str, Any]) -> str:
            await waiting.wait()
            raise EpisodeFailed("there is no sandbox")

    config = ToolEpisodesConfig.model_validate({"kind": "tools", "tools": [{"kind": "python", "path": "x.py:y"}]})
    conversation = ToolConversation(Given(Slow("slow"), Absent("absent")), a_task(), config)
    await conversation.begin()

    with pytest.raises(EpisodeFailed, match="no sandbox"):
        await conversation.answer(call("slow") + call("absent"), is_cut=False)

    assert ended.is_set(), "the tools are closed next"


async def test_two_tools_of_one_name_are_refused(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(OWN)
    tool = {"kind": "python", "path": f"{tmp_path}/own.py:add"}

    with pytest.raises(InvalidSpec, match="two tools are called 'add'"):
        await open_tools(ToolEpisodesConfig.model_validate({"kind": "tools", "tools": [tool, tool]}))


async def test_tools_of_a_model_that_cannot_be_shown_them_are_closed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    tools = [{"kind": "python", "path": f"{tmp_path}/own.py:add"}]
    spec = a_spec(rollout={"episodes": {"kind": "tools", "tools": tools}})
    renderer = renderer_of("qwen 3", PromptTemplate(input_template="{}"))
    before = set(psutil.Process().children())
    turns = Turns(spec.rollout.sampling, spec.rollout.sampling)

    with pytest.raises(ModelError, match="has no messages"):
        await open_episodes(spec, ScriptedEngine(), renderer, turns, SamplingTally())

    assert set(psutil.Process().children()) <= before
