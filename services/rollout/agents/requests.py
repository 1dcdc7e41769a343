"""Requests of OpenAI clients: which are understood, and what of them must be as the spec says.

Training needs the log-probability of each token under the sampling of the spec. So a temperature or a cut of another
kind is refused, not ignored: an agent that asks for it would be trained on something else than it sees.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar
from weakref import WeakValueDictionary

from pydantic import Field, ValidationError

from flotilla.shared.config.sections.rollout import SamplingConfig
from flotilla.shared.errors import DataError, InvalidRequest
from flotilla.shared.schemas.wire import TolerantWire
from flotilla.shared.vision.files import digest_of
from flotilla.shared.vision.parts import Part

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 256
MAX_STOPS: Final = 4
IMAGE: Final = "image_url"
"""Type of a part that is an image."""

ModelName = Annotated[str, Field(max_length=256)]
"""Any name is taken, and given back."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
"""Which of them the model has, the engine knows."""
TokenIds = Annotated[tuple[TokenId, ...], Field(fail_fast=True)]
Texts = Annotated[tuple[str, ...], Field(fail_fast=True)]
Message = Mapping[str, Any]
Request = TypeVar("Request", bound=TolerantWire)


class StreamOptions(TolerantWire):
    """What a stream has at its end."""

    include_usage: bool = False


class ChatRequest(TolerantWire):
    """``POST /v1/chat/completions``, as far as it has a meaning here."""

    messages: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: tuple[dict[str, Any], ...] = Field((), max_length=MAX_TOOLS)
    tool_choice: Any = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | tuple[str, ...] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    response_format: dict[str, Any] | None = None
    model: ModelName = "policy"


class TextRequest(TolerantWire):
    """``POST /v1/completions``, as far as it has a meaning here."""

    prompt: str | TokenIds | Texts
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | tuple[str, ...] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    echo: bool = False
    logprobs: int | None = None
    model: ModelName = "policy"


AnyRequest = ChatRequest | TextRequest


def read_chat(body: bytes, *sampling: SamplingConfig) -> ChatRequest:
    """Read a chat request; any of ``sampling`` may be asked for.

    Raises:
        InvalidRequest: it is not one, or asks for what is not done.
    """
    request = read_request(ChatRequest, body)
    check_chat(request, *sampling)
    return request


