"""A grader that fails in every way: a server of its own, run as a module, which prints its address.

Everything that it is asked is worth ``worth(response)``, which is never 0; what it says besides is false. ``/grade``
answers at once, ``/later`` with 202 and by callback.
"""

import argparse
import asyncio
import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

from flotilla.shared.net.authorisation.tokens import callback_key, signature

SECRET = "the graders' secret"
AT_ONCE = ("status_500", "slow", "hangs", "half_closed", "wrong_length", "not_a_number", "500_then_200")
BY_CALLBACK = (
    "status_500",
    "slow",
    "duplicate",
    "conflicting",
    "late",
    "forged",
    "forged_address",
    "replayed",
    "never",
)


def worth(response: str) -> float:
    """Return what a response is worth: 0.1 to 0.99."""
    return 0.1 + zlib.crc32(response.encode()) % 90 / 100


class FaultyGrader:
    """Answers requests; a share of them wrongly, evenly of each kind.

    Args:
        share: of the calls that go wrong.
        seconds: that an answer takes; a slow one ten times as long.
        late_seconds: after which a callback is too late.
        seed: of what goes wrong.
    """

    def __init__(self, share: float, seconds: float, late_seconds: float, seed: int) -> None:
        self._share, self._seconds, self._late_seconds = share, seconds, late_seconds
        self._dice = random.Random(seed)
        self._failed_once: set[str] = set()
        self._callbacks: set[asyncio.Task[None]] = set()
        self._last: tuple[str, bytes, dict[str, str]] | None = None
        self._http = httpx.AsyncClient(trust_env=False, timeout=30)
        self.faults: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.splitlines()
                fields = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if not await self._answer(first.split()[1], body, writer):
                    break
        writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection stays."""
        if path == "/stats":
            said = {"faults": dict(self.faults), "statuses": dict(self.statuses)}
            return await send(writer, 200, json.dumps(said).encode())
        request = json.loads(body)
        kinds = BY_CALLBACK if path == "/later" else AT_ONCE
        fault = self._dice.choice(kinds) if self._dice.random() < self._share else None
        if fault is not None:
            self.faults[fault] += 1
        if fault == "status_500" or (fault == "500_then_200" and request["id"] not in self._failed_once):
            self._failed_once.add(request["id"])
            return await send(writer, 500, b"{}")
        if path == "/later":
            task = asyncio.create_task(self._call_back(request, fault))
            self._callbacks.add(task)
            task.add_done_callback(self._callbacks.discard)
            return await send(writer, 202, b"{}")
        await asyncio.sleep(3600 if fault == "hangs" else self._seconds * (10 if fault == "slow" else 1))
        return await send(writer, 200, answer(request, fault), is_half=fault == "half_closed")

    async def _call_back(self, request: dict[str, Any], fault: str | None) -> None:
        url, content = request["callback_url"], answer(request, None)
        zeros = json.dumps({"grades": [{"reward": 0.0}] * len(request["samples"])}).encode()
        await asyncio.sleep(self._seconds * (10 if fault == "slow" else 1))
        if fault == "never":
            return
        if fault == "late":
            await asyncio.sleep(self._late_seconds)
        if fault == "forged":
            await self._post("forged", url, zeros, signed(request["id"], zeros, secret="a guess"))
            await self._post("forged", url, zeros, {})
        if fault == "forged_address":
            path, _, _ = url.rpartition("=")
            await self._post("forged_address", f"{path}={'0' * 32}", zeros, signed(request["id"], zeros))
        if fault == "replayed":
            old = signed(request["id"], zeros, age_seconds=600)
            await self._post("replayed", url, zeros, old)
            if self._last is not None:  # another request's answer, with the signature that it had
                await self._post("replayed", url, self._last[1], self._last[2])
        headers = signed(request["id"], content)
        await self._post("late" if fault == "late" else "right", url, content, headers)
        if fault == "duplicate":
            await self._post("duplicate", url, content, headers)
        if fault == "conflicting":
            await self._post("conflicting", url, zeros, signed(request["id"], zeros))
        self._last = url, content, headers

    async def _post(self, what: str, url: str, body: bytes, headers: dict[str, str]) -> None:
        for _ in range(20):
            try:
                status = (await self._http.post(url, content=body, headers=headers)).status_code
            except httpx.HTTPError:
                status = 503
            if status != 503:
                break
            await asyncio.sleep(0.05)
        self.statuses[f"{what}: {status}"] += 1


def answer(request: dict[str, Any], fault: str | None) -> bytes:
    """Make the answer to a request, right but for a fault."""
    grades: list[dict[str, Any]] = [{"reward": worth(sample["response"])} for sample in request["samples"]]
    if fault == "wrong_length":
        grades = [{"reward": 0.0}] * (len(grades) - 1)
    if fault == "not_a_number":
        grades = [{"reward": float("nan")} for _ in grades]
    return json.dumps({"id": request["id"], "grades": grades}).encode()


def signed(name: str, body: bytes, *, secret: str = SECRET, age_seconds: int = 0) -> dict[str, str]:
    """Sign a callback as docs/reward.md says."""
    timestamp = str(int(time.time()) - age_seconds)
    said = signature(callback_key(secret, name), timestamp, body)
    return {"X-Flotilla-Timestamp": timestamp, "X-Flotilla-Signature": f"sha256={said}"}


async def send(writer: asyncio.StreamWriter, status: int, body: bytes, *, is_half: bool = False) -> bool:
    """Send an answer, or half of one; returns whether the connection stays."""
    head = f"HTTP/1.1 {status} _\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + (body[: len(body) // 2] if is_half else body))
    await writer.drain()
    return not is_half


async def run(arguments: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    grader = FaultyGrader(arguments.share, arguments.seconds, arguments.late_seconds, arguments.seed)
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] = grader.serve
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--late-seconds", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(run(parser.parse_args()))
