"""From the tools of a spec to those of its episodes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from services.rollout.custom.process import CustomProcess
from services.rollout.tools.base import Schema, Tool, name_of
from services.rollout.tools.http_tool import HttpTool
from services.rollout.tools.mcp_tools import McpServer
from services.rollout.tools.process_tool import ProcessTool
from shared.checked_transport import checked_client
from shared.config.episodes import HttpToolConfig, McpToolsConfig, PythonToolConfig, ToolEpisodesConfig
from shared.errors import InvalidSpec
from shared.settings import LOOPBACK, IPNetwork


class ToolBox:
    """Tools that all episodes of a session share; ``aclose`` ends what they hold."""

    def __init__(
        self,
        tools: Sequence[Tool],
        servers: Sequence[McpServer],
        client: httpx.AsyncClient,
        functions: CustomProcess | None = None,
    ) -> None:
        self._tools = {name_of(tool.schema): tool for tool in tools}
        self._servers = servers
        self._client = client
        self._functions = functions
        if len(self._tools) < len(tools):
            names = [name_of(tool.schema) for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidSpec(f"rollout.episodes.tools: two tools are called {twice!r}")

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """What the policy is shown."""
        return tuple(tool.schema for tool in self._tools.values())

    async def open(self) -> Mapping[str, Tool]:
        """Return the tools; see ``Tools.open``."""
        return self._tools

    async def close(self) -> None:
        """Nothing is an episode's own."""

    async def aclose(self) -> None:
        """End processes, sessions and connections."""
        if self._functions is not None:
            await self._functions.aclose()
        for server in self._servers:
            await server.close()
        await self._client.aclose()


async def open_tools(config: ToolEpisodesConfig, networks: Sequence[IPNetwork] = LOOPBACK) -> ToolBox:
    """Load functions, and ask servers what they offer.

    Args:
        networks: that are not public, and that a URL may lead to.

    Raises:
        InvalidSpec: one cannot be loaded, or two have the same name.
    """
    client: httpx.AsyncClient = checked_client(networks, config.step_seconds)
    tools: list[Tool] = []
    servers: list[McpServer] = []
    paths = [each.path for each in config.tools if isinstance(each, PythonToolConfig)]
    functions = CustomProcess(tools=paths)
    try:
        schemas = await functions.start() if paths else ()
        described = iter(enumerate(schemas))
        for each in config.tools:
            match each:
                case PythonToolConfig():
                    tools.append(ProcessTool(functions, *next(described)))
                case HttpToolConfig():
                    tools.append(HttpTool(each.url, _read_schema(each.tool_schema), client))
                case McpToolsConfig():
                    servers.append(McpServer(each, networks))
                    tools += await servers[-1].tools()
        return ToolBox(tools, servers, client, functions)
    except BaseException:
        await ToolBox((), servers, client, functions).aclose()
        raise


def _read_schema(given: str | Mapping[str, object]) -> Schema:
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(Path(given).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise InvalidSpec(f"the schema of a tool cannot be read from {given}: {error}") from error
    if not isinstance(found, dict) or "function" not in found:
        raise InvalidSpec(f"{given} holds no function schema: it needs {{'type': 'function', 'function': ...}}")
    return found