def check_chat(request: ChatRequest, *sampling: SamplingConfig) -> None:
    """Check that what a chat asks for is done.

    Raises:
        InvalidRequest: it is not.
    """
    _check_sampling(request, sampling)
    for number, message in enumerate(request.messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages.{number}.role must be a string")
        _check_content(number, message)
    if request.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice must be auto or none: the policy decides which tools it calls")
    if request.response_format not in (None, {"type": "text"}):
        raise InvalidRequest("response_format must be text: what the policy writes is not constrained")


def read_text(body: bytes, *sampling: SamplingConfig) -> TextRequest:
    """Read a completion request; any of ``sampling`` may be asked for.

    Raises:
        InvalidRequest: it is not one, or asks for what is not done.
    """
    request = read_request(TextRequest, body)
    _check_sampling(request, sampling)
    if request.echo:
        raise InvalidRequest("echo is not done: the prompt is yours already")
    prompt = request.prompt
    if not prompt or (not isinstance(prompt, str) and len(prompt) != 1 and isinstance(prompt[0], str)):
        raise InvalidRequest("prompt must be one text, or the token ids of one")
    return request


def read_request(kind: type[Request], body: bytes) -> Request:
    """Read a body.

    Raises:
        InvalidRequest: it is another one, with what is wrong in it.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        entries = [
            {"path": ".".join(map(str, each["loc"])), "allowed": each["msg"]}
            for each in error.errors(include_url=False, include_context=False, include_input=False)[:20]
        ]
        first = entries[0]
        detail = f"{first['path']}: {first['allowed']}" if first["path"] else str(first["allowed"])
        raise InvalidRequest(detail, errors=entries) from None


def _check_sampling(request: AnyRequest, sampling: Sequence[SamplingConfig]) -> None:
    for name in ("temperature", "top_p", "top_k"):
        given, allowed = getattr(request, name, None), [getattr(each, name) for each in sampling]
        if given is not None and given not in allowed:
            raise InvalidRequest(
                f"{name} {given:g} is not the spec's {allowed[-1]:g} (rollout.sampling.{name}), under which the tokens "
                "are trained: leave it out"
            )
    if request.n not in (None, 1):
        raise InvalidRequest("n must be 1: ask again for another answer, which becomes a branch of the episode")
    stops = stops_of(request)
    if len(stops) > MAX_STOPS or not all(stops):
        raise InvalidRequest(f"stop has at most {MAX_STOPS} strings, none of them empty")


def _check_content(number: int, message: Message) -> None:
    content, role = message.get("content"), message.get("role")
    if content is None or isinstance(content, str):
        return
    kinds = {"text", "refusal"} if role == "assistant" else {"text", "refusal", IMAGE}
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in kinds for part in content):
        return
    known = "of type text" if role == "assistant" else f"of type text or {IMAGE}"
    raise InvalidRequest(f"messages.{number}.content must be text, or parts {known}")


def stops_of(request: AnyRequest) -> tuple[str, ...]:
    """List the stop strings that a request adds."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def wanted_tokens(request: AnyRequest) -> int | None:
    """Return the most tokens that a request wants, if it says."""
    longer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    return longer or request.max_tokens


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SentImage:
    """An image among the parts of a message. It is written as its name: that of its content."""

    data: bytes
    name: str

    def __str__(self) -> str:
        return self.name


class SentImages:
    """The images of messages that are kept of an agent, each distinct one once; those of refused requests go."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[str, SentImage] = WeakValueDictionary()

    def read(self, number: int, part: Message) -> SentImage:
        """Read a part.

        Raises:
            InvalidRequest: it has no image of its own that can be read.
        """
        try:
            data = Part.of(part).image()
        except DataError as error:
            raise InvalidRequest(f"messages.{number}.content: {error.detail}") from error
        name = digest_of(data)
        return self._known.setdefault(name, SentImage(data, name))


def images_in(messages: Sequence[Message]) -> list[bytes]:
    """List the images of plain messages, in order."""
    parts = [part for message in messages if isinstance(content := message["content"], list) for part in content]
    return [part["image"].data for part in parts if part["type"] == "image"]


def characters_of(message: Message) -> int:
    """Count the characters of a plain message's texts."""
    content = message["content"]
    return sum(len(part.get("text", "")) for part in content) if isinstance(content, list) else len(content)


def plain_messages(messages: Sequence[Message], images: SentImages | None = None) -> list[dict[str, Any]]:
    """Make messages as chat templates take them: contents are texts, or with images parts, and arguments mappings.

    Args:
        messages: as they came, or plain already.
        images: of the agent, where messages may have any.

    Raises:
        InvalidRequest: an image cannot be read.
    """
    return [_plain(message, number, images) for number, message in enumerate(messages)]


def _plain(message: Message, number: int = 0, images: SentImages | None = None) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list) and any(part.get("type") == IMAGE for part in content):
        assert images is not None
        content = [
            {"type": "image", "image": images.read(number, part)}
            if part.get("type") == IMAGE
            else {"type": "text", "text": str(part.get("text", part.get("refusal", "")))}
            for part in content
        ]
    elif isinstance(content, list) and not any(part.get("type") == "image" for part in content):
        content = "".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    made = {name: value for name, value in message.items() if value is not None and name not in {"content", "refusal"}}
    made["content"] = content or ""
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_plain_call(call) for call in calls if isinstance(call, Mapping)]
    return made


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What is no JSON stays the text that it is.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def canonical(message: Message) -> str:
    """Name a message by its content, without white space around an assistant's text and without ids of calls.

    What an assistant said is recorded as tokens, so two spellings of it that mean the same reply are the same.
    """
    plain = _plain(message)
    if plain["role"] == "assistant":
        calls = [call.get("function", call) for call in plain.get("tool_calls", ())]
        said = [[each.get("name"), each.get("arguments")] for each in calls if isinstance(each, Mapping)]
        return json.dumps(["assistant", plain["content"].strip(), said], sort_keys=True, default=str)
    told = {name: value for name, value in plain.items() if name not in {"tool_call_id", "name"}}
    return json.dumps(told, sort_keys=True, default=str)
