"""What clients of a model are answered: whole, or as a stream of the same in pieces."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flotilla.services.rollout.agents.requests import ChatRequest, TextRequest
from flotilla.services.rollout.agents.template import ChatTemplate
from flotilla.services.rollout.engines.base import Completion
from flotilla.services.rollout.tools.formats import ToolCall, split_calls
from flotilla.shared.schemas.trajectory import FinishReason

PIECE_CHARACTERS: Final = 24
FINISH: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        body: the whole, as JSON can hold it.
        text: that was sampled, for people.
        message: of a chat, what the client will send back.
        include_usage: a stream ends with the usage.
        endings: of a text completion, what clients may continue behind: all of it, up to the end of its stop string,
            and what they were given.
    """

    body: Mapping[str, Any]
    text: str
    message: Mapping[str, Any] | None = None
    include_usage: bool = False
    endings: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Make the body of a whole answer."""
        return json.dumps(self.body).encode()

    def to_stream(self) -> Iterator[bytes]:
        """Make the events of a stream."""
        whole = self.body
        head = {name: whole[name] for name in ("id", "created", "model")}
        head["object"] = "chat.completion.chunk" if self.message is not None else "text_completion"
        choice = whole["choices"][0]
        for delta in self._deltas(choice):
            yield _event({**head, "choices": [{"index": 0, **delta, "finish_reason": None}]})
        last: dict[str, Any] = {"delta": {}} if self.message is not None else {"text": ""}
        yield _event({**head, "choices": [{"index": 0, **last, "finish_reason": choice["finish_reason"]}]})
        if self.include_usage:
            yield _event({**head, "choices": [], "usage": whole["usage"]})
        yield DONE

    def _deltas(self, choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self.message is None:
            for piece in pieces(choice["text"]):
                yield {"text": piece, "logprobs": None}
            return
        yield {"delta": {"role": "assistant", "content": ""}}
        for piece in pieces(self.message["content"] or ""):
            yield {"delta": {"content": piece}}
        if choice.get("logprobs"):
            yield {"delta": {}, "logprobs": choice["logprobs"]}
        for number, call in enumerate(self.message.get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": number, **call}]}}


def chat_reply(
    request: ChatRequest,
    completion: Completion,
    template: ChatTemplate,
    *,
    episode_id: str,
    num_prompt: int,
    stops: Sequence[str],
) -> Reply:
    """Make the answer to a chat: text, and tool calls if it offered tools."""
    text = template.text(completion.token_ids.tolist())
    said, _ = _stopped(text, stops, completion.finish_reason)
    finish = FINISH.get(completion.finish_reason, "stop")
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if request.tools and request.tool_choice != "none":
        names = {str((each.get("function") or {}).get("name")) for each in request.tools}
        rest, calls = split_calls(said, names)
        if calls:
            message = {**message, "content": rest or None, "tool_calls": [_call(call) for call in calls]}
            finish = "tool_calls"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"content": _log_probs(completion, template), "refusal": None}
    body = {
        **_head("chatcmpl", "chat.completion", request.model, episode_id),
        "choices": [choice],
        "usage": _usage(num_prompt, completion),
    }
    return Reply(body, text, message, request.stream_options.include_usage)


def text_reply(
    request: TextRequest,
    completion: Completion,
    template: ChatTemplate,
    *,
    episode_id: str,
    num_prompt: int,
    stops: Sequence[str],
) -> Reply:
    """Make the answer to a text completion."""
    text = template.text(completion.token_ids.tolist())
    log_probs = None
    if request.logprobs is not None:
        each = _log_probs(completion, template)
        log_probs = {
            "tokens": [token["token"] for token in each],
            "token_logprobs": [token["logprob"] for token in each],
            "top_logprobs": None,
            "text_offset": [],
        }
    said, ended = _stopped(text, stops, completion.finish_reason)
    choice = {
        "index": 0,
        "text": said,
        "finish_reason": FINISH.get(completion.finish_reason, "stop"),
        "logprobs": log_probs,
    }
    body = {
        **_head("cmpl", "text_completion", request.model, episode_id),
        "choices": [choice],
        "usage": _usage(num_prompt, completion),
    }
    return Reply(body, text, None, request.stream_options.include_usage, (text, ended, said))


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _head(kind: str, what: str, model: str, episode_id: str) -> dict[str, Any]:
    name = f"{kind}-{secrets.token_hex(12)}"
    return {"id": name, "object": what, "created": int(time.time()), "model": model, "system_fingerprint": episode_id}


def _usage(num_prompt: int, completion: Completion) -> dict[str, int]:
    sampled = len(completion.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": sampled, "total_tokens": num_prompt + sampled}


def _log_probs(completion: Completion, template: ChatTemplate) -> list[dict[str, Any]]:
    pairs = zip(completion.token_ids.tolist(), completion.log_probs.tolist(), strict=True)
    texts = ((template.text([token], with_special_tokens=True), value) for token, value in pairs)
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in texts
    ]


def _stopped(text: str, stops: Sequence[str], finish_reason: FinishReason) -> tuple[str, str]:
    """Cut a text before and behind the stop string that ended it: clients do not expect it."""
    found = first_stop(text, stops)
    if finish_reason is not FinishReason.STOP or found is None:
        return text, text
    at, stop = found
    return text[:at], text[: at + len(stop)]


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Find the stop string that comes first in a text, and where it is."""
    return min(((text.find(stop), stop) for stop in stops if stop in text), default=None)


def pieces(text: str) -> Iterator[str]:
    """Cut a text as a stream sends it."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
