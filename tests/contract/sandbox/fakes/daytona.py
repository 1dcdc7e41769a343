"""A fake of Daytona: its REST API, and the toolbox in each sandbox."""

import base64
import json
import re
import shlex

import httpx

from tests.contract.sandbox.fakes.boxes import FakeProvider, pieces
from tests.contract.sandbox.fakes.e2b import parts_of

TOOLBOX = "https://proxy.app.daytona.io/toolbox"


class FakeDaytona(FakeProvider):
    """An organisation; sandboxes start at the second look."""

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"statusCode": 401, "message": "Unauthorized"})
        if request.url.host == "proxy.app.daytona.io":
            return await self._toolbox(request)
        assert request.url.host == "app.daytona.io"
        path = request.url.path.removeprefix("/api")
        if (request.method, path) == ("POST", "/sandbox"):
            body = json.loads(request.content)
            if any(box.name == body["name"] for box in self.boxes.values()):
                return httpx.Response(409, json={"statusCode": 409, "message": "name is taken"})
            return httpx.Response(200, json=self._view(self.make(body["name"], body["labels"], body).id, "creating"))
        if (request.method, path) == ("GET", "/sandbox"):
            wanted = json.loads(request.url.params["labels"])
            items = [box for box in self.boxes.values() if wanted.items() <= box.labels.items()]
            start = int(request.url.params.get("cursor", 0))
            page = [{"id": box.id, "labels": box.labels} for box in items[start : start + 1]]
            cursor = str(start + 1) if start + 1 < len(items) else None
            return httpx.Response(200, json={"items": page, "nextCursor": cursor})
        name = path.removeprefix("/sandbox/")
        box = self.boxes.get(name) or next((box for box in self.boxes.values() if box.name == name), None)
        if box is None:
            return httpx.Response(404, json={"statusCode": 404, "message": f"Sandbox {name} not found"})
        if request.method == "DELETE":
            self.destroy(box.id)
            return httpx.Response(200, json=self._view(box.id, "destroying"))
        return httpx.Response(200, json=self._view(box.id, self._state(box.wanted)))

    def _state(self, wanted: dict[str, object]) -> str:
        build = wanted.get("buildInfo")
        known = {"python:3.12-slim", "swebench/task-1:v2"}
        is_known = build is None or (isinstance(build, dict) and build["dockerfileContent"][5:-1] in known)
        return "started" if is_known else "build_failed"

    def _view(self, box_id: str, state: str) -> dict[str, object]:
        return {"id": box_id, "state": state, "toolboxProxyUrl": TOOLBOX, "errorReason": "no such image"}

    async def _toolbox(self, request: httpx.Request) -> httpx.Response:
        match = re.fullmatch(r"/toolbox/([^/]+)(/.*)", request.url.path)
        assert match is not None
        box = self.boxes.get(match[1])
        if box is None:
            return httpx.Response(400, json={"statusCode": 400, "message": "no IP address found. Is the Sandbox up?"})
        if match[2] == "/process/execute":
            body = json.loads(request.content)
            words = shlex.split(body["command"])  # as the toolbox does: it has no shell
            assert words[:2] == ["sh", "-c"]
            assert isinstance(body["timeout"], int)
            packed = words[2].split()[1]
            code = await self.execute(box, base64.b64decode(packed).decode())
            if code is None:
                return httpx.Response(502, json={"statusCode": 502, "message": "bad gateway"})
            return httpx.Response(200, json={"exitCode": code, "result": ""})
        if match[2] == "/files/bulk-upload":
            parts = parts_of(request)
            box.write(parts["files[0].path"].decode(), parts["files[0].file"])
            return httpx.Response(200)
        assert match[2] == "/files/download"
        content = box.read(request.url.params["path"])
        if content is None:
            return httpx.Response(400, json={"message": "file not found"})
        return httpx.Response(200, content=pieces(content))
