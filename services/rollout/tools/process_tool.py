"""A function of the user's, as the rollout sees it: it runs in a process of its own."""

from collections.abc import Mapping
from typing import Any

from flotilla.services.rollout.custom.process import CustomProcess, Refused
from flotilla.services.rollout.tools.base import OpenTool, Schema, ToolFailed
from flotilla.shared.schemas.task import Task


class ProcessTool:
    """A function, in that process."""

    def __init__(self, process: CustomProcess, index: int, schema: Schema) -> None:
        self._process, self._index = process, index
        self.schema = schema

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call it; see ``Tool.call``."""
        return await self._called(arguments, None)

    async def _called(self, arguments: Mapping[str, Any], row: Mapping[str, Any] | None) -> str:
        await self._process.restart()
        try:
            return str(await self._process.ask("call", self._index, [dict(arguments), row]))
        except Refused as error:
            raise ToolFailed(str(error)) from error


class RowTool(ProcessTool):
    """A function whose parameter ``row`` is given the columns of each task, with ``label`` and ``data_source``."""

    def for_episode(self, task: Task) -> OpenTool:
        """Bind it to a row."""
        row = {**task.metadata, "label": task.label, "data_source": task.data_source}
        return _Bound(self._process, self._index, self.schema, row)


class _Bound(ProcessTool):
    """A function with a row."""

    def __init__(self, process: CustomProcess, index: int, schema: Schema, row: Mapping[str, Any]) -> None:
        super().__init__(process, index, schema)
        self._row = row

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call it; see ``Tool.call``."""
        return await self._called(arguments, self._row)

    async def close(self) -> None:
        """Nothing is held."""
