"""Tools of a real MCP server, which is a process: listed, called, refused, and gone."""

import asyncio
import contextlib
import socket
import sys
from base64 import b64encode
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from flotilla.services.rollout.episodes.observations import message_of
from flotilla.services.rollout.tools import mcp_tools
from flotilla.services.rollout.tools.base import ToolFailed
from flotilla.services.rollout.tools.mcp_tools import McpServer
from flotilla.shared.config.sections.episodes import McpToolsConfig
from flotilla.shared.errors import EpisodeFailed, InvalidSpec, Unavailable
from flotilla.shared.net.client import address_policy, checked_transport
from flotilla.shared.schemas.task import Message
from tests.vision_models import a_picture

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the package mcp is not installed")

SERVER = '''
import os
try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # release 1
    from mcp.server.fastmcp import FastMCP as MCPServer
server = MCPServer("numbers")
@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ValueError("a must not be negative")
    return a + b
@server.tool()
def look():
    """Look around."""
    from mcp.types import ImageContent, TextContent
    kind = "mime_type" if "mime_type" in ImageContent.model_fields else "mimeType"
    return [TextContent(type="text", text="seen"), ImageContent(type="image", data="PICTURE", **{kind: "image/png"})]
@server.tool()
def leave() -> str:
    os._exit(3)
server.run()
'''.replace("PICTURE", b64encode(a_picture("red")).decode())
HTTP_SERVER = '''
import socket
try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # release 1
    from mcp.server.fastmcp import FastMCP as MCPServer
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = MCPServer("numbers")
@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
print(port, flush=True)
server.run("streamable-http", host="127.0.0.1", port=port)
'''


@pytest.mark.timeout(120)
async def test_tools_of_a_server_are_called_and_its_end_is_no_answer(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    server = McpServer(McpToolsConfig(kind="mcp", command=(sys.executable, str(script))))
    try:
        add, look, leave = await server.tools()
        assert add.schema["function"]["description"] == "Add two numbers."
        assert set(add.schema["function"]["parameters"]["properties"]) == {"a", "b"}
        assert await add.call({"a": 2, "b": 3}) == "5"
        assert await look.call({}) == "seen", "a policy that sees no pictures is told the rest"
        with pytest.raises(ToolFailed, match="Error executing tool add"):
            await add.call({"a": -1, "b": 3})
        async with asyncio.timeout(60):
            with pytest.raises(EpisodeFailed, match="cannot be used"):
                await leave.call({})
        assert await add.call({"a": 20, "b": 3}) == "23", "the next call begins another session"
    finally:
        await server.close()
    with pytest.raises(InvalidSpec, match="no tool 'sub'"):
        other = McpServer(McpToolsConfig(kind="mcp", command=(sys.executable, str(script)), only=("sub",)))
        try:
            await other.tools()
        finally:
            await other.close()


@pytest.mark.timeout(120)
async def test_pictures_among_results_are_shown_to_a_policy_that_sees(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    config = McpToolsConfig(kind="mcp", command=(sys.executable, str(script)), only=("look",))
    server = McpServer(config, shows_images=True)
    try:
        (look,) = await server.tools()
        found = await look.call({})
    finally:
        await server.close()
    assert message_of("tool", found) == Message("tool", "seen<image>", (a_picture("red"),))


async def test_a_server_that_cannot_be_started_is_said_before_anything_runs() -> None:
    server = McpServer(McpToolsConfig(kind="mcp", command=("/no/such/program",)))

    with pytest.raises(InvalidSpec, match="cannot be used"):
        await server.tools()
    await server.close()


@pytest.mark.timeout(120)
async def test_a_slow_server_is_waited_for_and_used_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hold").touch()
    waiting = f"import os, time\nwhile os.path.exists({str(tmp_path / 'hold')!r}): time.sleep(0.02)\n"
    script = tmp_path / "server.py"
    script.write_text(waiting + SERVER)
    server = McpServer(McpToolsConfig(kind="mcp", command=(sys.executable, str(script))))
    try:
        with monkeypatch.context() as hasty:
            hasty.setattr(mcp_tools, "START_SECONDS", 0.2)
            with pytest.raises(Unavailable, match=r"did not answer within 0\.2 s"):
                await server.tools()
            hasty.setenv("FLOTILLA_START_PATIENCE", "2")
            with pytest.raises(Unavailable, match=r"did not answer within 0\.4 s"):
                await server.tools()
        (tmp_path / "hold").unlink()
        add, *_ = await server.tools()
        assert await add.call({"a": 2, "b": 3}) == "5"
    finally:
        await server.close()


async def test_a_server_that_is_not_there_now_is_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        server = McpServer(McpToolsConfig(kind="mcp", url=f"http://127.0.0.1:{taken.getsockname()[1]}/mcp"))
        with pytest.raises(Unavailable, match="cannot be used"):
            await server.tools()
        with pytest.raises(Unavailable, match="cannot be used"):
            await server.call("add", {})
    await server.close()


@pytest.mark.timeout(120)
async def test_a_name_that_means_another_address_by_now_is_not_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "server.py"
    script.write_text(HTTP_SERVER)
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    server = None
    try:
        async with asyncio.timeout(60):
            port = int(await process.stdout.readline())
            server = McpServer(McpToolsConfig(kind="mcp", url=f"http://localhost:{port}/mcp"))
            while True:
                with contextlib.suppress(Unavailable):
                    (add,) = await server.tools()
                    break
            assert await add.call({"a": 2, "b": 3}) == "5"

            async def rebound(host: str, port: int) -> list[str]:
                del host, port
                return ["10.1.2.3"]

            looked = partial(address_policy.permitted_address, resolver=rebound)
            monkeypatch.setattr(checked_transport, "permitted_address", looked)
            with pytest.raises(EpisodeFailed):
                await add.call({"a": 2, "b": 3})
            with pytest.raises(EpisodeFailed, match="neither public nor in a network"):
                await add.call({"a": 2, "b": 3})
    finally:
        if server is not None:
            await server.close()
        process.kill()
        await process.wait()
