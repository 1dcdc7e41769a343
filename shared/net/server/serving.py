"""Run an app on a socket that is bound first, so that its address is known before anything starts."""

import asyncio
import contextlib
import contextvars
import errno
import gc
import json
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla.shared.environment.tls import Tls
from flotilla.shared.errors import (
    MAX_ERRORS,
    FlotillaError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Scalar,
    Unavailable,
    UnreadableRequest,
)
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.http import FaultyApp
from flotilla.shared.net.dead_peers import LISTENER_OPTIONS
from flotilla.shared.net.server.connections import connections
from flotilla.shared.net.server.limits import ConnectionLimits
from flotilla.shared.net.server.ports import listening_socket
from flotilla.shared.telemetry.prometheus import gauge, response_of

log = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"
MAX_DETAIL = 4000
MAX_TEXT = 400
"""Characters of the detail of a problem, and of every other text in it."""
SHUTDOWN_SECONDS = 3
LOOK_SECONDS = 1.0
"""Between two looks of a server that nobody has told to end; the date in its headers is that of the last one."""
OTHER_FILES = 256
"""Open files reserved for everything but callers' connections."""
CYCLE_THRESHOLDS = (10_000, 20, 20)
"""How many objects more than before make the interpreter search the young ones for cycles, and how often older ones
take part. With its own (700, 10, 10) a gateway of a thousand services searched all of them every second or two for a
tenth of a second; little that a request makes is part of a cycle."""

Leave = Callable[[FastAPI], Coroutine[Any, Any, None]]
"""What an app does before it ends, when there is time for it."""
NOTICE = signal.SIGUSR2
"""Sent by a process to itself on a preemption notice."""
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket; port 0 takes a free one.

    Raises:
        Unavailable: the port is taken, or the address is not one of this machine.
    """
    try:
        listening = listening_socket(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and port != 0:
            raise Unavailable(f"port {port} on {host} is in use: choose another one, or 0 for any free port") from None
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    for option in LISTENER_OPTIONS:  # connections inherit them
        listening.setsockopt(*option)
    return listening


def address_of(listening: socket.socket, scheme: str = "http") -> str:
    """Base URL of what listens there."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve(
    app: FastAPI,
    listening: socket.socket,
    leave: Leave | None = None,
    tls: Tls | None = None,
    new_loop: NewLoop = asyncio.new_event_loop,
) -> None:
    """Serve until SIGTERM or SIGINT, then let the lifespan close what it opened.

    Args:
        leave: done first upon a SIGTERM, while the app still serves; a second one, or SIGINT, does not wait for it.
            Upon ``NOTICE``, too, which is no such first signal: a machine's shutdown sends SIGTERM afterwards.
        tls: with whose certificate; None, or without one: plain HTTP.
        new_loop: makes the event loop that all of it runs on.

    Raises:
        FlotillaError: what kept the app's lifespan from starting; ``Unavailable`` if it was another error, which is
            logged.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve_here(app, listening, leave, tls))


def serve_several(
    apps: Sequence[tuple[FastAPI, socket.socket]],
    departs: Callable[[], Leave] | None,
    tls: Tls | None,
    new_loop: NewLoop | None = None,
) -> None:
    """Serve apps of one process, each on a socket of its own, as ``serve`` does, until all of them have ended.

    One whose service is over ends alone; see ``ends_alone``. Errors as of ``serve``: one that cannot start ends all.

    Args:
        apps: with their sockets.
        departs: begins a departure, once for all of them; gives what each is to do.
        tls, new_loop: as of ``serve``.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve_here(apps, departs, tls))


_ENDING: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("ending", default=None)


def ends_alone() -> Callable[[], None] | None:
    """Give the lifespan of an app what ends it alone, and no other app of its process; None if it is the only one."""
    return _ENDING.get()


def config_of(app: ASGIApp, limits: ConnectionLimits | None = None, tls: Tls | None = None) -> uvicorn.Config:
    """Make the settings of a server that logs through us, and leaves lifespan and signals to ``serve``."""
    limits = limits or ConnectionLimits()
    tls = tls or Tls()
    return uvicorn.Config(
        app,
        http=connections(limits),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=limits.idle_seconds,
        limit_concurrency=limits.connections,
        server_header=False,
        # Nothing asks for a caller's address or scheme.
        proxy_headers=False,
        ssl_certfile=tls.certificate,
        ssl_keyfile=tls.key,
        ssl_ca_certs=str(tls.authority) if tls.are_clients_checked else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls.are_clients_checked else ssl.CERT_NONE,
    )


