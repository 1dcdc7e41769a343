"""Agents that our programs drive believe the fleet's own authority, as every other caller does."""

import asyncio
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.agents.episodes import Episode, Verdict, play_all
from flotilla.agents.verifiers import new_client
from flotilla.cli.commands.certs import _make
from flotilla.shared.net.client.bearer_client import tls_context


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    _make(tmp_path, [["127.0.0.1"]], 1)
    monkeypatch.setenv("FLOTILLA_TLS_CA", str(tmp_path / "ca.pem"))
    tls_context.cache_clear()
    yield tmp_path
    tls_context.cache_clear()


async def over(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer that there are no more episodes, and nothing else."""
    request = await reader.readuntil(b"\r\n\r\n")
    status = b"409 Conflict" if b"/episodes" in request else b"404 Not Found"
    writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
    await writer.drain()
    writer.close()


async def play(_episode: Episode) -> Verdict:
    return Verdict(0.0)


async def test_agents_speak_to_a_gateway_with_a_certificate_of_the_fleets_authority(authority: Path) -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(authority / "127.0.0.1.pem", authority / "127.0.0.1.key")
    async with await asyncio.start_server(over, "127.0.0.1", 0, ssl=serving) as server, asyncio.timeout(10):
        gateway = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        assert await play_all(gateway, "tiny-1", "token", play, parallel=1) == 0

        openai = pytest.importorskip("openai")
        async with new_client(gateway) as client:
            with pytest.raises(openai.NotFoundError):
                await client.models.list()
