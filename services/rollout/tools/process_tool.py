"""A function of the user's, as the rollout sees it: it runs in a process of its own."""

from collections.abc import Mapping
from typing import Any

from services.rollout.custom.process import CustomProcess, Refused
from services.rollout.tools.base import Schema, ToolFailed


class ProcessTool:
    """A function, in that process."""

    def __init__(self, process: CustomProcess, index: int, schema: Schema) -> None:
        self._process, self._index = process, index
        self.schema = schema

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call it; see ``Tool.call``."""
        await self._process.restart()
        try:
            return str(await self._process.ask("call", self._index, dict(arguments)))
        except Refused as error:
            raise ToolFailed(str(error)) from error