def possible_limits() -> ConnectionLimits:
    """Allow this process as many open files as it may have, and no more connections than it has files for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = ConnectionLimits()
    wanted = usual.connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            most = max(soft - OTHER_FILES, soft // 2)
            return replace(usual, connections=most, per_address=most * usual.per_address // usual.connections)
    return usual


async def serve_here(
    app: FastAPI, listening: socket.socket, leave: Leave | None = None, tls: Tls | None = None
) -> None:
    """Serve in the loop that runs already, as ``serve`` does."""
    await _serve_here([(app, listening)], None if leave is None else lambda: leave, tls)


async def _serve_here(
    apps: Sequence[tuple[FastAPI, socket.socket]], departs: Callable[[], Leave] | None, tls: Tls | None
) -> None:
    served = [_Served(app, listening, tls) for app, listening in apps]
    leaving: dict[signal.Signals, asyncio.Future[list[None]]] = {}

    def stop() -> None:
        for one in served:
            one.stop()

    def stop_with_notice(told_by: signal.Signals) -> None:
        if told_by is NOTICE and leaving:
            return
        if departs is None or told_by in leaving:
            stop()
        else:
            leave = departs()
            leaving[told_by] = asyncio.gather(*(leave(app) for app, _ in apps))
            leaving[told_by].add_done_callback(lambda _: stop())

    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, NOTICE):
        loop.add_signal_handler(each, stop_with_notice, each)
    loop.add_signal_handler(signal.SIGINT, stop)
    if len(served) == 1:
        await served[0].run()
    else:
        running = [asyncio.create_task(one.run(is_alone=False), name=f"app {at}") for at, one in enumerate(served)]
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        stop()
        await asyncio.wait(running)
        for task in running:
            task.result()
    for gone in leaving.values():
        gone.cancel()
    await asyncio.gather(*leaving.values(), return_exceptions=True)


class _Server(uvicorn.Server):
    """Looks whether it should end once a second, or when it is told to: uvicorn looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def end(self) -> None:
        """End soon."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """Serve until told to end."""
        # Of the numbers that uvicorn counts, that of a look which renews the date in the headers.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._told.wait()


class _Served:
    """One app, and the server on its socket."""

    def __init__(self, app: FastAPI, listening: socket.socket, tls: Tls | None) -> None:
        self._app, self._listening = app, listening
        self._opened: dict[str, Any] = {}
        faults = armed()
        guarded = app if faults is None else FaultyApp(app, faults, problem_response)
        answering = _until_the_end(_with_state(guarded, self._opened), lambda: self._server.should_exit)
        self._server = _Server(config_of(answering, possible_limits(), tls))
        # uvicorn would install handlers of its own that raise the signal again after the shutdown.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        self._server.end()

    async def run(self, *, is_alone: bool = True) -> None:
        if not is_alone:
            _ENDING.set(self.stop)
        # Not left to uvicorn, which would log a traceback of a refusal and keep the reason.
        async with contextlib.AsyncExitStack() as lifespan:
            self._opened.update(await _open(self._app, lifespan))
            # What was imported and opened stays until the end. A search for cycles would go through all of it, some
            # hundred thousand objects, while all callers wait.
            gc.freeze()
            gc.set_threshold(*CYCLE_THRESHOLDS)
            await self._server.serve(sockets=[self._listening])


async def _open(app: FastAPI, lifespan: contextlib.AsyncExitStack) -> Mapping[str, Any]:
    try:
        return await lifespan.enter_async_context(app.router.lifespan_context(app)) or {}
    except FlotillaError:
        raise
    except Exception as error:
        log.critical("the service cannot start", exc_info=error)
        raise Unavailable(f"the start failed with {type(error).__name__}: {error}") from error


def _with_state(app: ASGIApp, opened: Mapping[str, Any]) -> ASGIApp:
    """Give each request what the lifespan has opened, as ``request.state``."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {**scope.get("state", {}), **opened}
        await app(scope, receive, send)

    return call


