"""Tool calls in what a policy writes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen.

What cannot be read is no call but text: the agent sees what the policy wrote, and may tell it so.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

MAX_CALLS: Final = 64
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: of the function.
        arguments: JSON text of an object.
    """

    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Make the mapping that clients expect."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def parse_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Split a reply into what it says and the tools that it calls.

    Args:
        text: of the reply.
        names: tools that were offered; a call of another one stays text.
    """
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        call = _read(match[1], names)
        if call is None or len(calls) == MAX_CALLS:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(taken, text)
    return (rest.strip() if calls else text), calls


def _read(text: str, names: Collection[str]) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
