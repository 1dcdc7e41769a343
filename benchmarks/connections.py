"""What a request over the gateway's own connections to rollouts costs, beside general clients, in one run.

    python -m benchmarks.connections [--together 64] [--each 20] [--rounds 3]

A server in a process of its own answers 1,200 bytes to each request of 600. Prints microseconds of this process'
processor for a request: what the gateway spends while it passes one on. The least of the rounds, which take turns.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import httpcore
import httpx
import uvicorn

from flotilla.services.gateway.episodes.connection import Connections
from flotilla.shared.net.server.serving import address_of, bind

REQUEST, ANSWER = b"q" * 600, b"a" * 1200
JSON = b"application/json"
Ask = Callable[[], Awaitable[int]]


async def app(_scope: Any, receive: Any, send: Any) -> None:
    """Read a request and answer it."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def serve() -> None:
    """Be the server; print its address."""
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    print(address_of(listening), flush=True)
    await server.serve(sockets=[listening])


async def microseconds(ask: Ask, together: int, each: int) -> float:
    """Ask so many at a time, after a request of each has opened the connections; return what one took."""

    async def ask_often(times: int) -> None:
        for _ in range(times):
            assert await ask() == len(ANSWER)

    await asyncio.gather(*(ask_often(1) for _ in range(together)))
    before = time.process_time()
    await asyncio.gather(*(ask_often(each) for _ in range(together)))
    return (time.process_time() - before) / (together * each) * 1e6


async def compare(address: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure each client in turn."""
    own = Connections()
    pool = httpcore.AsyncConnectionPool(max_connections=4096, max_keepalive_connections=4096)
    limits = httpx.Limits(max_connections=4096, max_keepalive_connections=4096)
    client = httpx.AsyncClient(limits=limits, trust_env=False, timeout=None)

    async def with_own() -> int:
        async with own.posted(address, "/", REQUEST, "") as connection:
            return sum([len(piece) async for piece in connection.pieces()])

    async def with_httpcore() -> int:
        headers = [(b"Host", b"h"), (b"Content-Type", JSON), (b"Content-Length", b"%d" % len(REQUEST))]
        async with pool.stream("POST", f"{address}/", headers=headers, content=REQUEST) as answer:
            return sum([len(piece) async for piece in answer.aiter_stream()])

    async def with_httpx() -> int:
        async with client.stream("POST", f"{address}/", content=REQUEST) as answer:
            return sum([len(piece) async for piece in answer.aiter_raw()])

    found: dict[str, float] = {}
    async with client, pool:
        for _ in range(arguments.rounds):
            for name, ask in (("own", with_own), ("httpcore", with_httpcore), ("httpx", with_httpx)):
                took = await microseconds(ask, arguments.together, arguments.each)
                found[name] = min(took, found.get(name, took))
    own.close()
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    """Measure, or be the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=["server"], help=argparse.SUPPRESS)
    parser.add_argument("--together", type=int, default=64)
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.part == "server":
        asyncio.run(serve())
        return
    command = [sys.executable, "-m", "benchmarks.connections", "server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            print(json.dumps(asyncio.run(compare(server.stdout.readline().strip(), arguments)), indent=2))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
