"""What a tool is, and how a plain function becomes one."""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, Union, get_args, get_origin, get_type_hints, runtime_checkable

from flotilla.shared.schemas.task import Task

Result = str | Sequence[Mapping[str, Any]]
"""A text, or parts with images; see ``Observation`` of environments."""
Schema = Mapping[str, Any]
"""A function of OpenAI: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class ToolFailed(Exception):
    """The tool refuses: the arguments are wrong, or the call cannot be done. The policy receives the reason."""


class Tool(Protocol):
    """Something that a policy may call."""

    schema: Schema

    async def call(self, arguments: Mapping[str, Any]) -> Result:
        """Execute the call, and return its result.

        Raises:
            ToolFailed: it cannot be done; the policy receives the reason.
            EpisodeFailed: the tool cannot be reached; the episode is an error.
        """


class OpenTool(Tool, Protocol):
    """A tool that one episode has for itself."""

    async def close(self) -> None:
        """Release what it holds."""


@runtime_checkable
class EpisodeTool(Protocol):
    """A tool that each episode has one of, since it keeps something from call to call, or depends on the row."""

    schema: Schema

    def for_episode(self, task: Task) -> OpenTool:
        """Make that of an episode."""


@runtime_checkable
class Checked(Protocol):
    """A tool that can grade what the episode leaves in it."""

    async def check(self) -> float | None:
        """Grade it; None where the task has no grade of this kind.

        Raises:
            EpisodeFailed: it cannot be graded.
        """


class Tools(Protocol):
    """The tools of one episode."""

    async def open(self) -> Mapping[str, Tool]:
        """Make the tools of an episode, by name.

        Raises:
            EpisodeFailed: one cannot be reached.
        """

    async def close(self) -> None:
        """Release what they hold."""


class ToolSource(Protocol):
    """Gives each episode its tools."""

    def for_episode(self, task: Task) -> Tools:
        """Make those of an episode."""


ROW: Final = "row"
"""A function's parameter of this name is given the task's row, and is not shown to the policy."""


def name_of(schema: Schema) -> str:
    """Name a tool."""
    return str(schema["function"]["name"])


JSON_TYPES: Final[Mapping[Any, str]] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", tuple: "array", dict: "object",
}  # fmt: skip


def schema_of(function: Callable[..., Any]) -> Schema:
    """Describe a function by its signature, type hints and docstring."""
    hints = get_type_hints(function)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == ROW or parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        properties[name] = _type_of(hints.get(name, str))
        if parameter.default is parameter.empty:
            required.append(name)
    described = {"type": "object", "properties": properties, "required": required}
    text = inspect.cleandoc(function.__doc__ or "")
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": text, "parameters": described},
    }


def _type_of(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": JSON_TYPES.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in {Union, types.UnionType}:
        return _type_of(next(each for each in arguments if each is not type(None)))
    found: dict[str, Any] = {"type": JSON_TYPES.get(origin or hint, "string")}
    if found["type"] == "array" and arguments:
        found["items"] = _type_of(arguments[0])
    return found
