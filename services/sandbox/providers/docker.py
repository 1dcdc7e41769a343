"""Boxes that are containers of a Docker engine: its API over a unix socket or TCP.

A container has no network, few capabilities, and a first process that sleeps until the box's end and is removed then by
the engine itself.

Source: Docker Engine API, version 1.43 (engines from 24 on).
"""

import io
import json
import tarfile
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final
from urllib.parse import quote

import httpx

from flotilla.services.sandbox.providers.base import MARK, MARKED, Box, Cause, Found, ProviderFailed, Wanted
from flotilla.services.sandbox.providers.wire import (
    CAPABILITIES,
    Answered,
    Wire,
    found_boxes,
    json_of,
    object_of,
    reading,
    text_of,
)

URL: Final = "unix:///var/run/docker.sock"
API: Final = "/v1.43"
PULL_SECONDS: Final = 600.0
TAR_ROOM: Final = 16_384
LAST_BYTES: Final = 65_536
"""Of the progress of a pull, whose last line has its result."""


class Docker:
    """A Docker engine.

    Args:
        url: of its API.
        owner: the owner of its boxes.
        runtime: of containers, such as ``runsc``; None: the engine's own.
        transport: another one than sockets.
    """

    kind: ClassVar[str] = "docker"

    def __init__(
        self, url: str, owner: str, *, runtime: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._wire = Wire("docker", url, transport=transport)
        self._owner, self._runtime = owner, runtime

    async def create(self, wanted: Wanted) -> Box:
        """Make a container, of an image that is pulled where it is not there; see ``Provider.create``."""
        ends_at = time.monotonic() + wanted.lifetime_seconds
        reply = await self._create(wanted)
        if reply.status_code == 404:
            await self._pull(wanted.image)
            reply = await self._create(wanted)
            if reply.status_code == 404:
                raise ProviderFailed(Cause.REFUSED, f"docker has no image {wanted.image!r}, also after pulling it")
        if reply.status_code == 409:  # an attempt whose answer was lost
            box_id = text_of("docker", await self._json("GET", f"/containers/{wanted.name}/json"), "Id")
        else:
            box_id = text_of("docker", object_of("docker", reply), "Id")
        await self._wire.ask("POST", f"{API}/containers/{box_id}/start", allowed=(304,))
        return Box(box_id, wanted.name, wanted.image, ends_at)

    async def _create(self, wanted: Wanted) -> httpx.Response:
        host: dict[str, object] = {
            "AutoRemove": True,
            "CapAdd": CAPABILITIES,
            "CapDrop": ["ALL"],
            "Init": True,
            "Memory": wanted.memory_bytes,
            "MemorySwap": wanted.memory_bytes,
            "NanoCpus": int(wanted.processors * 1e9),
            "NetworkMode": "bridge" if wanted.has_network else "none",
            "PidsLimit": wanted.processes,
            "SecurityOpt": ["no-new-privileges"],
        }
        if self._runtime is not None:
            host["Runtime"] = self._runtime
        body = {
            "Image": wanted.image,
            "Entrypoint": ["sleep", str(max(1, int(wanted.lifetime_seconds)))],
            "Cmd": [],
            "Labels": wanted.labels(self._owner),
            "HostConfig": host,
        }
        path = f"{API}/containers/create"
        return await self._wire.ask("POST", path, params={"name": wanted.name}, json=body, allowed=(404, 409))

    async def _pull(self, image: str) -> None:
        name, _, tag = image.partition("@") if "@" in image else image.rpartition(":")
        if not name or "/" in tag:
            name, tag = image, "latest"
        params = {"fromImage": name, "tag": tag}
        async with self._wire.stream("POST", f"{API}/images/create", params=params, seconds=PULL_SECONDS) as reply:
            said = b""
            async for piece in reply.aiter_raw():
                said = (said + piece)[-LAST_BYTES:]
        last = said.strip().rpartition(b"\n")[2]
        if b'"error"' in last:
            why = " ".join(last.decode("utf-8", "replace").split())[:300]
            raise ProviderFailed(Cause.REFUSED, f"docker could not pull {image!r}: {why}")

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        """Run a script in the container; see ``Provider.execute``."""
        body = {"Cmd": ["sh", "-c", script], "AttachStdout": True, "AttachStderr": True}
        # A second one would not be started: it does no harm.
        made = await self._json("POST", f"/containers/{box.id}/exec", json=body, gone=(409,))
        path = f"/exec/{quote(text_of('docker', made, 'Id'))}"
        start = {"Detach": False, "Tty": False}
        async with self._wire.stream("POST", f"{API}{path}/start", json=start, seconds=seconds) as reply:
            async for _ in reply.aiter_raw():
                pass  # the end of the output is that of the script
        state = await self._json("GET", f"{path}/json")
        code = state.get("ExitCode")
        if state.get("Running") or not isinstance(code, int):
            raise ProviderFailed(Cause.LOST, "docker does not say how a command ended")
        if code == 137 and not await self._is_there(box):
            raise ProviderFailed(Cause.LOST, "the container ended while a command ran in it")
        return code

    async def _is_there(self, box: Box) -> bool:
        reply = await self._wire.ask("GET", f"{API}/containers/{box.id}/json", allowed=(404,))
        with reading("docker"):
            return reply.status_code == 200 and object_of("docker", reply)["State"]["Running"] is True

    async def write(self, box: Box, path: str, content: bytes) -> None:
        """Write a file; see ``Provider.write``."""
        directory, _, name = path.rpartition("/")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
        url = f"{API}/containers/{box.id}/archive"
        headers = {"content-type": "application/x-tar"}
        await self._wire.ask("PUT", url, params={"path": directory}, content=packed.getvalue(), headers=headers)

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        """Read a file; see ``Provider.read``."""
        url = f"{API}/containers/{box.id}/archive"
        packed = bytearray()
        async with self._wire.stream("GET", url, params={"path": path}, allowed=(404,)) as reply:
            async for piece in reply.aiter_raw():
                packed += piece
                if len(packed) > max_bytes + TAR_ROOM:
                    return None
            if reply.status_code == 404:
                if b"No such container" in packed:
                    raise ProviderFailed(Cause.LOST, "the container is gone")
                return None
        try:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                member = archive.next()
                file = None if member is None or not member.isfile() else archive.extractfile(member)
                return None if file is None else file.read(max_bytes)
        except (tarfile.TarError, ValueError, EOFError) as error:
            raise ProviderFailed(Cause.FAILED, f"docker sent what is no archive: {error}") from error

    async def destroy(self, box_id: str) -> None:
        """Remove the container; see ``Provider.destroy``."""
        # 409: its removal is under way.
        params = {"force": "1", "v": "1"}
        await self._wire.ask("DELETE", f"{API}/containers/{box_id}", params=params, allowed=(404, 409))

    async def list(self) -> Sequence[Found]:
        """List the containers; see ``Provider.list``."""
        params = {"all": "1", "filters": json.dumps({"label": [f"{MARK}={MARKED}"]})}
        reply = await self._wire.ask("GET", f"{API}/containers/json", params=params)
        return found_boxes("docker", json_of("docker", reply), "Id", "Labels")

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()

    async def _json(self, method: str, path: str, *, gone: Sequence[int] = (), **request: Any) -> Answered:
        reply = await self._wire.ask(method, f"{API}{path}", allowed=gone, **request)
        if reply.status_code in gone:
            raise ProviderFailed(Cause.LOST, "the container does not run")
        return object_of("docker", reply)
