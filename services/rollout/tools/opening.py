"""From the tools of a spec to those of its episodes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from flotilla.services.rollout.checked_transport import checked_client
from flotilla.services.rollout.custom.process import CustomProcess
from flotilla.services.rollout.tools.base import EpisodeTool, OpenTool, Schema, Tool, Tools, name_of
from flotilla.services.rollout.tools.code_interpreter import CodeInterpreter, Sandboxes
from flotilla.services.rollout.tools.http_tool import HttpTool
from flotilla.services.rollout.tools.mcp_tools import McpServer
from flotilla.services.rollout.tools.process_tool import ProcessTool, RowTool
from flotilla.shared.config.sections.episodes import (
    CodeInterpreterConfig,
    HttpToolConfig,
    McpToolsConfig,
    PythonToolConfig,
    ToolEpisodesConfig,
)
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import InvalidSpec
from flotilla.shared.net.client.tls import tls_context
from flotilla.shared.schemas.task import Task


class EpisodeTools:
    """See ``Tools``: those that all share, and those that are the episode's own."""

    def __init__(self, tools: Mapping[str, Tool | EpisodeTool], task: Task) -> None:
        self._tools, self._task = tools, task
        self._own: list[OpenTool] = []

    async def open(self) -> Mapping[str, Tool]:
        """Return the tools; see ``Tools.open``."""
        found: dict[str, Tool] = {}
        for name, tool in self._tools.items():
            if isinstance(tool, EpisodeTool):
                self._own.append(tool.for_episode(self._task))
                found[name] = self._own[-1]
            else:
                found[name] = tool
        return found

    async def close(self) -> None:
        """Release the episode's own."""
        own, self._own = self._own, []
        await asyncio.gather(*(tool.close() for tool in own))


class ToolBox:
    """Tools of all episodes of a session; ``aclose`` ends what they share."""

    def __init__(
        self,
        tools: Sequence[Tool | EpisodeTool],
        servers: Sequence[McpServer] = (),
        clients: Sequence[httpx.AsyncClient] = (),
        functions: CustomProcess | None = None,
    ) -> None:
        self._tools = {name_of(tool.schema): tool for tool in tools}
        self._servers = servers
        self._clients = clients
        self._functions = functions
        if len(self._tools) < len(tools):
            names = [name_of(tool.schema) for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidSpec(f"rollout.episodes.tools: two tools are called {twice!r}")

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """What the policy is shown."""
        return tuple(tool.schema for tool in self._tools.values())

    def for_episode(self, task: Task) -> Tools:
        """Make the tools of one episode."""
        return EpisodeTools(self._tools, task)

    async def aclose(self) -> None:
        """End processes, sessions and connections."""
        if self._functions is not None:
            await self._functions.aclose()
        for server in self._servers:
            await server.close()
        for client in self._clients:
            await client.aclose()


async def open_tools(
    config: ToolEpisodesConfig, networks: Sequence[IPNetwork] = LOOPBACK, sandboxes: Sandboxes | None = None
) -> ToolBox:
    """Load functions, and ask servers what they offer.

    Args:
        networks: that are not public, and that a URL may lead to.
        sandboxes: where code runs.

    Raises:
        InvalidSpec: one cannot be loaded, or two have the same name.
    """
    client: httpx.AsyncClient = checked_client(networks, config.step_seconds)
    # The sandbox is the fleet's own, wherever it is: no policy of addresses is between.
    inside = httpx.AsyncClient(trust_env=False, timeout=config.step_seconds, verify=tls_context())
    clients = (client, inside)
    tools: list[Tool | EpisodeTool] = []
    servers: list[McpServer] = []
    paths = [each.path for each in config.tools if isinstance(each, PythonToolConfig)]
    functions = CustomProcess(tools=paths)
    try:
        schemas = await functions.start() if paths else ()
        described = iter(enumerate(schemas))
        for each in config.tools:
            match each:
                case PythonToolConfig():
                    index, schema = next(described)
                    kind = RowTool if functions.needs_row[index] else ProcessTool
                    tools.append(kind(functions, index, schema))
                case HttpToolConfig():
                    tools.append(HttpTool(each.url, _read_schema(each.tool_schema), client))
                case McpToolsConfig():
                    servers.append(McpServer(each, networks))
                    tools += await servers[-1].tools()
                case CodeInterpreterConfig():
                    if sandboxes is None:
                        raise InvalidSpec("rollout.episodes.tools: code_interpreter needs a sandbox, and none is known")
                    tools.append(CodeInterpreter(each, sandboxes, inside))
        return ToolBox(tools, servers, clients, functions)
    except BaseException:
        await ToolBox((), servers, clients, functions).aclose()
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
