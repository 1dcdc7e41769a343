"""``POST /v1/messages``: blocks become a chat, which is answered and recorded like any other, and its reply blocks.

What the policy thought is, if the request asks for thinking, a block of its own. Its signature holds what stood around
it, so that a client that sends it back unchanged continues the recorded reply. Nothing is kept for it.
"""

import base64
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from flotilla.services.rollout.agents.replies import Reply, first_stop, pieces
from flotilla.services.rollout.agents.requests import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    ModelName,
    check_chat,
    read_request,
    stops_of,
)
from flotilla.services.rollout.environments.base import THOUGHT_END, without_thought
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.wire import TolerantWire

THOUGHT_BEGIN: Final = "<think>"
BILLING: Final = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that is for the provider. It differs from turn to turn, so a conversation that
had it would never continue a recorded reply."""
KEEPS_ALL: Final = {"type": "clear_thinking_20251015", "keep": "all"}
REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


class Block(TolerantWire):
    """A part of a message, of whatever kind; what its kind needs is checked where it is read."""

    type: Any = None
    text: Any = None
    thinking: Any = None
    signature: Any = None
    id: Any = None
    name: Any = None
    input: Any = None
    tool_use_id: Any = None
    content: Any = None


class Tool(TolerantWire):
    """A tool that is offered."""

    type: Any = None
    name: Any = None
    description: Any = None
    input_schema: Any = None


class Said(TolerantWire):
    """A message, as it came."""

    role: Any = None
    content: Any = None


class Choice(TolerantWire):
    """Which tools may be called."""

    type: Any = None
    disable_parallel_tool_use: bool | None = None


class Thinking(TolerantWire):
    """Whether, and how, thoughts are returned."""

    type: str = "disabled"
    display: str | None = None


class MessagesRequest(TolerantWire):
    """``POST /v1/messages``, as far as it has a meaning here."""

    messages: tuple[Said, ...] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    system: str | tuple[dict[str, Any], ...] | None = None
    tools: tuple[Tool, ...] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: tuple[str, ...] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: Thinking | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    output_format: Any = None
    context_management: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None
    model: ModelName = "policy"


class MessagesChat(ChatRequest):
    """The chat that a request for a message is."""

    asked: MessagesRequest
    top_k: int | None = None


def read_messages(body: bytes, *sampling: SamplingConfig) -> MessagesChat:
    """Read a request for a message; ``sampling`` as for a chat.

    Raises:
        InvalidRequest: it is not one, or asks for what is not done.
    """
    asked = read_request(MessagesRequest, body)
    _check(asked)
    said = _messages(asked)
    if len(said) > MAX_MESSAGES:
        raise InvalidRequest(
            f"messages are {len(said)} with a message for each tool_result, and {MAX_MESSAGES} at most"
        )
    chat = MessagesChat(
        asked=asked,
        messages=tuple(said),
        tools=tuple(_tool(number, each) for number, each in enumerate(asked.tools or ())),
        tool_choice=_choice(asked.tool_choice),
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=asked.stop_sequences,
        stream=bool(asked.stream),
        model=asked.model,
    )
    check_chat(chat, *sampling)
    return chat


def _check(asked: MessagesRequest) -> None:
    if asked.messages[-1].role == "assistant":
        raise InvalidRequest("the last of messages must not be the assistant's: its beginning cannot be given")
    if not all(asked.stop_sequences or ()):
        raise InvalidRequest("stop_sequences has an empty string")
    for name in ("container", "mcp_servers"):
        if getattr(asked, name):
            raise InvalidRequest(f"{name} is not done: tools run where the agent is")
    if asked.output_format is not None or (asked.output_config or {}).get("format") is not None:
        raise InvalidRequest("output_config.format must be left out: what the policy writes is not constrained")
    if any(each != KEEPS_ALL for each in (asked.context_management or {}).get("edits") or ()):
        raise InvalidRequest("context_management.edits is not done: edit messages, which becomes a branch")


def _choice(choice: Choice | None) -> Any:
    if choice is None:
        return None
    if choice.disable_parallel_tool_use:
        raise InvalidRequest("tool_choice.disable_parallel_tool_use is not done: the policy decides what it calls")
    return choice.type


def _tool(number: int, tool: Tool) -> dict[str, Any]:
    kind, name, schema = tool.type or "custom", tool.name, tool.input_schema
    if kind != "custom":
        raise InvalidRequest(
            f"tools.{number} is of type {str(kind)[:80]}: only custom ones, which the agent runs, are done"
        )
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise InvalidRequest(f"tools.{number} must have a name and an input_schema")
    told = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": name, **told, "parameters": schema}}


def _messages(asked: MessagesRequest) -> list[dict[str, Any]]:
    system = _texts("system", asked.system)
    told = "\n".join(each for each in system if not each.startswith(BILLING))
    made: list[dict[str, Any]] = [{"role": "system", "content": told}] if told else []
    for number, message in enumerate(asked.messages):
        where, content = f"messages.{number}.content", message.content
        match message.role:
            case "user":
                made += _told(where, content)
            case "assistant":
                made.append(_said(where, content))
            case "system":
                made.append({"role": "system", "content": "\n".join(_texts(where, content))})
            case _:
                raise InvalidRequest(f"messages.{number}.role must be user, assistant or system")
    return made


def _told(where: str, content: object) -> list[dict[str, Any]]:
    """Make messages of what the user's has: each result of a tool is one, and the texts between them."""
    made: list[dict[str, Any]] = []
    texts: list[str] = []
    for place, block in _blocks(where, content):
        if block.type != "tool_result":
            texts.append(_text(place, block, "text and tool_result"))
            continue
        if texts:
            made.append({"role": "user", "content": "\n".join(texts)})
            texts = []
        result = "\n".join(_texts(f"{place}.content", block.content))
        made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
    if texts or not made:
        made.append({"role": "user", "content": "\n".join(texts)})
    return made


