"""``POST /v1/responses``: items become a chat, which is answered and recorded like any other, and its reply items.

What an earlier response of the same episode said is named by ``previous_response_id``; its ``instructions`` are not
said again, as OpenAI has it. Nothing is kept beyond the episode.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from flotilla.services.rollout.agents.replies import Reply, pieces
from flotilla.services.rollout.agents.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    ModelName,
    check_chat,
    read_request,
)
from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.schemas.wire import TolerantWire

TEXTS: Final = frozenset({"input_text", "output_text", "text", "refusal"})
LOG_PROBS: Final = "message.output_text.logprobs"
Items = Sequence[Mapping[str, Any]]
History = Mapping[str, tuple[Mapping[str, Any], ...]]
"""Of each response of the episode by its id: the messages up to it, instructions left out."""


class ResponsesRequest(TolerantWire):
    """``POST /v1/responses``, as far as it has a meaning here."""

    input: str | tuple[dict[str, Any], ...]
    instructions: str | None = None
    tools: tuple[dict[str, Any], ...] = Field((), max_length=MAX_TOOLS)
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None
    include: tuple[str, ...] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    model: ModelName = "policy"


class ResponsesChat(ChatRequest):
    """The chat that a request for a response is."""

    asked: ResponsesRequest
    said: tuple[dict[str, Any], ...]
    """The messages without instructions."""


def read_responses(body: bytes, history: History, *sampling: SamplingConfig) -> ResponsesChat:
    """Read a request for a response; ``sampling`` as for a chat.

    Raises:
        InvalidRequest: it is not one, or asks for what is not done.
    """
    asked = read_request(ResponsesRequest, body)
    _check(asked)
    before = _before(asked.previous_response_id, history)
    said = (*before, *_messages(asked.input))
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if not said:
        raise InvalidRequest("input has no message")
    if len(said) >= MAX_MESSAGES:
        raise InvalidRequest(f"the conversation has {len(said)} messages, and fewer than {MAX_MESSAGES} are done")
    chat = ResponsesChat(
        asked=asked,
        said=said,
        messages=(*system, *said),
        tools=tuple(_tool(number, each) for number, each in enumerate(asked.tools)),
        tool_choice=asked.tool_choice,
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        stream=bool(asked.stream),
        logprobs=LOG_PROBS in (asked.include or ()),
        model=asked.model,
    )
    check_chat(chat, *sampling)
    return chat


def _check(asked: ResponsesRequest) -> None:
    for name in ("conversation", "prompt", "background"):
        if getattr(asked, name):
            raise InvalidRequest(f"{name} is not done: the conversation is in input, or behind previous_response_id")
    if (asked.text or {}).get("format") not in (None, {"type": "text"}):
        raise InvalidRequest("text.format must be text: what the policy writes is not constrained")
    if asked.truncation not in (None, "disabled"):
        raise InvalidRequest("truncation must be disabled: what is left out would be missing in training, too")


def _before(name: str | None, history: History) -> tuple[dict[str, Any], ...]:
    if name is None:
        return ()
    if name not in history:
        raise InvalidRequest(
            f"previous_response_id {name[:80]!r} is no stored response of this episode: send its items in input"
        )
    return tuple(dict(each) for each in history[name])


def _messages(items: str | Items) -> list[dict[str, Any]]:
    """Make messages of items; calls belong to the assistant's message that they follow."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    made: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str):
                raise InvalidRequest(f"input.{number}.role must be a string")
            content = _text(f"input.{number}.content", item.get("content"))
            made.append({"role": "system" if role == "developer" else role, "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": None})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(f"input.{number}.output", item.get("output"))
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise InvalidRequest(
                f"input.{number} is of type {str(kind)[:80]}: message, function_call and function_call_output are done"
            )
    return made


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in TEXTS for part in content):
        return "".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    raise InvalidRequest(f"{where} must be text, or parts of text")


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"tools.{number} must be a function with a name: others are not run here")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ResponsesReply(Reply):
    """A response."""

    @property
    def name(self) -> str:
        """Its id."""
        return str(self.body["id"])

    def to_stream(self) -> Iterator[bytes]:
        """Make the events of a stream."""
        for number, (kind, content) in enumerate(self._events()):
            event = {"type": kind, "sequence_number": number, **content}
            yield f"event: {kind}\n".encode() + b"data: " + json.dumps(event).encode() + b"\n\n"

    def _events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = {**self.body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(self.body["output"]):
            at = {"output_index": index}
            place = {**at, "item_id": item["id"]}
            is_call = item["type"] == "function_call"
            empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
            yield "response.output_item.added", {**at, "item": {**item, **empty, "status": "in_progress"}}
            if is_call:
                yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
                done = {**place, "name": item["name"], "arguments": item["arguments"]}
                yield "response.function_call_arguments.done", done
            else:
                yield from _text_events({**place, "content_index": 0}, item["content"][0])
            yield "response.output_item.done", {**at, "item": item}
        yield f"response.{self.body['status']}", {"response": dict(self.body)}


def _text_events(place: dict[str, Any], part: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
    for piece in pieces(part["text"]):
        yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
    yield "response.content_part.done", {**place, "part": dict(part)}


def responses_reply(request: ResponsesChat, chat: Reply, sampling: SamplingConfig) -> ResponsesReply:
    """Make the response of a chat's reply."""
    choice, usage, asked = chat.body["choices"][0], chat.body["usage"], request.asked
    is_cut = choice["finish_reason"] == "length"
    body = {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": asked.model,
        "output": _output(choice, "incomplete" if is_cut else "completed"),
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tool_choice": asked.tool_choice or "auto",
        "tools": list(asked.tools),
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": asked.store is not False,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    return ResponsesReply(body, chat.text, chat.message)


def _output(choice: Mapping[str, Any], status: str) -> list[dict[str, Any]]:
    """Make items of a message: what it says, then its calls."""
    message, items = choice["message"], list[dict[str, Any]]()
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        log_probs = (choice["logprobs"] or {}).get("content", [])
        text = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": log_probs}
        said = {"type": "message", "role": "assistant", "status": status, "content": [text]}
        items.append({"id": f"msg_{secrets.token_hex(12)}", **said})
    for call in calls:
        function = call["function"]
        told = {"call_id": call["id"], "name": function["name"], "arguments": function["arguments"]}
        items.append({"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": status, **told})
    return items
