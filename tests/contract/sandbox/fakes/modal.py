"""A fake of Modal: its control plane and the command router of its workers, at a port here, by the package's own stubs.

What is served is what the package asks. That Modal answers so is the package's word: it was never seen with an account.
"""
# ruff: noqa: N802  the methods are named by the interface

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from grpclib import GRPCError, Status
from grpclib.const import Handler
from grpclib.server import Server, Stream
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.contract.sandbox.fakes.boxes import FakeBox, FakeProvider, Fault

FILES = "/__modal/.bin/modal-sandbox-fs-tools"
KNOWN = {"FROM python:3.12-slim", "FROM swebench/task-1:v2"}
STATUSES = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    429: Status.RESOURCE_EXHAUSTED,
    500: Status.INTERNAL,
    503: Status.UNAVAILABLE,
}
PIPE = router.TaskExecStdoutConfig.TASK_EXEC_STDOUT_CONFIG_PIPE


@dataclass
class Exec:
    """A command in a sandbox: what it is given, and what it says."""

    box: FakeBox
    request: Any
    stdin: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stdout: bytes = b""
    ended: "asyncio.Task[int | None] | None" = None


class FakeModal(FakeProvider):
    """A workspace whose app has sandboxes of the second kind, each listed on a page of its own."""

    key = f"ak-known:{FakeProvider.key}"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.url = ""
        self.images: dict[str, str] = {}
        self.execs: dict[str, Exec] = {}
        self.made_at: dict[str, float] = {}

    def make(self, name: str, labels: dict[str, str], wanted: dict[str, object]) -> FakeBox:
        box = super().make(name, labels, wanted)
        del self.boxes[box.id]
        box.id = f"sb-{box.id}"
        self.boxes[box.id] = box
        self.made_at[box.id] = time.time()
        return box

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Answer at a port; gives the URL."""
        server = Server([_of(Control, self), _of(Router, self)], status_details_codec=custom_detail_codec)
        await server.start("127.0.0.1", 0)
        assert server._server is not None and server._server.sockets
        self.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
        try:
            yield self.url
        finally:
            server.close()
            for each in self.execs.values():
                if each.ended is not None:
                    each.ended.cancel()
                    await asyncio.wait([each.ended])
            await server.wait_closed()

    async def served(self, name: str, answer: Callable[[Stream[Any, Any]], Awaitable[None]], stream: Any) -> None:
        """Serve one call, as the next fault of its kind has it."""
        self.calls.append(f"POST /{name}")
        said = stream.metadata
        if name.startswith("TaskExec"):
            assert said["authorization"].startswith("Bearer ")
        elif f"{said['x-modal-token-id']}:{said['x-modal-token-secret']}" != self.key:
            raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")
        fault = self.fault_of(f"POST /{name}")
        if fault is None:
            return await answer(stream)
        if fault.hangs:
            await asyncio.sleep(3600.0)
        if fault.is_lost:
            await answer(Unheard(stream))  # type: ignore[arg-type]
            raise GRPCError(Status.UNAVAILABLE, "the connection broke")
        raise _error(fault)

    def box_of(self, box_id: str) -> FakeBox:
        if box_id not in self.boxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {box_id} not found")
        return self.boxes[box_id]

    async def ran(self, running: Exec) -> int | None:
        """Run a command; None if its box was taken away meanwhile."""
        box, words = running.box, list(running.request.command_args)
        async with asyncio.timeout(running.request.timeout_secs or None):
            if words[0] == FILES:
                ((what, about),) = json.loads(words[1]).items()
                assert what == "WriteFile"
                box.write(about["path"], await running.stdin)
                return 0
            assert words[:2] == ["sh", "-c"]
            if running.request.stdout_config != PIPE:
                return await self.execute(box, words[2])
            process = await asyncio.create_subprocess_exec(
                *map(box.inside, words), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
            )
            running.stdout, _ = await process.communicate()
            return process.returncode


class Unheard:
    """A stream whose answers get lost."""

    def __init__(self, stream: Stream[Any, Any]) -> None:
        self.stream, self.metadata = stream, stream.metadata

    async def recv_message(self) -> Any:
        return await self.stream.recv_message()

    async def send_message(self, message: Message) -> None:
        pass


def _error(fault: Fault) -> GRPCError:
    pause = fault.headers.get("Retry-After")
    details = [api.RPCRetryPolicy(retry_after_secs=float(pause))] if pause else None
    return GRPCError(STATUSES[fault.status], fault.body, details)


def _of(kind: type[Any], fake: FakeModal) -> Any:
    """Make a servicer of some methods of an interface that has hundreds."""
    kind.__abstractmethods__ = frozenset()
    return kind(fake)


def _watched(fake: FakeModal, mapping: dict[str, Handler]) -> dict[str, Handler]:
    return {
        path: Handler(partial(fake.served, path.rpartition("/")[2], each.func), *each[1:])
        for path, each in mapping.items()
    }


def _jwt(seconds: float) -> str:
    parts = ({"alg": "none"}, {"exp": time.time() + seconds})
    packed = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts]
    return ".".join([*packed, "signature"])


class Control(ModalClientBase):
    """The control plane."""

    def __init__(self, fake: FakeModal) -> None:
        self.fake = fake

    def __mapping__(self) -> dict[str, Handler]:
        return _watched(self.fake, super().__mapping__())

    async def AuthTokenGet(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api.AuthTokenGetResponse(token=_jwt(1200.0)))

    async def AppGetOrCreate(self, stream: Any) -> None:
        asked = await stream.recv_message()
        assert (asked.app_name, asked.object_creation_type) == ("flotilla", api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING)
        await stream.send_message(api.AppGetOrCreateResponse(app_id="ap-1"))

    async def EnvironmentGetOrCreate(self, stream: Any) -> None:
        await stream.recv_message()
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def ImageGetOrCreate(self, stream: Any) -> None:
        asked = await stream.recv_message()
        command = asked.image.dockerfile_commands[0]
        image_id = f"im-{len(self.fake.images)}"
        self.fake.images[image_id] = command
        result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
        if command not in KNOWN:
            result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_FAILURE, exception="manifest unknown")
        await stream.send_message(api.ImageGetOrCreateResponse(image_id=image_id, result=result))

    async def ImageFromId(self, stream: Any) -> None:
        asked = await stream.recv_message()
        if asked.image_id not in self.fake.images:
            raise GRPCError(Status.NOT_FOUND, f"no image {asked.image_id}")
        await stream.send_message(api.ImageFromIdResponse(image_id=asked.image_id))

    async def SandboxCreateV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        assert asked.app_id == "ap-1"
        definition = asked.definition
        wanted = {
            "image": self.fake.images[definition.image_id],
            "command": list(definition.entrypoint_args),
            "timeout": definition.timeout_secs,
            "is_closed": definition.network_access.network_access_type == api.NetworkAccess.BLOCKED,
            "cpu": (definition.resources.milli_cpu, definition.resources.milli_cpu_max),
            "memory": (definition.resources.memory_mb, definition.resources.memory_mb_max),
        }
        box = self.fake.make("", {each.tag_name: each.tag_value for each in asked.tags}, wanted)
        access = api.CommandRouterAccess(url=self.fake.url, jwt=_jwt(1200.0))
        await stream.send_message(
            api.SandboxCreateV2Response(sandbox_id=box.id, task_id=f"ta-{box.id}", command_router_access=access)
        )

    async def SandboxListV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        assert asked.app_id == "ap-1" and not asked.include_finished
        wanted = {each.tag_name: each.tag_value for each in asked.tags}
        before = asked.before_timestamp or float("inf")
        there = [
            box
            for box in sorted(self.fake.boxes.values(), key=lambda box: -self.fake.made_at[box.id])
            if wanted.items() <= box.labels.items() and self.fake.made_at[box.id] < before
        ]
        page = [api.SandboxInfo(id=box.id, created_at=self.fake.made_at[box.id]) for box in there[:1]]
        await stream.send_message(api.SandboxListResponse(sandboxes=page))

    async def SandboxTagsGetV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        labels = self.fake.box_of(asked.sandbox_id).labels
        tags = [api.SandboxTag(tag_name=name, tag_value=value) for name, value in labels.items()]
        await stream.send_message(api.SandboxTagsGetResponse(tags=tags))

    async def SandboxTerminateV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        self.fake.destroy(asked.sandbox_id)
        await stream.send_message(api.SandboxTerminateResponse())

    async def SandboxWaitV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        is_there = asked.sandbox_id in self.fake.boxes
        if not is_there and asked.sandbox_id not in self.fake.made_at:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_id} not found")
        over = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_TERMINATED)
        await stream.send_message(api.SandboxWaitResponse(result=None if is_there else over))

    async def SandboxGetTaskIdV2(self, stream: Any) -> None:
        asked = await stream.recv_message()
        await stream.send_message(api.SandboxGetTaskIdResponse(task_id=f"ta-{asked.sandbox_id}"))

    async def SandboxGetCommandRouterAccess(self, stream: Any) -> None:
        asked = await stream.recv_message()
        self.fake.box_of(asked.sandbox_id)
        await stream.send_message(api.SandboxGetCommandRouterAccessResponse(url=self.fake.url, jwt=_jwt(1200.0)))


class Router(TaskCommandRouterBase):
    """The workers' part: commands, and what goes in and out of them."""

    def __init__(self, fake: FakeModal) -> None:
        self.fake = fake

    def __mapping__(self) -> dict[str, Handler]:
        return _watched(self.fake, super().__mapping__())

    async def TaskExecStart(self, stream: Any) -> None:
        asked = await stream.recv_message()
        box = self.fake.box_of(asked.task_id.removeprefix("ta-"))
        if asked.exec_id not in self.fake.execs:
            running = self.fake.execs[asked.exec_id] = Exec(box, asked)
            running.ended = asyncio.create_task(self.fake.ran(running))
        await stream.send_message(router.TaskExecStartResponse())

    async def TaskExecWait(self, stream: Any) -> None:
        asked = await stream.recv_message()
        running = self.fake.execs[asked.exec_id]
        assert running.ended is not None
        try:
            code = await asyncio.shield(running.ended)
        except TimeoutError:
            await stream.send_message(router.TaskExecWaitResponse(signal=9))
            return
        if code is None or running.box.id not in self.fake.boxes:
            raise GRPCError(Status.NOT_FOUND, f"task {asked.task_id} has shut down")
        await stream.send_message(router.TaskExecWaitResponse(code=code))

    async def TaskExecStdioRead(self, stream: Any) -> None:
        asked = await stream.recv_message()
        running = self.fake.execs[asked.exec_id]
        assert running.ended is not None
        await asyncio.wait([running.ended])
        if running.box.id not in self.fake.boxes:
            raise GRPCError(Status.NOT_FOUND, f"task {asked.task_id} has shut down")
        for at in range(asked.offset, len(running.stdout), 1 << 16):
            await stream.send_message(router.TaskExecStdioReadResponse(data=running.stdout[at : at + (1 << 16)]))

    async def TaskExecStdinWriteStream(self, stream: Any) -> None:
        start = (await stream.recv_message()).start
        running, content = self.fake.execs[start.exec_id], bytearray()
        assert start.offset == 0
        async for message in stream:
            if message.HasField("end"):
                break
            content += message.data
        running.stdin.set_result(bytes(content))
        await stream.send_message(router.TaskExecStdinWriteStreamResponse())
