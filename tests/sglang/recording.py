"""Keeps what goes to an SGLang server and what it answers."""

import json
from pathlib import Path
from typing import Any

import httpx


class RecordingTransport(httpx.AsyncBaseTransport):
    """Sends requests on, and keeps them with their answers.

    Args:
        file: where each is written as a line of JSON, in the order of the answers.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0))

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
        if request.url.path == "/generate":
            self._write({"answer_to": record["body"]["rid"], "status": response.status_code, "reply": response.json()})
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
