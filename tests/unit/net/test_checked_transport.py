"""Clients of URLs that others chose: what an answer says of another address is nobody's to read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Network

import pytest

from flotilla.services.gateway.events.log import EventLog
from flotilla.services.gateway.store.memory import MemoryStore
from flotilla.services.rollout.tools.base import ToolFailed
from flotilla.services.rollout.tools.opening import HttpTool
from flotilla.shared.clock import SystemClock
from flotilla.shared.environment.webhooks import Webhook
from flotilla.shared.net.client.checked_transport import checked_client

HERE = (IPv4Network("127.0.0.0/8"),)
PLACES = ["http://xn--/", "http://a:b:c/", "http://[::1/", "http:///x", "http://127.0.0.1:1/"]


@asynccontextmanager
async def redirecting(place: str) -> AsyncIterator[str]:
    """Answer each request with a redirection; gives the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 5\r\n\r\nmoved".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()


@pytest.mark.parametrize("place", PLACES)
async def test_a_redirection_of_a_tool_is_told_wherever_it_leads(place: str) -> None:
    async with redirecting(place) as url, checked_client(HERE, 5.0) as client:
        with pytest.raises(ToolFailed, match="moved"):
            await HttpTool(url, {"function": {"name": "add"}}, client).call({})


@pytest.mark.parametrize("place", PLACES)
async def test_a_redirection_of_a_web_hook_is_a_refusal_wherever_it_leads(place: str) -> None:
    async with redirecting(place) as url:
        hook = Webhook.model_validate({"url": url, "secret": "a-secret-of-sixteen-letters"})
        events = EventLog(MemoryStore(), SystemClock(), [hook], HERE)
        hooks = events.webhooks
        await events.append("e-1", "stalled")
        task = asyncio.create_task(hooks.run())
        async with asyncio.timeout(5):
            while not hooks.view()[0].failed and not task.done():
                await asyncio.sleep(0.01)
        assert not task.done(), "deliveries have ended"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert hooks.view()[0].last_error == "the receiver answered 302"
