"""The tools of an MCP server, through the official ``mcp`` package: one session for all episodes of an experiment.

The package's context managers must be left by the task that entered them, so a task of its own holds the session.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from flotilla.services.rollout.tools.base import Result, Schema, Tool, ToolFailed
from flotilla.shared.config.sections.episodes import McpToolsConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import EpisodeFailed, FlotillaError, InvalidSpec, Unavailable
from flotilla.shared.host.start_patience import patient
from flotilla.shared.net.absence import absent_or
from flotilla.shared.net.client.checked_transport import checked_client

START_SECONDS = 30.0
CLOSED = "Connection closed"
"""The package's messages for a lost server."""
SECONDS_OF_A_STREAM = 300.0
"""A server may be silent for so long within one answer."""


class McpTool:
    """One tool of a server."""

    def __init__(self, server: "McpServer", schema: Schema) -> None:
        self._server = server
        self.schema = schema

    async def call(self, arguments: Mapping[str, Any]) -> Result:
        """Call it; see ``Tool.call``."""
        return await self._server.call(self.schema["function"]["name"], arguments)


class McpServer:
    """A session with a server, begun again by the next call after it broke.

    Args:
        config: how to reach it.
        networks: that are not public, and that its URL may lead to.
        shows_images: whether images among its results are given; else its texts alone are.
    """

    def __init__(
        self, config: McpToolsConfig, networks: Sequence[IPNetwork] = LOOPBACK, *, shows_images: bool = False
    ) -> None:
        self._config = config
        self._shows_images = shows_images
        self._networks = networks
        self._holder: asyncio.Task[None] | None = None
        self._session: Any = None
        self._ending = asyncio.Event()
        self._starting = asyncio.Lock()

    async def tools(self) -> list[Tool]:
        """List the server's tools, or those of them that the spec names.

        Raises:
            InvalidSpec: the package is absent, there is no such program, the server refuses the session, or it lacks a
                tool that the spec names.
            Unavailable: it does not answer now, or not within ``START_SECONDS``.
        """
        session, seconds = await self._connected(), patient(START_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                listed = await session.list_tools()
        except TimeoutError as error:
            await self.close()
            raise Unavailable(f"the MCP server did not list its tools within {seconds:g} s") from error
        except Exception as error:  # the package raises whatever its transport does
            await self.close()
            raise self._unusable(error) from error
        offered = {each.name: each for each in listed.tools}
        wanted = self._config.only or tuple(offered)
        missing = [name for name in wanted if name not in offered]
        if missing:
            raise InvalidSpec(f"the MCP server has no tool {missing[0]!r}; it has: {', '.join(offered)}")
        return [McpTool(self, _schema(offered[name])) for name in wanted]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        """Call a tool; see ``Tool.call``.

        Raises:
            EpisodeFailed: the server refuses, or cannot be used.
            Unavailable: it does not answer now: the task is answered again once it does.
        """
        try:
            session = await self._connected()
            try:
                result = await session.call_tool(name, dict(arguments))
            except Exception as error:  # the package raises whatever its transport does
                if self._session is session:
                    await self.close()
                # Where the server can be reached, it was this call that failed, and it would again.
                await self._connected()
                raise EpisodeFailed(f"MCP tool {name} cannot be used: {_words(error)}") from error
        except InvalidSpec as error:
            raise EpisodeFailed(error.detail) from error
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None))
        if _either(result, "is_error", "isError"):
            raise ToolFailed(text or "the tool failed")
        if self._shows_images and any(map(_image, result.content)):
            return [each for each in map(_written, result.content) if each is not None]
        return text

    async def close(self) -> None:
        """End the session; the next call begins another."""
        holder, self._holder, self._session = self._holder, None, None
        if holder is not None:
            self._ending.set()
            await asyncio.gather(holder, return_exceptions=True)

    async def _connected(self) -> Any:
        async with self._starting:
            if self._holder is not None and not self._holder.done():
                return self._session
            self._ending, seconds = asyncio.Event(), patient(START_SECONDS)
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(ready, self._ending), name="mcp session")
            try:
                async with asyncio.timeout(seconds):
                    self._session = await ready
            except BaseException as error:
                # The next call begins another session, whatever becomes of this one.
                holder, self._holder = self._holder, None
                holder.cancel()
                if isinstance(error, TimeoutError):
                    raise Unavailable(f"the MCP server did not answer within {seconds:g} s") from error
                raise
            return self._session

    async def _hold(self, ready: "asyncio.Future[Any]", ending: asyncio.Event) -> None:
        try:
            async with _session(self._config, self._networks) as session:
                await session.initialize()
                ready.set_result(session)
                await ending.wait()
        except InvalidSpec as error:
            if not ready.done():
                ready.set_exception(error)
        except Exception as error:  # the package raises whatever its transport does
            if not ready.done():
                ready.set_exception(self._unusable(error))

    def _unusable(self, error: Exception) -> FlotillaError:
        """Report that the server cannot be used: not now, where that may pass."""
        words = f"the MCP server cannot be used: {_words(error)}"
        # A program that ends while it starts does so again; a server elsewhere may be on its way.
        is_away = self._config.url is not None and CLOSED in words
        return Unavailable(words) if is_away else absent_or(error, InvalidSpec(words))


