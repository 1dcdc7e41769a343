"""A fake of E2B: its REST API, and envd's process service and files in each sandbox."""

import base64
import json
import re
import struct
from email.parser import BytesParser
from email.policy import HTTP

import httpx

from tests.contract.sandbox.fakes.boxes import FakeBox, FakeProvider, pieces

ENVD = re.compile(r"sandbox\.e2b\.app")


def parts_of(request: httpx.Request) -> dict[str, bytes]:
    """Read a multipart body."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    found = {}
    for part in BytesParser(policy=HTTP).parsebytes(head + request.content).iter_parts():
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        found[str(part.get_param("name", header="content-disposition"))] = content
    return found


def message(said: object, flags: int = 0) -> bytes:
    text = json.dumps(said).encode()
    return struct.pack(">BI", flags, len(text)) + text


class FakeE2B(FakeProvider):
    """An account with the template ``base``."""

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if ENVD.fullmatch(request.url.host):
            return await self._envd(request)
        assert request.url.host == "api.e2b.app"
        if request.headers.get("x-api-key") != self.key:
            return httpx.Response(401, json={"code": 401, "message": "Invalid API key"})
        call = f"{request.method} {request.url.path}"
        if call == "POST /sandboxes":
            body = json.loads(request.content)
            if body["templateID"] not in {"python:3.12-slim", "swebench/task-1:v2"}:
                return httpx.Response(404, json={"code": 404, "message": f"template {body['templateID']} not found"})
            box = self.make("", body["metadata"], body)
            box.token = f"token of {box.id}"
            made = {
                "templateID": "base", "sandboxID": box.id, "clientID": "c", "envdVersion": "0.6.7",
                "envdAccessToken": box.token, "domain": None,
            }  # fmt: skip
            return httpx.Response(201, json=made)
        if call == "GET /v2/sandboxes":
            key, _, value = request.url.params["metadata"].partition("=")
            listed = [box for box in self.boxes.values() if box.labels.get(key) == value]
            start = int(request.url.params.get("nextToken", 0))
            page = [{"sandboxID": box.id, "metadata": box.labels, "state": "running"} for box in listed[start:]][:1]
            headers = {"x-next-token": str(start + 1)} if start + 1 < len(listed) else {}
            return httpx.Response(200, json=page, headers=headers)
        assert request.method == "DELETE"
        is_gone = self.destroy(request.url.path.removeprefix("/sandboxes/"))
        return httpx.Response(204 if is_gone else 404, json=None if is_gone else {"code": 404, "message": "no"})

    async def _envd(self, request: httpx.Request) -> httpx.Response:
        assert self.key not in str(request.headers), "the account's key is the platform's alone"
        assert request.headers["e2b-sandbox-port"] == "49983"
        box = self.boxes.get(request.headers["e2b-sandbox-id"])
        if box is None:
            return httpx.Response(502, json={"code": 502, "message": "The sandbox was not found"})
        if request.headers.get("x-access-token") != box.token:
            return httpx.Response(401, json={"code": 401, "message": "unauthorized"})
        if request.url.path == "/files":
            return self._files(request, box)
        assert request.url.path == "/process.Process/Start"
        assert request.headers["content-type"] == "application/connect+json"
        flags, length = struct.unpack_from(">BI", request.content)
        asked = json.loads(request.content[5:])
        assert (flags, length) == (0, len(request.content) - 5)
        assert asked["process"]["cmd"] == "/bin/sh"
        code = await self.execute(box, asked["process"]["args"][1])
        if code is None:
            return httpx.Response(502, json={"code": 502, "message": "The sandbox was not found"})
        # What is 0 is left out, as by the JSON of protocol buffers.
        end = {"exited": True, "status": f"exit status {code}"} | ({"exitCode": code} if code else {})
        said = [
            {"event": {"start": {"pid": 7}}},
            {"event": {"data": {"stdout": base64.b64encode(b"x").decode()}}},
            {"event": {"keepalive": {}}},
            {"event": {"end": end}},
        ]
        whole = b"".join(map(message, said)) + message({}, 2)
        return httpx.Response(200, content=pieces(whole[:7], whole[7:20], whole[20:]))

    def _files(self, request: httpx.Request, box: FakeBox) -> httpx.Response:
        path = request.url.params["path"]
        if request.method == "POST":
            box.write(path, parts_of(request)["file"])
            return httpx.Response(200, json=[{"path": path, "name": "x", "type": "file"}])
        content = box.read(path)
        if content is None:
            return httpx.Response(404, json={"code": 404, "message": f"path {path} not found"})
        return httpx.Response(200, content=pieces(content))