def _until_the_end(app: ASGIApp, is_ending: Callable[[], bool]) -> ASGIApp:
    """Answer the requests that still wait when the server ends, such as long polls: they are to ask again later.

    uvicorn cancels such requests, and would answer them as a failure of the app, with a traceback in the log.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, noting)
        except asyncio.CancelledError:
            if not is_ending():
                raise
            if not has_begun:
                await problem_response(Unavailable("this server ends: ask again"))(scope, receive, send)

    return call


class ProblemResponse(JSONResponse):
    """A problem document in ASCII: it may quote text that is no Unicode, such as a lone surrogate."""

    media_type = PROBLEM_JSON

    def render(self, content: Any) -> bytes:
        return json.dumps(content, default=str).encode()


def problem_response(error: FlotillaError, *, status: int | None = None) -> JSONResponse:
    """Make the problem document of an error (RFC 9457).

    The caller chooses what is quoted, so texts are cut and only the first ``MAX_ERRORS`` entries are
    listed: a refusal is never much larger than a request may be small.

    Args:
        error: what is wrong.
        status: overrides that of its class.
    """
    status = status or error.status
    body: dict[str, Any] = {
        "type": f"urn:flotilla:problem:{error.code}",
        "title": error.title,
        "status": status,
        "code": error.code,
        "detail": _cut(error.detail, MAX_DETAIL),
        **_cut_values(error.context),
    }
    if error.errors:
        body["errors"] = [_cut_values(entry) for entry in error.errors[:MAX_ERRORS]]
    if len(error.errors) > MAX_ERRORS:
        body["num_more_errors"] = len(error.errors) - MAX_ERRORS
    return ProblemResponse(body, status_code=status)


def _cut_values(facts: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {key: _cut(value, MAX_TEXT) if isinstance(value, str) else value for key, value in facts.items()}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def add_problem_handlers(app: FastAPI) -> None:
    """Answer every error of this project, of validation and of routing as a problem document."""

    @app.exception_handler(FlotillaError)
    async def ours(_request: Request, error: FlotillaError) -> JSONResponse:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        items = error.errors()
        num_more = max(0, len(items) - MAX_ERRORS)
        entries = [
            {"path": ".".join(str(part) for part in item["loc"]), "allowed": str(item["msg"])}
            for item in items[:MAX_ERRORS]
        ]
        detail = "; ".join(f"{entry['path']}: {entry['allowed']}" for entry in entries)
        if num_more:
            return problem_response(
                InvalidRequest(f"{detail}; and {num_more} more", errors=entries, num_more_errors=num_more)
            )
        return problem_response(InvalidRequest(detail, errors=entries))

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == NotFound.status:
            return problem_response(NotFound(f"there is no {request.method} {request.url.path}"))
        if error.status_code == MethodNotAllowed.status:
            allowed = ", ".join(await asyncio.to_thread(_methods, app, request.url.path))
            detail = f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}"
            response = problem_response(MethodNotAllowed(detail, allowed=allowed))
            response.headers["Allow"] = allowed
            return response
        if error.status_code == UnreadableRequest.status:
            return problem_response(UnreadableRequest(str(error.detail)))
        return problem_response(InvalidRequest(str(error.detail)), status=error.status_code)


def _methods(app: FastAPI, path: str) -> list[str]:
    """List the methods that some route takes on a path; a route of just this path is before those with parameters."""
    paths = app.openapi()["paths"]
    if path in paths:
        return sorted(name.upper() for name in paths[path])
    return sorted(name.upper() for known in paths if compile_path(known)[0].match(path) for name in paths[known])


def add_health_routes(
    app: FastAPI, *, why_not_ready: Callable[[Request], str | None], gauges: Callable[[Request], dict[str, float]]
) -> None:
    """Add ``/healthz``, ``/readyz`` (503 with the reason) and ``/metrics`` (Prometheus text)."""

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"])
    async def readyz(request: Request) -> dict[str, str]:
        reason = why_not_ready(request)
        if reason is not None:
            raise Unavailable(reason)
        return {"status": "ready"}

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        return await response_of(_families(gauges(request)))


def _families(values: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in sorted(values.items()):
        family = gauge(name, name.replace("_", " "))
        family.add_metric((), value)
        yield family
