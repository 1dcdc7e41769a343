"""A fake API server with the Sandbox resource of agent-sandbox, and exec over a web socket, at a port here."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.typing import Subprotocol

from tests.contract.sandbox.fakes.boxes import FakeBox, FakeProvider

SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
KNOWN = {"python:3.12-slim", "swebench/task-1:v2"}


class FakeKubernetes(FakeProvider):
    """A cluster whose Sandboxes are ready at the second look."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.policies: list[dict[str, Any]] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"kind": "Status", "message": "Unauthorized"})
        path = request.url.path
        if (request.method, path) == ("POST", POLICIES):
            self.policies.append(json.loads(request.content))
            return httpx.Response(201, json={})
        if (request.method, path) == ("POST", SANDBOXES):
            return self._create(json.loads(request.content))
        if (request.method, path) == ("GET", SANDBOXES):
            key, _, value = request.url.params["labelSelector"].partition("=")
            items = [
                {"metadata": {"name": box.id, "labels": box.labels}}
                for box in self.boxes.values()
                if box.labels.get(key) == value
            ]
            return httpx.Response(200, json={"items": items, "metadata": {}})
        if path.startswith("/api/v1/namespaces/default/pods/"):
            return self._pod(self.boxes.get(path.rpartition("/")[2]))
        name = path.removeprefix(f"{SANDBOXES}/")
        box = self.boxes.get(name)
        if box is None:
            return httpx.Response(404, json={"message": f"sandboxes.agents.x-k8s.io {name!r} not found"})
        if request.method == "DELETE":
            self.destroy(name)
            return httpx.Response(200, json={"status": "Success"})
        image = self._container(box.wanted)["image"]
        is_ready = "True" if image in KNOWN else "False"
        return httpx.Response(200, json={"status": {"conditions": [{"type": "Ready", "status": is_ready}]}})

    def _pod(self, box: FakeBox | None) -> httpx.Response:
        if box is None:
            return httpx.Response(404, json={"message": "pods not found"})
        image = self._container(box.wanted)["image"]
        waiting = {"reason": "ContainerCreating" if image in KNOWN else "ImagePullBackOff"}
        return httpx.Response(
            200, json={"status": {"containerStatuses": [{"image": image, "state": {"waiting": waiting}}]}}
        )

    def _create(self, body: dict[str, Any]) -> httpx.Response:
        about = body["metadata"]
        assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value) for value in about["labels"].values())
        if about["name"] in self.boxes:
            return httpx.Response(409, json={"message": "already exists"})
        box = self.make(about["name"], about["labels"], body)
        del self.boxes[box.id]
        box.id = about["name"]
        self.boxes[box.id] = box
        return httpx.Response(201, json=body)

    def _container(self, wanted: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = wanted["spec"]["podTemplate"]["spec"]["containers"][0]
        return found

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Answer commands at a port; gives the URL."""
        async with serve(
            self._talk, "127.0.0.1", 0, process_request=self._look, subprotocols=[Subprotocol("v5.channel.k8s.io")]
        ) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _box_of(self, path: str) -> FakeBox | None:
        match = re.fullmatch(r"/api/v1/namespaces/default/pods/([^/]+)/exec", urlsplit(path).path)
        assert match is not None
        return self.boxes.get(match[1])

    async def _look(self, _: ServerConnection, request: Request) -> Response | None:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return Response(401, "Unauthorized", Headers())
        return None if self._box_of(request.path) is not None else Response(404, "Not Found", Headers())

    async def _talk(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        box = self._box_of(connection.request.path)
        words = parse_qs(urlsplit(connection.request.path).query)
        assert words["container"] == ["box"] and words["command"][:2] == ["sh", "-c"]
        assert box is not None
        script = words["command"][2]
        if "run.sh" in script:
            code = await self.execute(box, script)
            if code is None:
                return  # the connection ends without a status
            content = b""
        else:
            code, content = await self._with_streams(box, script, connection)
        if content:
            await connection.send(b"\x01" + content)
        failed = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}}
        await connection.send(b"\x03" + json.dumps(failed if code else {"status": "Success"}).encode())

    async def _with_streams(self, box: FakeBox, script: str, connection: ServerConnection) -> tuple[int, bytes]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("sh", "-c", box.inside(script), stdin=pipe, stdout=pipe)
        assert process.stdin is not None

        async def feed() -> None:
            assert process.stdin is not None
            with suppress(ConnectionError, asyncio.CancelledError):
                async for message in connection:
                    assert isinstance(message, bytes) and message[:1] == b"\x00"
                    process.stdin.write(message[1:])
                    await process.stdin.drain()

        feeding = asyncio.create_task(feed())
        assert process.stdout is not None
        content = await process.stdout.read()
        code = await process.wait()
        feeding.cancel()
        await asyncio.wait([feeding])
        return code, content
