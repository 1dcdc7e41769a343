"""Writes down what goes to engines' servers, so that the engine's own code can be asked whether it would take it.

``FLOTILLA_SGLANG_RECORDS`` and ``FLOTILLA_VLLM_RECORDS`` name files that all calls of a run of the tests are added to,
those of the rollouts in fleets too: a line of JSON each, in the order of the calls.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from flotilla.services.rollout.engines.servers.client import Body, ServerClient

KINDS = ("sglang", "vllm")


def files_asked_for() -> dict[str, Path]:
    """Read from the environment where calls are written, by the kind of server."""
    named = {kind: os.environ.get(f"FLOTILLA_{kind.upper()}_RECORDS") for kind in KINDS}
    return {kind: Path(file) for kind, file in named.items() if file}


@contextmanager
def recording(files: Mapping[str, Path]) -> Iterator[None]:
    """Write down the calls of this process to servers while the block runs.

    Args:
        files: that lines are added to, by the kind of server; calls to others are not written down.
    """
    send = ServerClient._request
    seen: WeakKeyDictionary[ServerClient, str] = WeakKeyDictionary()

    async def request(client: ServerClient, method: str, path: str, body: Body | None, seconds: float | None) -> Any:
        file = files.get(client._name.lower())
        if file is not None:
            # Written down when it is sent: the order of calls is what the protocol is about.
            server = f"{os.getpid()}-{id(client)} {client._http.base_url}"
            line = json.dumps({"endpoint": path, "method": method, "body": body, "server": server}) + "\n"
            # Thousands of looks at the load say no more than one.
            if method != "GET" or seen.get(client) != line:
                with file.open("a", encoding="utf-8") as records:
                    records.write(line)
            seen[client] = line
        return await send(client, method, path, body, seconds)

    with patch.object(ServerClient, "_request", request):
        yield


def requests_of(file: Path) -> list[dict[str, Any]]:
    """Read what was written down."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
