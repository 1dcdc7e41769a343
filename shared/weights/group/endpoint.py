"""The weight endpoint: a process that has imported torch once and forks a member for each epoch.

It answers calls of its service (``children.serving``), stays single-threaded and runs no torch code itself, so that
forking is safe, and a fork costs milliseconds where a fresh import of torch costs seconds. Members are aborted by
killing them. Everything ends with the service.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any

from flotilla.shared.children.serving import progress_of_call, serve
from flotilla.shared.children.spawning import Forked
from flotilla.shared.errors import Conflict, DeadlineExceeded, FlotillaError, NotFound, WeightTransferFailed
from flotilla.shared.faults.armed import arm_process
from flotilla.shared.weights.group import member
from flotilla.shared.weights.group.endpoint_protocol import Opening


class Member:
    """A member process: its messages become results. When it ends, all open ones fail with the cause."""

    def __init__(self, opening: Opening) -> None:
        loop = asyncio.get_running_loop()
        self._epoch = opening.epoch
        self.opened: asyncio.Future[int] = loop.create_future()
        self.joined: asyncio.Future[None] = loop.create_future()
        self._replies: deque[tuple[asyncio.Future[str | None], Callable[[object], None]]] = deque()
        self._failure: FlotillaError | None = None
        self._process = Forked(lambda control: member.serve(control, opening), self._hear)
        self.pid = self._process.pid
        self._watching = asyncio.create_task(self._watch(), name=f"member of epoch {opening.epoch}")

    async def transfer(self, command: object, on_arrived: Callable[[object], None]) -> str | None:
        """Have a command carried out after those before it; see ``EndpointClient.receive``."""
        if self._failure is not None:
            raise self._failure
        reply: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._replies.append((reply, on_arrived))
        try:
            self._process.tell(json.dumps(command).encode() + b"\n")
        except OSError as error:
            self._fail(WeightTransferFailed(f"the member of epoch {self._epoch} cannot be reached: {error}"))
        return await asyncio.shield(reply)

    async def close(self) -> None:
        """Kill it, whatever it is doing; returns when it has ended."""
        self._fail(WeightTransferFailed(f"epoch {self._epoch} was closed"))
        self._process.kill()
        await asyncio.shield(self._watching)

    async def _watch(self) -> None:
        cause = await self._process.cause
        detail = f"the member process of epoch {self._epoch} {cause}"
        self._fail(WeightTransferFailed(detail, epoch=self._epoch))

    def _hear(self, line: bytes) -> None:
        match json.loads(line):
            case ["opened", port]:
                _settle(self.opened, port)
            case ["joined"]:
                _settle(self.joined, None)
            case ["arrived", num_bytes]:
                self._replies[0][1](num_bytes)
            case ["done", checksum]:
                _settle(self._replies.popleft()[0], checksum)
            case ["failed", detail, is_timeout]:
                kind = DeadlineExceeded if is_timeout else WeightTransferFailed
                self._fail(kind(f"weight group of epoch {self._epoch}: {detail}", epoch=self._epoch))

    def _fail(self, error: FlotillaError) -> None:
        """Let everything that waits for this member fail, and what is asked later too."""
        self._failure = self._failure or error
        waiting: list[asyncio.Future[Any]] = [self.opened, self.joined, *(reply for reply, _ in self._replies)]
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure)
                future.exception()  # retrieved, so asyncio does not warn


class Endpoint:
    """Forks members, one for each epoch, and passes on what they are asked and answer."""

    about = None

    def __init__(self, opening: None) -> None:
        self._members: dict[int, Member] = {}

    async def handle(self, content: Any) -> object:
        """Do what ``EndpointClient`` asks for."""
        match content:
            case ["open", facts]:
                opening = Opening.model_validate(facts)
                if opening.epoch in self._members:
                    raise Conflict(f"epoch {opening.epoch} is open already")
                self._members[opening.epoch] = Member(opening)
                return self._members[opening.epoch].pid
            case ["opened", epoch]:
                return await asyncio.shield(self._member(epoch).opened)
            case ["joined", epoch]:
                return await asyncio.shield(self._member(epoch).joined)
            case ["transfer", epoch, command]:
                return await self._member(epoch).transfer(command, progress_of_call())
            case ["close", epoch] if epoch in self._members:
                await self._members.pop(epoch).close()
        return None

    def _member(self, epoch: int) -> Member:
        if epoch not in self._members:
            raise NotFound(f"epoch {epoch} is not open")
        return self._members[epoch]


def _settle(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


if __name__ == "__main__":
    arm_process("weights")
    serve(Endpoint)
