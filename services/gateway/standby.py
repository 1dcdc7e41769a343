"""A gateway that waits beside the one that leads, and takes its place.

It listens from the start: `/healthz` says that it waits, everything else is refused with the address of whom to ask.
Once the database's lock is free it opens what a gateway opens, and answers on the same socket.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla.services.gateway.store.locks import look
from flotilla.services.gateway.store.sql import open_engine
from flotilla.shared.errors import FlotillaError, NotLeading
from flotilla.shared.net.server.gatekeeper import refuse

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
SIGHT_SECONDS: Final = 15.0
"""Longest time for one look."""
ALWAYS_ANSWERED: Final = frozenset({"/healthz", "/metrics"})
"""By a gateway that leads, even while it cannot tell whether it still does."""


class Watch(Protocol):
    """Sees who leads."""

    leader: str | None

    async def until_free(self) -> None:
        """Wait until nobody leads."""


class DatabaseWatch:
    """Looks at a PostgreSQL database's lock.

    Attributes:
        leader: address of the gateway that leads, or led last; None: not known.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        self.leader: str | None = None

    async def until_free(self) -> None:
        """Wait until nobody leads; one that is silent is deposed."""
        while True:
            try:
                async with asyncio.timeout(SIGHT_SECONDS):
                    sighting = await asyncio.to_thread(look, self._engine)
                self.leader = sighting.leader
                if sighting.is_free:
                    # The gateway that leads has a session of its own.
                    await asyncio.to_thread(self._engine.dispose)
                    return
            except (SQLAlchemyError, TimeoutError) as error:
                log.warning("a standby cannot see who leads", extra={"error": " ".join(str(error).split())})
            await asyncio.sleep(LOOK_SECONDS)


class StandbyGateway(FastAPI):
    """The app of a gateway that waits, and then is the one that leads.

    Args:
        leading: the app of a gateway; its lifespan is entered once nobody else leads.
        watch: sees who leads.
        end: called with a sentence if the gateway cannot lead; ends the process.
    """

    def __init__(self, leading: FastAPI, watch: Watch, *, end: Callable[[str], None]) -> None:
        super().__init__(lifespan=self._waiting, openapi_url=None)
        self._leading = leading
        self._watch = watch
        self._end = end
        self._opened: Mapping[str, Any] | None = None
        self._over = asyncio.Event()

    def build_middleware_stack(self) -> ASGIApp:
        """Let nothing stand before the app that leads, which has layers of its own."""
        return self._answer

    @asynccontextmanager
    async def _waiting(self, _app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(self._lead(), name="standby")
        try:
            yield
        finally:
            self._over.set()
            if self._opened is None:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _lead(self) -> None:
        try:
            while not self._over.is_set():
                await self._watch.until_free()
                try:
                    # Opened and closed by one task, as its time limits must be.
                    async with self._leading.router.lifespan_context(self._leading) as opened:
                        self._opened = opened or {}
                        log.warning("this gateway leads from now on")
                        await self._over.wait()
                except NotLeading:
                    log.info("another standby was faster")
        except FlotillaError as error:
            self._end(error.detail)
        except Exception as error:
            log.critical("a standby cannot lead", exc_info=error)
            self._end(f"{type(error).__name__}: {error}")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        opened = self._opened
        if opened is None:
            await self._say_who_leads(scope, receive, send)
        elif opened["gateway"].store.is_in_doubt and scope["path"] not in ALWAYS_ANSWERED:
            error = NotLeading("the database does not answer, so this gateway cannot tell whether it still leads")
            await refuse(scope, receive, send, error, is_counted=False)
        else:
            scope["state"] = {**scope.get("state", {}), **opened}
            await self._leading(scope, receive, send)

    async def _say_who_leads(self, scope: Scope, receive: Receive, send: Send) -> None:
        leader = self._watch.leader
        if scope["path"] == "/healthz":
            await JSONResponse({"status": "standby", "leader": leader})(scope, receive, send)
            return
        whom = f"ask {leader}, which leads" if leader else "nobody leads yet"
        error = NotLeading(f"this gateway is a standby: {whom}", leader=leader)
        await refuse(scope, receive, send, error, is_counted=False)
