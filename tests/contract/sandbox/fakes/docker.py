"""A fake Docker engine: what the provider asks of its API 1.43, and the same over a unix socket."""

import asyncio
import io
import json
import re
import struct
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.contract.sandbox.fakes.boxes import FakeProvider, pieces


class FakeDocker(FakeProvider):
    """An engine that has one image, and can pull another."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.images = {"python:3.12-slim"}
        self.pullable = {"swebench/task-1:v2"}
        self.execs: dict[str, tuple[str, str, int | None]] = {}

    async def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path.startswith("/v1.43/")
        path = request.url.path.removeprefix("/v1.43")
        body = request.content
        if (request.method, path) == ("POST", "/containers/create"):
            return self._create(json.loads(body), str(request.url.params["name"]))
        if (request.method, path) == ("POST", "/images/create"):
            return self._pull(request)
        if (request.method, path) == ("GET", "/containers/json"):
            label = json.loads(request.url.params["filters"])["label"][0]
            key, _, value = label.partition("=")
            listed = [
                {"Id": box.id, "Labels": box.labels} for box in self.boxes.values() if box.labels.get(key) == value
            ]
            return httpx.Response(200, json=listed)
        if match := re.fullmatch(r"/exec/([^/]+)/(start|json)", path):
            return await self._exec(match[1], match[2])
        match = re.fullmatch(r"/containers/([^/]+)(/\w+)?", path)
        assert match is not None, path
        return self._of_container(request, match[1], match[2] or "")

    def _create(self, body: dict[str, object], name: str) -> httpx.Response:
        if body["Image"] not in self.images:
            return httpx.Response(404, json={"message": f"No such image: {body['Image']}"})
        if any(box.name == name for box in self.boxes.values()):
            return httpx.Response(409, json={"message": f"Conflict. The container name {name} is already in use"})
        labels = body["Labels"]
        assert isinstance(labels, dict)
        return httpx.Response(201, json={"Id": self.make(name, labels, body).id, "Warnings": []})

    def _pull(self, request: httpx.Request) -> httpx.Response:
        image = f"{request.url.params['fromImage']}:{request.url.params['tag']}"
        if image in self.pullable:
            self.images.add(image)
            lines = [{"status": "Pulling"}, {"status": "Downloaded"}]
        else:
            lines = [{"status": "Pulling"}, {"error": f"manifest for {image} not found"}]
        return httpx.Response(200, content=pieces(*[json.dumps(line).encode() + b"\r\n" for line in lines]))

    def _of_container(self, request: httpx.Request, box_id: str, what: str) -> httpx.Response:
        box = self.boxes.get(box_id) or next((box for box in self.boxes.values() if box.name == box_id), None)
        if box is None:
            return httpx.Response(404, json={"message": f"No such container: {box_id}"})
        path = request.url.params.get("path", "")
        if what == "/exec":
            number = f"exec{len(self.execs)}"
            self.execs[number] = (box.id, json.loads(request.content)["Cmd"][2], None)
            return httpx.Response(201, json={"Id": number})
        if what == "/archive" and request.method == "PUT":
            with tarfile.open(fileobj=io.BytesIO(request.content)) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    assert file is not None
                    box.write(f"{path}/{member.name}", file.read())
            return httpx.Response(200)
        if what == "/archive":
            return self._archive(box.read(path), path)
        if what == "/json":
            return httpx.Response(200, json={"Id": box.id, "State": {"Running": True}})
        if what == "/start":
            return httpx.Response(204)
        assert (request.method, what) == ("DELETE", "")
        self.destroy(box.id)
        return httpx.Response(204)

    def _archive(self, content: bytes | None, path: str) -> httpx.Response:
        if content is None:
            return httpx.Response(404, json={"message": f"Could not find the file {path} in container"})
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(Path(path).name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        return httpx.Response(200, content=pieces(packed.getvalue()))

    async def _exec(self, number: str, what: str) -> httpx.Response:
        box_id, script, code = self.execs[number]
        if what == "json":
            return httpx.Response(200, json={"ID": number, "Running": False, "ExitCode": code})
        box = self.boxes.get(box_id)
        if box is None:
            return httpx.Response(404, json={"message": "No such container"})
        ended = await self.execute(box, script)
        self.execs[number] = (box_id, script, 137 if ended is None else ended)
        frame = struct.pack(">BxxxI", 1, 3) + b"ok\n"
        headers = {"content-type": "application/vnd.docker.raw-stream"}
        return httpx.Response(200, headers=headers, content=pieces(frame))


@asynccontextmanager
async def at_socket(fake: FakeProvider, path: Path) -> AsyncIterator[str]:
    """Serve a fake at a unix socket, an answer for each connection, which ends with it as the engine's streams do."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            method, target, _ = first.split(" ")
            headers = {line.split(": ")[0].lower(): line.split(": ")[1] for line in lines if line}
            length = int(headers.get("content-length", 0))
            content = await reader.readexactly(length)
            reply = await fake.handle_async_request(httpx.Request(method, f"http://docker{target}", content=content))
            said = await reply.aread()
            kind = reply.headers.get("content-type", "")
            writer.write(
                f"HTTP/1.1 {reply.status_code} X\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode()
            )
            writer.write(said)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
