"""Boxes that are sandboxes of Daytona, its cloud or one's own: its REST API, and the toolbox in each sandbox.

An image is a container image, of which Daytona builds a snapshot at its first use; ``snapshot:NAME`` is one that is
there, with memory and processors of its own.

Source: Daytona API 1.0, and its toolbox API, as of the clients 0.231 and 0.226.
"""

import asyncio
import base64
import json
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import httpx

from flotilla.services.sandbox.providers.base import MARK, MARKED, Box, Cause, Found, ProviderFailed, Wanted
from flotilla.services.sandbox.providers.wire import Answered, Wire, found_boxes, object_of, text_of

URL: Final = "https://app.daytona.io/api"
SNAPSHOT: Final = "snapshot:"
START_SECONDS: Final = 600.0
"""For an image that is built first."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
GIBIBYTE: Final = 1 << 30
BROKEN: Final = frozenset({"error", "build_failed"})
GONE: Final = frozenset({"destroyed", "destroying", "stopped", "stopping", "archived", "archiving"})
PAGES: Final = 100
SCRIPT: Final = "/tmp/flotilla-script"  # noqa: S108  in a box, which is one caller's alone


class Daytona:
    """An organisation's account at Daytona.

    Args:
        url: of its API.
        key: of the account.
        owner: the owner of its boxes.
        transport: another one than sockets.
    """

    kind: ClassVar[str] = "daytona"

    def __init__(self, url: str, key: str, owner: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._wire = Wire("daytona", url, lambda: {"Authorization": f"Bearer {key}"}, transport=transport)
        self._owner = owner

    async def create(self, wanted: Wanted) -> Box:
        """Make a sandbox and wait until it has started; see ``Provider.create``."""
        ends_at = time.monotonic() + wanted.lifetime_seconds
        body: dict[str, object] = {
            "name": wanted.name,
            "labels": wanted.labels(self._owner),
            "public": False,
            "networkBlockAll": not wanted.has_network,
            "autoStopInterval": 0,
            "autoDeleteInterval": 0,
            "ttlMinutes": math.ceil(wanted.lifetime_seconds / 60),
        }
        if wanted.image.startswith(SNAPSHOT):
            body["snapshot"] = wanted.image.removeprefix(SNAPSHOT)
        else:
            body["buildInfo"] = {"dockerfileContent": f"FROM {wanted.image}\n"}
            body["cpu"] = math.ceil(wanted.processors)
            body["memory"] = math.ceil(wanted.memory_bytes / GIBIBYTE)
        reply = await self._wire.ask("POST", "/sandbox", json=body, allowed=(409,))
        if reply.status_code == 409:  # an attempt whose answer was lost: names are unique
            reply = await self._wire.ask("GET", f"/sandbox/{wanted.name}")
        made = await self._started(object_of("daytona", reply))
        box_id = text_of("daytona", made, "id")
        url = f"{text_of('daytona', made, 'toolboxProxyUrl').rstrip('/')}/{box_id}"
        return Box(box_id, wanted.name, wanted.image, ends_at, url)

    async def _started(self, made: Answered) -> Answered:
        """Wait until a sandbox has started."""
        box_id = text_of("daytona", made, "id")
        end, pause = time.monotonic() + START_SECONDS, FIRST_PAUSE_SECONDS
        while (state := str(made.get("state"))) != "started":
            if state in BROKEN:
                cause = Cause.REFUSED if state == "build_failed" else Cause.FAILED
                raise ProviderFailed(cause, f"daytona could not start a sandbox: {str(made.get('errorReason'))[:300]}")
            if state in GONE:
                raise ProviderFailed(Cause.LOST, f"a sandbox of daytona was {state} before it had started")
            if time.monotonic() > end:
                raise ProviderFailed(Cause.LATE, f"a sandbox of daytona did not start within {START_SECONDS:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            made = object_of("daytona", await self._wire.ask("GET", f"/sandbox/{box_id}"))
        return made

    async def execute(self, box: Box, script: str, seconds: float) -> int:
        """Run a script by the toolbox; see ``Provider.execute``."""
        # The toolbox splits a command into words by itself, and knows no shell. An image without base64 is reported.
        packed = base64.b64encode(script.encode()).decode()
        command = f'sh -c "echo {packed} | base64 -d >{SCRIPT} && exec sh {SCRIPT}"'
        body = {"command": command, "timeout": math.ceil(seconds)}
        url = f"{box.url}/process/execute"
        # An answer of the toolbox that lasts longer than the command's own time is an error of Daytona's.
        reply = await self._ask_box(box, "POST", url, json=body, seconds=seconds + 5.0, is_repeatable=False)
        code = object_of("daytona", reply).get("exitCode")
        if not isinstance(code, int):
            raise ProviderFailed(Cause.FAILED, "daytona does not say how a command ended")
        return code

    async def write(self, box: Box, path: str, content: bytes) -> None:
        """Write a file; see ``Provider.write``."""
        where, what = {"files[0].path": path}, {"files[0].file": (path, content)}
        await self._ask_box(box, "POST", f"{box.url}/files/bulk-upload", data=where, files=what)

    async def read(self, box: Box, path: str, max_bytes: int) -> bytes | None:
        """Read a file; see ``Provider.read``."""
        packed = bytearray()
        url = f"{box.url}/files/download"
        async with self._wire.stream("GET", url, params={"path": path}, allowed=(400, 404)) as reply:
            if reply.status_code >= 300:
                await self._check_there(box)
                return None
            async for piece in reply.aiter_raw():
                packed += piece
                if len(packed) > max_bytes:
                    return None
        return bytes(packed)

    async def _ask_box(self, box: Box, method: str, url: str, **request: Any) -> httpx.Response:
        try:
            return await self._wire.ask(method, url, **request)
        except ProviderFailed as error:
            if error.cause in {Cause.REFUSED, Cause.FAILED, Cause.LOST}:
                await self._check_there(box)
            raise

    async def _check_there(self, box: Box) -> None:
        """Raise if a sandbox is lost.

        Raises:
            ProviderFailed: it is lost, or its state is unknown.
        """
        reply = await self._wire.ask("GET", f"/sandbox/{box.id}", allowed=(404,))
        if reply.status_code == 404 or str(object_of("daytona", reply).get("state")) in GONE:
            raise ProviderFailed(Cause.LOST, "the sandbox of daytona is gone")

    async def destroy(self, box_id: str) -> None:
        """Delete the sandbox; see ``Provider.destroy``."""
        # 409: its state changes, for it is being made or removed; the sweep tries again.
        await self._wire.ask("DELETE", f"/sandbox/{box_id}", allowed=(404, 409))

    async def list(self) -> Sequence[Found]:
        """List the sandboxes; see ``Provider.list``."""
        found: list[Found] = []
        params = {"labels": json.dumps({MARK: MARKED}), "limit": "100"}
        for _ in range(PAGES):
            listed = object_of("daytona", await self._wire.ask("GET", "/sandbox", params=params))
            found += found_boxes("daytona", listed.get("items"), "id", "labels")
            if not (cursor := listed.get("nextCursor")):
                break
            params["cursor"] = str(cursor)
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._wire.close()
