"""A stand-in for an SGLang server that samples from another model than the one that is trained."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from tests.contract.engine.fake_sglang import FakeSglang

START_SECONDS = 10.0


class OverSockets:
    """An ASGI application of what answers in memory."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._server: FakeSglang | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        self._server = self._server or FakeSglang(self._model, slots=64)  # its locks belong to this loop
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message.get("body", b""), message.get("more_body", False)
        request = httpx.Request(scope["method"], f"http://here{scope['path']}", content=content)
        answer = await self._server.handle_async_request(request)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": await answer.aread()})


@contextmanager
def engine_of_another_model(model: Path) -> Iterator[str]:
    """Serve at an address while the block lasts; give the address."""
    config = uvicorn.Config(OverSockets(model), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="other engine", daemon=True)
    thread.start()
    end = time.monotonic() + START_SECONDS
    while not server.started:
        if time.monotonic() > end:
            raise TimeoutError("the server did not start")
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
