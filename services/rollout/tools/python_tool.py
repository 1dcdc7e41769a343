"""A function of the user's as a tool: what runs in the child process of ``services/rollout/custom_code.py``."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flotilla.services.rollout.episodes.observations import plain
from flotilla.services.rollout.tools.base import ROW, Schema, ToolFailed, schema_of
from flotilla.shared.children.custom_code import describe, load_callable
from flotilla.shared.concurrency.daemon_threads import on_daemon_thread
from flotilla.shared.errors import EpisodeFailed


class PythonTool:
    """Calls a function, plain or async, with the arguments by name.

    What it returns becomes text, but for parts with images. An exception is reported to the policy, as a tool's
    refusal; ``ConnectionError`` and ``TimeoutError`` mean that a dependency is unavailable, and are errors of the
    episode.

    Raises:
        InvalidSpec: there is no such function.
    """

    def __init__(self, reference: str) -> None:
        self._function: Callable[..., Any] = load_callable(
            reference, what="tool", kind="function", accepts=inspect.isfunction
        )
        self.schema: Schema = getattr(self._function, "schema", None) or schema_of(self._function)

    @property
    def needs_row(self) -> bool:
        """Whether it has a parameter for the task's row."""
        return ROW in inspect.signature(self._function).parameters

    async def call(self, arguments: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> str | list[Any]:
        """Call it; see ``Tool.call``. ``row`` is for its parameter of that name."""
        if self.needs_row:
            if ROW in arguments:
                raise ToolFailed(f"got an unexpected keyword argument '{ROW}'")
            arguments = {**arguments, ROW: row or {}}
        try:
            inspect.signature(self._function).bind(**arguments)
        except TypeError as error:
            raise ToolFailed(str(error)) from error
        try:
            if inspect.iscoroutinefunction(self._function):
                found = await self._function(**arguments)
            else:
                found = await on_daemon_thread(lambda: self._function(**arguments), "tool")
        except (ConnectionError, TimeoutError) as error:
            raise EpisodeFailed(f"tool {self._function.__name__}: {describe(error, None)}") from error
        except Exception as error:  # whatever the user's function raises is its answer
            raise ToolFailed(f"{type(error).__name__}: {error}") from error
        return plain(found)
