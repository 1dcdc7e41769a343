"""One SGLang server, ours or somebody's, and whether it lives.

A server that is ours is dead when its process ends. One that lives and does not work is found by its health check,
which samples a token; while it is paused it cannot, so it is not asked then. A lost connection alone is no death.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from services.rollout.engines.sglang.client import LIMITS, Body, Refused, SglangClient, Unreachable
from services.rollout.engines.sglang.server import SglangServer
from services.rollout.engines.sglang.settings import SglangSettings
from shared.checked_transport import CheckedAddresses, checked_address
from shared.errors import DeadlineExceeded, FlotillaError, InvalidSpec, Unavailable, WorkerDied

log = logging.getLogger(__name__)

MAX_FAILED_PROBES = 3
OWN_PROBES = 20
HEALTH_SECONDS = 30.0
"""The server itself gives up a probe after 20."""
POLL_SECONDS = 0.5
NO_ANSWER = (Refused, Unreachable, DeadlineExceeded)


class Connection:
    """Calls a server and watches it.

    Args:
        settings: how it runs, or where.
        place: directory for files of a server that is ours.
        on_death: called once when the server is found dead; every later call raises why.
        is_paused: whether the server is paused now.
        transport: another one than sockets, for tests.
    """

    def __init__(
        self,
        settings: SglangSettings,
        place: Path,
        *,
        on_death: Callable[[], None],
        is_paused: Callable[[], bool],
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._settings = settings
        self._on_death = on_death
        self._is_paused = is_paused
        self.server = SglangServer(settings, place) if settings.url is None else None
        url, key = (settings.url, None) if self.server is None else (self.server.url, self.server.key)
        assert url is not None
        if transport is None and self.server is None:
            # A spec's URL is somebody's wish that this service connects somewhere: the operator's policy decides.
            transport = CheckedAddresses(settings.networks, max_answer_bytes=None, limits=LIMITS)
        self._client = SglangClient(url, key, transport)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.death: FlotillaError | None = None

    async def start(self) -> None:
        """Start the server if it is ours, wait until it is up, and watch it from then on.

        Raises:
            InvalidSpec: it refuses its arguments, or is where the operator lets no URL lead.
            WorkerDied: it ended before it was up.
        """
        if self.server is None:
            await self._check_address()
        else:
            await self.server.start()
            ended = self.spawn(self.server.ended(), "sglang process")
            up = self.spawn(self._until_up(), "sglang start")
            try:
                await asyncio.wait([ended, up], return_when=asyncio.FIRST_COMPLETED)
            finally:
                up.cancel()
            if ended.done():
                raise ended.result()
            ended.add_done_callback(lambda task: None if task.cancelled() else self.die(task.result()))
        self.spawn(self._watch(), "sglang health")

    async def _check_address(self) -> None:
        url = httpx.URL(self._settings.url or "")
        try:
            await checked_address(url, self._settings.networks)
        except PermissionError as error:
            raise InvalidSpec(f"rollout.engine.url {url}: {error}") from error
        except OSError as error:
            log.info("the engine's host cannot be resolved now", extra={"cause": str(error)})

    async def close(self) -> None:
        """End a server that is ours, and everything that waits for it."""
        if self.server is not None:
            await self.server.close(self._settings.close_seconds)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def generate(self, body: Body) -> Any:
        """Call ``/generate``, which takes as long as it takes; errors as of ``post``."""
        return await self._answered(self._client.post("/generate", body, seconds=None))

    async def post(self, path: str, body: Body, *, seconds: float | None = None) -> Any:
        """Call an endpoint within some seconds, by default ``call_seconds``.

        Raises:
            Refused: the server said no.
            DeadlineExceeded: it did not answer in time.
            Unavailable: it dropped the connection, and lives.
            WorkerDied: it is dead.
        """
        return await self._answered(self._client.post(path, body, seconds=seconds or self._settings.call_seconds))

    async def get(self, path: str) -> Any:
        """Read an endpoint; errors as of ``post``."""
        return await self._answered(self._client.get(path, seconds=self._settings.call_seconds))

    def die(self, death: FlotillaError) -> None:
        """Give the server up, once: it is dead, or nobody knows what it serves."""
        if self.death is None:
            self.death = death
            log.error("engine died", extra={"cause": death.detail})
            self._on_death()
            if self.server is not None:
                self.spawn(self.server.close(self._settings.close_seconds), "sglang end")

    def check(self) -> None:
        """Raise the server's death, if it is dead."""
        if self.death is not None:
            raise self.death

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run something until it ends or the connection closes."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answered(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except Unreachable as error:
            raise await self._after_lost_connection(error) from error

    async def _after_lost_connection(self, error: Unreachable) -> FlotillaError:
        """Find out whether the server is dead, or dropped a connection only."""
        # The end of a process that is ours is told with its cause, though not at once on a busy machine.
        for _ in range(MAX_FAILED_PROBES if self.server is None else OWN_PROBES):
            if self.death is not None:
                return self.death
            with suppress(*NO_ANSWER):
                await self._client.get("/model_info", seconds=self._settings.call_seconds)
                return Unavailable(f"the SGLang server dropped a connection: {error}")
            await asyncio.sleep(POLL_SECONDS)
        self.die(WorkerDied(f"the SGLang server cannot be reached: {error}"))
        assert self.death is not None
        return self.death

    async def _until_up(self) -> None:
        while True:
            try:
                await self._client.get("/health", seconds=HEALTH_SECONDS)
                return
            except NO_ANSWER:
                await asyncio.sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        failed = 0
        while failed < MAX_FAILED_PROBES:
            await asyncio.sleep(self._settings.probe_seconds)
            if self._is_paused():
                continue
            try:
                await self._client.get("/health", seconds=HEALTH_SECONDS)
                failed = 0
            except NO_ANSWER as error:
                # A pause may have begun while it was asked.
                failed += not self._is_paused()
                log.warning("the engine does not answer", extra={"error": str(error), "times": failed})
        self.die(WorkerDied(f"the SGLang server failed {failed} health checks in a row"))
