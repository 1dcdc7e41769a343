"""How models write tool calls, and as what they read results.

*hermes* (and *qwen*, whose form is the same): ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number
of them. *llama*: the whole answer, behind ``<|python_tag|>`` or not, is ``{"name": ..., "parameters": {...}}``, several
separated by ``;``. A malformed call is reported to the policy, so that it may try again.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flotilla.services.rollout.environments.base import without_thought
from flotilla.shared.config.sections.episodes import ToolFormat

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
MAX_SPLIT: Final = 64
CALL: Final = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the policy wrote it.

    Attributes:
        name: of the tool; empty where the call cannot be read.
        arguments: by name.
        problem: why it cannot be read.
    """

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


def read_calls(text: str, form: ToolFormat) -> list[ToolCall]:
    """Find the calls in an answer, in their order; none in one that only speaks. ``text`` has special tokens in it."""
    return _READERS[form](without_thought(text))


def split_calls(text: str, offered: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Split an answer in the hermes form into what it says, thoughts included, and its calls.

    What cannot be read stays text, and so does a call of a tool that was not offered: an agent from outside sees what
    the policy wrote, and may report it.
    """
    calls: list[ToolCall] = []

    def taken(found: re.Match[str]) -> str:
        call = _read(found.group(1), "arguments")
        if call.problem is not None or call.name not in offered or len(calls) == MAX_SPLIT:
            return found.group()
        calls.append(call)
        return ""

    spoken = without_thought(text)
    rest = text.removesuffix(spoken) + CALL.sub(taken, spoken)
    return (rest.strip() if calls else text), calls


def role_of_results(form: ToolFormat) -> str:
    """Name the role of the message that has a result."""
    return "ipython" if form == "llama" else "tool"


def _tagged(text: str) -> list[ToolCall]:
    return [_read(found.group(1), "arguments") for found in CALL.finditer(text)]


def _bare(text: str) -> list[ToolCall]:
    _, tag, behind = text.partition(PYTHON_TAG)
    written = re.sub(r"<\|[a-z_]+\|>", "", behind if tag else text).strip()
    if not tag and not written.startswith("{"):
        return []
    if not tag and '"name"' not in written:
        return []  # some other object: an answer
    return [_read(each, "parameters") for each in _objects(written)]


def _objects(text: str) -> Sequence[str]:
    """Cut objects that semicolons separate; what is no object is left whole, to be reported."""
    decoder, place = json.JSONDecoder(), 0
    found: list[str] = []
    while place < len(text):
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return [*found, text[place:]]
        found.append(text[place:end])
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n"))
    return found


def _read(text: str, key: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(problem='the call must be an object with "name"')
    others = {"arguments", "parameters"} - {key}
    arguments = call.get(key, next((call[other] for other in others if other in call), {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(problem=f'"{key}" must be an object')
    return ToolCall(call["name"], arguments)


_READERS: Final[Mapping[str, Callable[[str], list[ToolCall]]]] = {"hermes": _tagged, "qwen": _tagged, "llama": _bare}