def _said(where: str, content: object) -> dict[str, Any]:
    text, calls = "", list[dict[str, Any]]()
    for place, block in _blocks(where, content):
        if block.type == "thinking":
            text += _thought(place, block)
        elif block.type == "tool_use":
            name, arguments = block.name, block.input
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise InvalidRequest(f"{place} must have a name, and an object as input")
            function = {"name": name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            text += _text(place, block, "text, thinking and tool_use")
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _blocks(where: str, content: object) -> Iterator[tuple[str, Block]]:
    """Iterate over blocks, each with its place; a text is one, and nothing none."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple | None):
        raise InvalidRequest(f"{where} must be text, or a list of blocks")
    for number, block in enumerate(content or ()):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"{where}.{number} must be a block with a type")
        yield f"{where}.{number}", Block.model_validate(block)


def _texts(where: str, content: object) -> list[str]:
    return [_text(place, block, "text") for place, block in _blocks(where, content)]


def _text(place: str, block: Block, done: str) -> str:
    if block.type != "text":
        raise InvalidRequest(f"{place} is of type {block.type[:80]}: of type {done} are those that are done here")
    if not isinstance(block.text, str):
        raise InvalidRequest(f"{place}.text must be a string")
    return str(block.text)


def _thought(place: str, block: Block) -> str:
    """Make of a block what the policy wrote."""
    try:
        before, behind = json.loads(base64.b64decode(str(block.signature), validate=True))
        return "".join((before, block.thinking, behind))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InvalidRequest(f"{place} is no thinking of this endpoint: send its blocks back as they came") from None


def _split_thought(text: str, *, is_shown: bool) -> tuple[list[dict[str, Any]], str]:
    """Split off what the policy thought: a block, or none, and the rest."""
    spoken = without_thought(text)
    inner = text.removesuffix(spoken).removesuffix(THOUGHT_END)
    if len(spoken) == len(text):
        return [], text
    begun = inner.lstrip().removeprefix(THOUGHT_BEGIN).lstrip()
    thinking, rest = begun.rstrip(), spoken.lstrip()
    before = inner[: len(inner) - len(begun)]
    behind = begun[len(thinking) :] + THOUGHT_END + spoken[: len(spoken) - len(rest)]
    if not is_shown:
        before, thinking, behind = before + thinking + behind, "", ""
    signature = base64.b64encode(json.dumps([before, behind]).encode()).decode()
    return [{"type": "thinking", "thinking": thinking, "signature": signature}], rest


@dataclass(frozen=True, slots=True)
class MessagesReply(Reply):
    """A message."""

    def to_stream(self) -> Iterator[bytes]:
        """Make the events of a stream."""
        for kind, content in self._events():
            yield f"event: {kind}\n".encode() + b"data: " + json.dumps({"type": kind, **content}).encode() + b"\n\n"

    def _events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        end = {name: self.body[name] for name in ("stop_reason", "stop_sequence")}
        usage = self.body["usage"]
        begun = {**self.body, "content": [], **dict.fromkeys(end), "usage": {**usage, "output_tokens": 0}}
        yield "message_start", {"message": begun}
        for index, block in enumerate(self.body["content"]):
            empty, deltas = _deltas(block)
            yield "content_block_start", {"index": index, "content_block": {**block, **empty}}
            for delta in deltas:
                yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        yield "message_delta", {"delta": end, "usage": usage}
        yield "message_stop", {}


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[dict[str, str]]]:
    """Return what of a block is empty at its beginning, and the pieces that fill it."""
    if block["type"] == "tool_use":
        parts = pieces(json.dumps(block["input"]))
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": each} for each in parts]
    if block["type"] == "thinking":
        thoughts = [{"type": "thinking_delta", "thinking": each} for each in pieces(block["thinking"])]
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {"thinking": "", "signature": ""}, [*thoughts, signed]
    return {"text": ""}, [{"type": "text_delta", "text": each} for each in pieces(block["text"])]


def messages_reply(request: MessagesChat, chat: Reply, sampling: SamplingConfig) -> MessagesReply:
    """Make the message of a chat's reply."""
    choice, usage = chat.body["choices"][0], chat.body["usage"]
    stop = None
    if choice["finish_reason"] == "stop" and (found := first_stop(chat.text, sampling.stop + stops_of(request))):
        stop = found[1] if found[1] in stops_of(request) else None
    body = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _content(choice["message"], request.asked.thinking or Thinking()),
        "stop_reason": "stop_sequence" if stop is not None else REASONS.get(choice["finish_reason"], "end_turn"),
        "stop_sequence": stop,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        },
    }
    return MessagesReply(body, chat.text, chat.message)


def _content(message: Mapping[str, Any], thinking: Thinking) -> list[dict[str, Any]]:
    """Make blocks of a message: what it thought, if that is asked for, what it says, then its calls."""
    blocks, text, calls = list[dict[str, Any]](), message["content"] or "", message.get("tool_calls", ())
    if thinking.type != "disabled":
        blocks, text = _split_thought(text, is_shown=thinking.display != "omitted")
    if text or not calls:
        blocks.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        told = {"name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"], **told})
    return blocks
