"""Boxes that are sandboxes of E2B, made of templates: its REST API, and envd, the server in each sandbox.

A template has memory and processors of its own: those wanted are not asked for.

Source: E2B API 0.1 (``api.e2b.app``) and envd's ``process.Process`` over the Connect protocol, as of its SDK 2.63.
"""

import json
import math
import struct
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import httpx

from flotilla.services.sandbox.providers.base import MARK, MARKED, Box, Cause, Found, ProviderFailed, Wanted
from flotilla.services.sandbox.providers.wire import Answered, Wire, found_boxes, json_of, object_of, text_of

URL: Final = "https://api.e2b.app"
ENVD_PORT: Final = 49983
DOMAINS: Final = frozenset({"e2b.app", "e2b.dev"})
"""One host serves all sandboxes, distinguished by a header."""
PAGES: Final = 100
CREATE_SECONDS: Final = 60.0
ENVELOPE: Final = struct.Struct(">BI")
END_OF_STREAM: Final = 2
MAX_MESSAGE_BYTES: Final = 1 << 20


class E2B:
    """An account at E2B.

    Args:
        url: of its API.
        key: of the account.
        owner: the owner of its boxes.
        transport: another one than sockets.
    """

    kind: ClassVar[str] = "e2b"

    def __init__(self, url: str, key: str, owner: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._wire = Wire("e2b", url, lambda: {"X-API-Key": key}, transport=transport)
        self._boxes = Wire("e2b", url, transport=transport)
        self._domain = (urlsplit(url).hostname or "").removeprefix("api.")
        self._owner = owner

    async def create(self, wanted: Wanted) -> Box:
        """Start a sandbox of a template; see ``Provider.create``."""
        ends_at = time.monotonic() + wanted.lifetime_seconds
        body = {
            "templateID": wanted.image,
            "timeout": math.ceil(wanted.lifetime_seconds),
            "metadata": wanted.labels(self._owner),
            "allow_internet_access": wanted.has_network,
            "secure": True,
        }
        # Made twice, one of them is orphaned, and is found by its label.
        reply = await self._wire.ask("POST", "/sandboxes", json=body, seconds=CREATE_SECONDS)
        made = object_of("e2b", reply)
        box_id = text_of("e2b", made, "sandboxID")
        domain = str(made.get("domain") or self._domain)
        host = f"sandbox.{domain}" if domain in DOMAINS else f"{ENVD_PORT}-{box_id}.{domain}"
        headers = {"E2b-Sandbox-Id": box_id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token := made.get("envdAccessToken"):
            headers["X-Access-Token"] = str(token)
        return Box(box_id, wanted.name, wanted.image, ends_at, f"https://{host}", headers)

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        """Start a process and follow it to its end; see ``Provider.execute``."""
        message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": False}).encode()
        headers = {
            **box.headers,
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(int(seconds * 1000)),
        }
        content = ENVELOPE.pack(0, len(message)) + message
        url = f"{box.url}/process.Process/Start"
        code: int | None = None
        try:
            async with self._boxes.stream("POST", url, content=content, headers=headers, seconds=seconds) as reply:
                messages = _Messages()
                async for piece in reply.aiter_raw():
                    for said in messages.fed(piece):
                        if "end" in (event := _mapping(said.get("event"))):
                            code = _exit_code(_mapping(event["end"]))
        except ProviderFailed as error:
            raise _told(error) from error
        if code is None:
            raise ProviderFailed(Cause.LOST, "e2b does not say how a command ended")
        return code

    async def write(self, box: Box, path: str, content: bytes) -> None:
        """Write a file; see ``Provider.write``."""
        parts = {"file": (path, content)}
        await self._ask_box("POST", f"{box.url}/files", params={"path": path}, files=parts, headers=box.headers)

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        """Read a file; see ``Provider.read``."""
        packed = bytearray()
        params = {"path": path}
        try:
            async with self._boxes.stream(
                "GET", f"{box.url}/files", params=params, headers=box.headers, allowed=(404,)
            ) as reply:
                most = MAX_MESSAGE_BYTES if reply.status_code == 404 else max_bytes
                async for piece in reply.aiter_raw():
                    packed += piece
                    if len(packed) > most:
                        return None
            if reply.status_code == 404:
                if b"sandbox" in packed.lower():
                    raise ProviderFailed(Cause.LOST, "the sandbox of e2b is gone")
                return None
        except ProviderFailed as error:
            raise _told(error) from error
        return bytes(packed)

    async def _ask_box(self, method: str, url: str, **request: Any) -> httpx.Response:
        try:
            return await self._boxes.ask(method, url, **request)
        except ProviderFailed as error:
            raise _told(error) from error

    async def destroy(self, box_id: str) -> None:
        """Kill the sandbox; see ``Provider.destroy``."""
        await self._wire.ask("DELETE", f"/sandboxes/{box_id}", allowed=(404,))

    async def list(self) -> Sequence[Found]:
        """List the sandboxes; see ``Provider.list``."""
        found: list[Found] = []
        params = {"metadata": f"{MARK}={MARKED}", "limit": "100"}
        for _ in range(PAGES):
            reply = await self._wire.ask("GET", "/v2/sandboxes", params=params)
            found += found_boxes("e2b", json_of("e2b", reply), "sandboxID", "metadata")
            if not (token := reply.headers.get("x-next-token")):
                break
            params["nextToken"] = token
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()
        await self._boxes.close()


class _Messages:
    """Takes the messages of a Connect stream apart."""

    def __init__(self) -> None:
        self._read = bytearray()

    def fed(self, piece: bytes) -> list[Answered]:
        """Read what has come; returns the messages that are whole.

        Raises:
            ProviderFailed: it is no such stream, or the stream ends with an error.
        """
        self._read += piece
        found = []
        while len(self._read) >= ENVELOPE.size:
            flags, length = ENVELOPE.unpack_from(self._read)
            if length > MAX_MESSAGE_BYTES:
                raise ProviderFailed(Cause.FAILED, "e2b sent a message that is too long")
            if len(self._read) < ENVELOPE.size + length:
                break
            text = bytes(self._read[ENVELOPE.size : ENVELOPE.size + length])
            del self._read[: ENVELOPE.size + length]
            try:
                said = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ProviderFailed(Cause.FAILED, "e2b sent what is no JSON") from error
            if not isinstance(said, dict):
                raise ProviderFailed(Cause.FAILED, "e2b sent what is no object")
            if flags & END_OF_STREAM and (wrong := _mapping(said.get("error"))):
                cause = Cause.LATE if wrong.get("code") == "deadline_exceeded" else Cause.FAILED
                raise ProviderFailed(cause, f"e2b could not run a command: {str(wrong.get('message'))[:300]}")
            found.append(said)
        return found


def _mapping(value: object) -> Answered:
    return value if isinstance(value, dict) else {}


def _exit_code(end: Answered) -> int:
    """Read how a process ended: what is 0 may be left out, and a signal is given in words only."""
    code = end.get("exitCode", 0)
    if isinstance(code, int) and code >= 0 and end.get("exited", code == 0) is not False:
        return code
    return 137


def _told(error: ProviderFailed) -> ProviderFailed:
    """Distinguish a lost sandbox from a failed server: E2B answers 502 for both."""
    if error.cause in {Cause.FAILED, Cause.BUSY} and "not found" in error.detail:
        return ProviderFailed(Cause.LOST, error.detail)
    return error
