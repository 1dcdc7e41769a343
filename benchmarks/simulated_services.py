"""Many services simulated by one event loop, cheap enough that what is measured is the gateway and not they.

Each registers, keeps its long poll open, acknowledges what it is told and polls again, and pushes its state once in ten
seconds, as ``shared/service/membership`` does. An answer is dated when its last byte has come, and decoded once for all
services that get the same one.
"""

import asyncio
import functools
import json
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flotilla.shared.errors import FlotillaError, NotFound
from flotilla.shared.net.client.client import problem_to_error
from flotilla.shared.schemas.service import Capabilities, Registration, ServiceKind
from flotilla.shared.service.membership import POLL_SECONDS

TOKEN = "scale-benchmark"
PUSH_SECONDS = 10.0
PAUSE_SECONDS = 0.05
"""Before a call whose connection broke is repeated, as services' calls are."""

LENGTH = re.compile(rb"content-length: ([0-9]+)", re.IGNORECASE)
HEAD_END = b"\r\n\r\n"
STATUS = slice(9, 12)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the gateway; ``read_at`` is when its last byte had come, by the monotonic clock."""

    status: int
    body: bytes
    read_at: float


@dataclass(frozen=True, slots=True)
class Push:
    """One observation that was sent without waiting: when, and how long its answer took, in seconds."""

    sent_at: float
    seconds: float


class KeptConnection(asyncio.Protocol):
    """A kept connection: one call at a time."""

    _transport: asyncio.Transport
    _answer: asyncio.Future[Answer]

    def __init__(self) -> None:
        self._received = b""
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Complete the call once its whole answer has come."""
        self._received += data
        end = self._received.find(HEAD_END)
        length = LENGTH.search(self._received, 0, end) if end >= 0 else None
        if length is None or len(self._received) < end + len(HEAD_END) + int(length[1]):
            return
        received, self._received = self._received, b""
        answer = Answer(int(received[STATUS]), received[end + len(HEAD_END) :], time.monotonic())
        if not self._answer.done():
            self._answer.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the call under way."""
        self.is_lost = True
        if hasattr(self, "_answer") and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the gateway closed the connection"))

    async def call(self, request: bytes) -> Answer:
        """Send a request and wait for its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        """Close it."""
        self._transport.abort()


class SimulatedService:
    """One service: a kept connection for its poll, another for its pushes."""

    def __init__(self, address: str, number: int, kind: ServiceKind) -> None:
        self._host, self._port = urlsplit(address).hostname or "", urlsplit(address).port or 0
        self._number, self.kind = number, kind
        self.id = ""
        self._tag: str | None = None
        self._desired: dict[str, Any] = {"state": "idle"}
        self.told_at: dict[str, float] = {}
        """Desired state -> when it was read last."""
        self.version: int | None = None
        """Policy version that it was told to serve."""
        self._held_image: str | None = None
        self.pushes: list[Push] = []
        self.lost_leases = self.repeated_calls = 0
        self._connections: dict[str, KeptConnection] = {}
        self._registering = asyncio.Lock()

    async def run(self) -> None:
        """Register, then poll and push until cancelled."""
        await self._register()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._poll())
                tasks.create_task(self._push())
        finally:
            for connection in self._connections.values():
                connection.close()

    async def _register(self) -> None:
        registration = Registration(
            kind=self.kind,
            address=f"http://127.0.0.1:{20000 + self._number}",
            host="simulated",
            pid=self._number + 1,
            capabilities=Capabilities(transports=("gloo", "relay")),
            incarnation=f"simulated-{self._number}-{self.lost_leases}",
        )
        # Not on the connection of a poll that still waits: its answer would be taken for this one's.
        answer = await self._call("registration", "POST", "/v1/services", registration.model_dump(mode="json"))
        self._connections.pop("registration").close()
        self.id, self._tag = json.loads(answer.body)["service_id"], None

    def _observed(self) -> dict[str, Any]:
        assignment = self._desired.get("assignment")
        return {
            "acknowledged": self._tag,
            "experiment_id": assignment and assignment["experiment_id"],
            "state": self._desired["state"],
            "policy_version": self._desired["policy_version"] if assignment else None,
            "publication": self._report(),
            "held_image": self._held_image,
            "step": 0 if assignment and self.kind is ServiceKind.TRAINER else None,
            "load": {"running": 1, "waiting": 0, "tokens_per_second": 1000.0},
        }

    def _report(self) -> dict[str, Any] | None:
        """What a rollout says of the publication that it was told of: whatever it is asked for is done at once."""
        order = self._desired.get("publication")
        if order is None:
            return None
        state = "joined" if order["phase"] == "preparing" else "received"
        if order["phase"] == "preparing" and order["rendezvous"] is None:
            return None
        found = {"version": order["version"], "epoch": order["epoch"], "state": state}
        if state == "joined":
            return found
        self._held_image = order["manifest"]["checksum"]
        return found | {"checksum": self._held_image}

    async def _poll(self) -> None:
        while True:
            answer = await self._status("poll", POLL_SECONDS)
            desired = _decoded(answer.body)
            if desired["tag"] != self._tag:
                self._tag, self._desired = desired["tag"], desired
                self.told_at[desired["state"]] = answer.read_at
                self.version = desired["policy_version"]

    async def _push(self) -> None:
        await asyncio.sleep(PUSH_SECONDS * (self._number % 97) / 97)
        while True:
            sent_at = time.monotonic()
            answer = await self._status("push", 0)
            self.pushes.append(Push(sent_at, answer.read_at - sent_at))
            await asyncio.sleep(PUSH_SECONDS)

    async def _status(self, use: str, wait: float) -> Answer:
        while True:
            called_as = self.id
            try:
                return await self._call(use, "PUT", f"/v1/services/{called_as}/status?wait={wait}", self._observed())
            except NotFound:
                # The gateway was too slow to read its renewals; the other call may have registered already.
                async with self._registering:
                    if called_as == self.id:
                        self.lost_leases += 1
                        await self._register()

    async def _call(self, use: str, method: str, path: str, body: Any) -> Answer:
        """Call until it is answered, again where the connection broke or the gateway is busy; who measures gives up."""
        while True:
            try:
                return await self._attempt(use, method, path, body)
            except (ConnectionError, FlotillaError) as error:
                if isinstance(error, FlotillaError) and not error.retryable:
                    raise
                self.repeated_calls += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def _attempt(self, use: str, method: str, path: str, body: Any) -> Answer:
        # The gateway closes a connection that was idle for some seconds.
        if use not in self._connections or self._connections[use].is_lost:
            loop = asyncio.get_running_loop()
            _, self._connections[use] = await loop.create_connection(KeptConnection, self._host, self._port)
        content = json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        )
        if method == "POST":
            head += f"Idempotency-Key: simulated-{self._number}-{self.lost_leases}\r\n"
        answer = await self._connections[use].call(head.encode() + b"\r\n" + content)
        if not 200 <= answer.status < 300:
            raise problem_to_error(answer.status, answer.body, f"{method} {path}")
        return answer


# An order of a publication is for one service alone.
@functools.lru_cache(maxsize=2048)
def _decoded(body: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body)
    return decoded