@asynccontextmanager
async def _session(config: McpToolsConfig, networks: Sequence[IPNetwork]) -> AsyncIterator[Any]:
    try:
        # Half a second, the first time, that the loop does not have.
        await asyncio.to_thread(importlib.import_module, "mcp.client.streamable_http")
        from mcp import ClientSession, StdioServerParameters
        from mcp.client import streamable_http
        from mcp.client.stdio import stdio_client
    except ImportError as error:
        raise InvalidSpec("tools of an MCP server need the package mcp: pip install flotilla[mcp]") from error
    async with AsyncExitStack() as stack:
        if config.url is not None:
            # Each connection goes to an address that was examined: the name may mean another one by now.
            client = partial(checked_client, networks, library=_either(streamable_http, "httpx2", "httpx"))
            if hasattr(streamable_http, "streamable_http_client"):
                http = await stack.enter_async_context(client(SECONDS_OF_A_STREAM))
                connected = streamable_http.streamable_http_client(config.url, http_client=http)
            else:

                def factory(headers: Any = None, timeout: Any = None, auth: Any = None) -> Any:
                    return client(SECONDS_OF_A_STREAM if timeout is None else timeout, headers=headers, auth=auth)

                connected = streamable_http.streamablehttp_client(config.url, httpx_client_factory=factory)
            streams = await stack.enter_async_context(connected)
        else:
            command, *arguments = config.command or ()
            parameters = StdioServerParameters(command=command, args=arguments)
            streams = await stack.enter_async_context(stdio_client(parameters))
        yield await stack.enter_async_context(ClientSession(streams[0], streams[1]))


def _words(error: BaseException) -> str:
    """Return what happened; of several errors the first, which the others followed from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _either(holder: Any, new: str, old: str) -> Any:
    """Read what release 2 of the package calls ``new`` and release 1 ``old``."""
    return getattr(holder, new) if hasattr(holder, new) else getattr(holder, old)


def _image(part: Any) -> str | None:
    """Return the image of a part of a result, as a URI; None where it is none."""
    kind, data = _either(part, "mime_type", "mimeType") if hasattr(part, "data") else "", getattr(part, "data", None)
    return f"data:{kind};base64,{data}" if str(kind).startswith("image/") else None


def _written(part: Any) -> dict[str, Any] | None:
    uri, text = _image(part), getattr(part, "text", None)
    if uri is not None:
        return {"type": "image_url", "image_url": {"url": uri}}
    return {"type": "text", "text": text} if text else None


def _schema(tool: Any) -> Schema:
    parameters = _either(tool, "input_schema", "inputSchema")
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters},
    }
