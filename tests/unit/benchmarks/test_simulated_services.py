"""Simulated services do what real ones do when the gateway has given them up."""

import asyncio
import contextlib
import json
import re

from benchmarks.simulated_services import SimulatedService
from flotilla.shared.schemas.service import ServiceKind
from tests.unit.gateway.builders import until


class Gateway:
    """Answers a poll when it is told to, and the first push with: not registered."""

    def __init__(self) -> None:
        self.registered = 0
        self.pushes = self.polls = 0
        self.may_answer = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = re.search("Content-Length: ([0-9]+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                status, answer = await self.answer_to(head)
                body = json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    async def answer_to(self, head: str) -> tuple[int, dict[str, object]]:
        if head.startswith("POST"):
            self.registered += 1
            return 201, {"service_id": f"rollout-{self.registered}"}
        if "wait=0 " in head:
            await until(lambda: self.polls > 0)
            self.pushes += 1
            return (404, {"code": "not_found"}) if self.pushes == 1 else (200, {})
        self.polls += 1
        await self.may_answer.wait()
        return 200, {"tag": f"{self.polls}", "state": "paused", "policy_version": None}


async def test_one_that_registers_again_still_hears_the_answer_that_it_waits_for() -> None:
    gateway = Gateway()
    async with await asyncio.start_server(gateway.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        service = SimulatedService(f"http://127.0.0.1:{port}", 0, ServiceKind.ROLLOUT)
        running = asyncio.create_task(service.run())
        await until(lambda: gateway.pushes == 2)
        assert (service.id, service.lost_leases, service.told_at) == ("rollout-2", 1, {})
        gateway.may_answer.set()
        await until(lambda: bool(service.told_at))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert list(service.told_at) == ["paused"]
