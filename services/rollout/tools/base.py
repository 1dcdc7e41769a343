"""What a tool is, and how a plain function becomes one."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol, Union, get_args, get_origin, get_type_hints

Schema = Mapping[str, Any]
"""A function of OpenAI: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


class ToolFailed(Exception):
    """The tool says no: the arguments are wrong, or what was asked cannot be done. The policy is told so."""


class Tool(Protocol):
    """Something that a policy may call."""

    schema: Schema

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Do what was asked, and say what came of it.

        Raises:
            ToolFailed: it cannot be done; the policy is told.
            EpisodeFailed: the tool cannot be reached; the episode is an error.
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
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
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
