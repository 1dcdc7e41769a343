"""A tool behind a URL: its arguments are posted as JSON, and what comes back is its result."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from flotilla.services.rollout.tools.base import Schema, ToolFailed
from flotilla.shared.config.redaction import redacted_text
from flotilla.shared.errors import EpisodeFailed, Unavailable
from flotilla.shared.net.absence import BUSY_STATUS, may_pass
from flotilla.shared.net.client.bounded_json import parse_json

MOST_ATTEMPTS = 3
NOT_REACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class HttpTool:
    """Posts ``{"name": ..., "arguments": {...}}``.

    A reply below 300 is the result: its ``result`` if it is an object that has one, else the whole body. 4xx is told
    to the policy, with ``error`` or the body. 5xx, 408, 429 and no answer are tried again, and then an error of the
    episode; but where the server is absent or busy, the task waits for it.

    Args:
        url: where to.
        schema: that the policy is shown.
        client: with time-outs and bounds of its own.
    """

    def __init__(self, url: str, schema: Schema, client: httpx.AsyncClient) -> None:
        self.schema = schema
        self._url = url
        self._client = client

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call it; see ``Tool.call``."""
        body = {"name": self.schema["function"]["name"], "arguments": dict(arguments)}
        why, is_absent = "", False
        for _ in range(MOST_ATTEMPTS):
            try:
                reply = await self._client.post(self._url, json=body)
            except httpx.HTTPError as error:
                # One that was reached and did not answer may do so each time, for these arguments.
                why, is_absent = f"{type(error).__name__}: {error}", isinstance(error, NOT_REACHED) and may_pass(error)
                continue
            if reply.status_code >= 500 or reply.status_code in {408, 429}:
                why, is_absent = f"it answered {reply.status_code}", reply.status_code in BUSY_STATUS
                continue
            if reply.status_code >= 300:
                raise ToolFailed(_part(reply, "error"))
            return _part(reply, "result")
        words = f"tool {body['name']} at {redacted_text(self._url)} cannot be used: {why}"
        raise Unavailable(words) if is_absent else EpisodeFailed(words)


def _part(reply: httpx.Response, key: str) -> str:
    try:
        body = parse_json(reply.content, keeps_integers=True)
    except ValueError:
        return reply.text
    found = body.get(key, body) if isinstance(body, dict) else body
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
