"""From the tools of a spec to those of its episodes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from flotilla.services.rollout.custom.process import CustomProcess, Refused
from flotilla.services.rollout.tools.base import (
    EpisodeTool,
    OpenTool,
    Result,
    Schema,
    Tool,
    ToolFailed,
    Tools,
    name_of,
)
from flotilla.services.rollout.tools.code_interpreter import CodeInterpreter, Sandboxes
from flotilla.services.rollout.tools.mcp_tools import McpServer
from flotilla.shared.config.redaction import redacted_text
from flotilla.shared.config.sections.episodes import (
    CodeInterpreterConfig,
    HttpToolConfig,
    McpToolsConfig,
    PythonToolConfig,
    ToolEpisodesConfig,
)
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import EpisodeFailed, InvalidSpec, Unavailable
from flotilla.shared.net.absence import BUSY_STATUS, may_pass
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.client.bounded_json import parse_json
from flotilla.shared.net.client.checked_transport import checked_client
from flotilla.shared.schemas.task import Task
from flotilla.shared.vision.parts import are_parts

MOST_ATTEMPTS = 3
NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class ProcessTool:
    """A function, in that process."""

    def __init__(self, process: CustomProcess, index: int, schema: Schema) -> None:
        self._process, self._index = process, index
        self.schema = schema

    async def call(self, arguments: Mapping[str, Any]) -> Result:
        """Call it; see ``Tool.call``."""
        return await self._called(arguments, None)

    async def _called(self, arguments: Mapping[str, Any], row: Mapping[str, Any] | None) -> Result:
        await self._process.restart()
        try:
            found = await self._process.ask("call", self._index, [dict(arguments), row])
            return found if are_parts(found) else str(found)
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

    async def call(self, arguments: Mapping[str, Any]) -> Result:
        """Call it; see ``Tool.call``."""
        return await self._called(arguments, self._row)

    async def close(self) -> None:
        """Nothing is held."""


class HttpTool:
    """Posts ``{"name": ..., "arguments": {...}}``.

    A reply below 300 is the result: its ``result`` if it is an object that has one, else the whole body. 4xx is told
    to the policy, with ``error`` or the body. 5xx, 408, 429 and no answer are tried again, and then an error of the
    episode; but where the server is absent or busy, the task waits for it.

    Args:
        url: where to.
        schema: that the policy is shown.
        client: with time-outs and bounds of its own.
    """

    def __init__(self, url: str, schema: Schema, client: httpx.AsyncClient) -> None:
        self.schema = schema
        self._url = url
        self._client = client

    async def call(self, arguments: Mapping[str, Any]) -> Result:
        """Call it; see ``Tool.call``."""
        body = {"name": self.schema["function"]["name"], "arguments": dict(arguments)}
        why, is_absent = "", False
        for _ in range(MOST_ATTEMPTS):
            try:
                reply = await self._client.post(self._url, json=body)
            except httpx.HTTPError as error:
                # One that was reached and did not answer may do so each time, for these arguments.
                why, is_absent = f"{type(error).__name__}: {error}", isinstance(error, NOT_REACHED) and may_pass(error)
                continue
            if reply.status_code >= 500 or reply.status_code in {408, 429}:
                why, is_absent = f"it answered {reply.status_code}", reply.status_code in BUSY_STATUS
                continue
            if reply.status_code >= 300:
                raise ToolFailed(_text(_part(reply, "error")))
            found = _part(reply, "result")
            return found if are_parts(found) else _text(found)
        words = f"tool {body['name']} at {redacted_text(self._url)} cannot be used: {why}"
        raise Unavailable(words) if is_absent else EpisodeFailed(words)


def _part(reply: httpx.Response, key: str) -> Any:
    try:
        body = parse_json(reply.content, keeps_integers=True)
    except ValueError:
        return reply.text
    return body.get(key, body) if isinstance(body, dict) else body


def _text(found: Any) -> str:
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


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
    config: ToolEpisodesConfig,
    networks: Sequence[IPNetwork] = LOOPBACK,
    sandboxes: Sandboxes | None = None,
    *,
    shows_images: bool = False,
) -> ToolBox:
    """Load functions, and ask servers what they offer.

    Args:
        networks: that are not public, and that a URL may lead to.
        sandboxes: where code runs.
        shows_images: whether the policy can see images.

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
                    servers.append(McpServer(each, networks, shows_images=shows_images))
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
