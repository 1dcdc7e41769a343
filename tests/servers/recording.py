"""Keeps what goes to a server and what it answers."""

import json
from pathlib import Path
from typing import Any

import httpx


class RecordingTransport(httpx.AsyncBaseTransport):
    """Sends requests on, and keeps them with their answers.

    Args:
        file: where each is written as a line of JSON, in the order of the answers.
        socket: file that the server listens on, instead of a port.
    """

    def __init__(self, file: Path, socket: Path | None = None) -> None:
        self._file = file
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        self._inner = httpx.AsyncHTTPTransport(limits=limits, uds=None if socket is None else str(socket))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one."""
        # Written down when it is sent: the order of calls is what the protocol is about.
        content = await request.aread()
        record: dict[str, Any] = {
            "endpoint": request.url.raw_path.decode(),
            "method": request.method,
            "body": json.loads(content) if content else None,
        }
        self._write(record)
        response = await self._inner.handle_async_request(request)
        await response.aread()
        if request.url.path.endswith("/generate"):
            rid = record["body"].get("rid") or record["body"]["request_id"]
            self._write({"answer_to": rid, "status": response.status_code, "reply": response.json()})
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def _write(self, record: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def requests_of(file: Path) -> list[dict[str, Any]]:
    """Read what was sent."""
    return [record for record in map(json.loads, file.read_text().splitlines()) if "endpoint" in record]
