"""Boxes for fake providers: each is a directory of this machine, in which commands really run."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from flotilla.services.sandbox.boxes.work import BASE


@dataclass
class FakeBox:
    """One box: where it is, and what the provider was told of it."""

    id: str
    home: Path
    name: str
    labels: dict[str, str]
    wanted: dict[str, object] = field(default_factory=dict)
    token: str = ""

    def inside(self, text: str) -> str:
        return text.replace(BASE, str(self.home / "flotilla"))

    async def execute(self, script: str) -> int:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8"}
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", self.inside(script), cwd=self.home, env=environment, start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        return code if code >= 0 else 128 - code

    def write(self, path: str, content: bytes) -> None:
        Path(self.inside(path)).write_bytes(content)

    def read(self, path: str) -> bytes | None:
        file = Path(self.inside(path))
        return file.read_bytes() if file.is_file() else None

    def end(self) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if Path(process.cwd()).is_relative_to(self.home):
                    process.kill()
        shutil.rmtree(self.home, ignore_errors=True)


Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


@dataclass
class Fault:
    """What goes wrong with the next call of a kind: a status, a hang, or an answer that is lost on its way."""

    call: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = "it went wrong"
    hangs: bool = False
    is_lost: bool = False
    times: int = 1


class FakeProvider(httpx.AsyncBaseTransport):
    """What all fakes have: boxes, the calls that were made, and faults."""

    key = "key-that-nobody-may-see"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boxes: dict[str, FakeBox] = {}
        self.calls: list[str] = []
        self.faults: list[Fault] = []
        self.num_made = 0
        self.before_execute: Callable[[FakeBox], None] = lambda _: None

    def make(self, name: str, labels: dict[str, str], wanted: dict[str, object]) -> FakeBox:
        self.num_made += 1
        box_id = f"box{self.num_made}"
        home = self.root / box_id
        home.mkdir()
        box = self.boxes[box_id] = FakeBox(box_id, home, name, labels, wanted)
        return box

    def destroy(self, box_id: str) -> bool:
        box = self.boxes.pop(box_id, None)
        if box is not None:
            box.end()
        return box is not None

    async def execute(self, box: FakeBox, script: str) -> int | None:
        """Run a script; None if the box was taken away meanwhile."""
        self.before_execute(box)
        if box.id not in self.boxes:
            return None
        code = await box.execute(script)
        return code if box.id in self.boxes else None

    def fault_of(self, call: str) -> Fault | None:
        """Find what goes wrong with a call, and count it."""
        fault = next((each for each in self.faults if re.search(each.call, call)), None)
        if fault is not None:
            fault.times -= 1
            if fault.times == 0:
                self.faults.remove(fault)
        return fault

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        call = f"{request.method} {request.url.path}"
        self.calls.append(call)
        fault = self.fault_of(call)
        if fault is not None:
            if fault.hangs:
                await asyncio.sleep(3600.0)
            if fault.is_lost:
                await self.answer(request)
                raise httpx.ReadError("the connection broke", request=request)
            if fault.status:
                return httpx.Response(fault.status, headers=fault.headers, content=pieces(fault.body.encode()))
        return to_be_read(await self.answer(request))

    async def answer(self, request: httpx.Request) -> httpx.Response:
        raise NotImplementedError

    def serving(self) -> AbstractAsyncContextManager[str] | None:
        """Answer at a port, whose URL is given; None for fakes that are asked without sockets."""
        return None

    async def aclose(self) -> None:
        """A provider outlives its clients."""

    def end(self) -> None:
        for box_id in list(self.boxes):
            self.destroy(box_id)


def to_be_read(reply: httpx.Response) -> httpx.Response:
    """Make an answer whose content is still to come, as over a network."""
    if not reply.is_stream_consumed:
        return reply
    headers = {name: value for name, value in reply.headers.items() if name != "content-length"}
    return httpx.Response(reply.status_code, headers=headers, content=pieces(reply.content))


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for each in content:
        yield each
