"""Hostile programs, clients and a hostile grader of a soak, in a process of their own.

They belong on other machines: what it costs to be hostile is not to be taken for what it does. So the process runs
where nothing else wants to. It reads its targets, then ``begin`` and ``end``, from stdin, and answers each ``end`` with
what was done, all in JSON.
"""

import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx

from flotilla.shared.schemas.sandbox import EXPERIMENT_HEADER
from tests.integration.sandbox.attacks import SIMPLE
from tests.integration.sandbox.campaign import PROGRAMS
from tests.integration.sandbox.poison import POISONS
from tests.soak.http import new_client, serve

END_SECONDS = 30.0
ATTACKS = [*PROGRAMS.values(), *POISONS.values(), *(attack.code for attack in SIMPLE)]
REPLIES = (
    b'{"grades": [{"reward": ' + b"9" * 400 + b"}]}",
    b"[" * 20_000,
    b'{"grades": [{"status": "error", "reason": "\\ud800"}]}',
    b'{"grades": [{"reward": NaN}]}',
    b'{"grades": []}',
    b"\xff" * 100_000,
    b"",
)
"""What hostile graders answer."""
REQUESTS = (
    b'POST /v1/experiments HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"name": ',
    b"GET /v1/services?limit=" + b"9" * 4000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000,
    b"\x00\xff" * 5000,
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xed\xa0\x80\r\n\r\n",
    b"POST /run_code HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 9999999999\r\n\r\n",
)
"""What hostile clients send to the gateway and to the sandbox."""


@dataclass
class Done:
    """What was dealt with: programs, requests; and the hostile programs that got out."""

    programs: int = 0
    requests: int = 0
    breaches: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Hostility:
    """Does what hostile neighbours do.

    Attributes:
        gateway, sandbox: their URLs.
        token: which the sandbox lets in.
        programs: how many at a time.
        sends_requests: whether hostile clients are among them.
    """

    gateway: str
    sandbox: str
    token: str
    programs: int
    sends_requests: bool = True

    async def run(self, done: Done) -> None:
        """Go on without a pause until cancelled."""
        async with asyncio.TaskGroup() as lanes:
            lanes.create_task(asyncio.Event().wait())
            for _ in range(self.programs):
                lanes.create_task(self._programs(done))
            for url in (self.gateway, self.sandbox) if self.sends_requests else ():
                lanes.create_task(self._requests(url, done))

    async def _programs(self, done: Done) -> None:
        headers = {"Authorization": f"Bearer {self.token}", EXPERIMENT_HEADER: "hostile"}
        async with new_client() as client:
            while True:
                body = {"code": random.choice(ATTACKS), "language": "python", "run_timeout": 5}
                with suppress(httpx.HTTPError):
                    answer = await client.post(f"{self.sandbox}/run_code", json=body, headers=headers, timeout=200)
                    result = answer.json().get("run_result") if answer.status_code == HTTPStatus.OK else None
                    if "BREACH" in ((result or {}).get("stdout") or ""):
                        done.breaches.append(f"{body['code'][:200]}: {answer.text[:300]}")
                    done.programs += 1

    async def _requests(self, url: str, done: Done) -> None:
        address = urlsplit(url)
        while True:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    _, writer = await asyncio.open_connection(address.hostname, address.port)
                    writer.write(random.choice(REQUESTS))
                    with suppress(ConnectionError):
                        await writer.drain()
                    writer.close()
            done.requests += 1
            await asyncio.sleep(0.05)


class HostileProcess:
    """The process, and what it is told.

    Attributes:
        grader: URL of its grader.
    """

    def __init__(self, process: Process, grader: str) -> None:
        self._process = process
        self.grader = grader

    async def begin(self) -> None:
        """Let it be hostile."""
        await self._tell(b"begin\n")

    async def end(self) -> Done:
        """Let it stop; returns what was done since it began."""
        await self._tell(b"end\n")
        return Done(**json.loads(await self._line()))

    async def _tell(self, text: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        await self._process.stdin.drain()

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(END_SECONDS):
            return await self._process.stdout.readline()

    @classmethod
    @asynccontextmanager
    async def started(cls, hostility: Hostility) -> AsyncIterator["HostileProcess"]:
        """Start it; it ends with the block."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.soak.hostile", stdin=PIPE, stdout=PIPE, limit=1 << 24
        )
        try:
            made = cls(process, "")
            await made._tell(json.dumps(asdict(hostility)).encode() + b"\n")
            made.grader = json.loads(await made._line())["grader"]
            yield made
        finally:
            process.kill()
            await process.wait()


async def main() -> None:
    """Follow what stdin says until its end."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    hostility = Hostility(**json.loads(await reader.readline()))
    server = await serve(lambda _path, _body: random.choice(REPLIES))
    tell({"grader": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    async with server:
        while await reader.readline():
            done = Done()
            work = asyncio.create_task(hostility.run(done))
            line = await reader.readline()
            work.cancel()
            await asyncio.wait([work])
            if not line:
                return
            tell(asdict(done))


def tell(what: dict[str, object]) -> None:
    """Answer with a line."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
