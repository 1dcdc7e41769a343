"""The HTTP client of the control plane: every call has a deadline, and problems come back as our exceptions.

Every POST carries an idempotency key, so each call may be repeated: what is retryable is retried with growing pauses
until the caller's deadline.
"""

import asyncio
import functools
import json
import logging
import math
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.environment.settings import gateway_urls
from flotilla.shared.environment.tls import why_not_believed
from flotilla.shared.errors import (
    DeadlineExceeded,
    FlotillaError,
    NotLeading,
    TokenExpired,
    Unauthorized,
    Unavailable,
    error_for_code,
)
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.net.authorisation.access import RENEWED_TOKEN
from flotilla.shared.net.client.bearer_client import bearer_client
from flotilla.shared.net.retry import retry

CONNECT_SECONDS = 2.5
"""Time for the second of the kernel's attempts: one that began in a cut network is made again soon after the mend."""
LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=16)
HUNG_SECONDS = 5.0
"""How much longer than it may wait one of several gateways may send nothing of an answer before the next is asked."""


def problem_to_error(status: int, body: bytes, request: str = "") -> FlotillaError:
    """Make the exception of a problem document.

    Args:
        status: of the answer.
        body: of the answer; any other than a problem document comes from a proxy or a foreign server.
        request: what was answered so, such as ``GET http://127.0.0.1:8470/v1/fleet``, for the second case.
    """
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "code" not in problem:
        text = " ".join(body[:200].decode("utf-8", "replace").split())
        kind = Unavailable if status in {502, 503} else DeadlineExceeded if status == 504 else FlotillaError
        who = f"{request} was not answered by a Flotilla server: " if request else ""
        return kind(f"{who}HTTP {status}: {text}")
    known = {"type", "title", "status", "detail", "code", "errors", "instance"}
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP {status}")
    context = {key: value for key, value in problem.items() if key not in known and key != "self"}
    errors = [entry for entry in problem.get("errors") or [] if isinstance(entry, dict)]
    return error_for_code(str(problem.get("code", "")))(detail, errors=errors, **context)


class GatewayClient:
    """Calls one gateway, or of several that share a database the one that leads; ``close`` it, or use it as a context.

    It stays with the one that answered last. One that cannot be reached, does not answer or does not lead makes it ask
    the next: the one that a standby names, if it is in the list, since a token goes nowhere else.

    Args:
        base_url: address of the gateway, or addresses with commas between them.
        token: shown to it.

    Attributes:
        token: what it was made with.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._urls = gateway_urls(base_url)
        self._at = 0
        self.token = token
        self._pass: str | None = None
        self._clock = clock or SystemClock()
        self._transport = transport
        self._https = [self._connect(each) for each in self._urls]
        self._lent: Counter[httpx.AsyncClient] = Counter()
        """How many calls are under way on each."""

    @property
    def base_url(self) -> str:
        """Address of the gateway that is asked now."""
        return self._urls[self._at]

    def _turn_from(self, asked: int, leader: object = None) -> None:
        """Ask another gateway from now on, unless another call has turned from this one already."""
        if asked == self._at:
            self._at = self._urls.index(leader) if leader in self._urls else (asked + 1) % len(self._urls)

    def _connect(self, url: str) -> httpx.AsyncClient:
        return bearer_client(url, self._pass or self.token, limits=LIMITS, transport=self._transport)

    @asynccontextmanager
    async def _http(self, asked: int) -> AsyncGenerator[httpx.AsyncClient, None]:
        """Lend the connections to one gateway: none that was kept since before one of them failed.

        Where a network carries one way only, what is sent on a kept connection arrives, and its answer does not: the
        gateway would hear a service that hears nothing. A new connection is made only where both ways are open. Calls
        that are under way on the former ones are left to end.
        """
        http = self._https[asked]
        self._lent[http] += 1
        try:
            yield http
        except (httpx.TransportError, TimeoutError):
            if self._https[asked] is http and not http.is_closed:
                self._https[asked] = self._connect(self._urls[asked])
            self._turn_from(asked)
            raise
        finally:
            self._lent[http] -= 1
            if not self._lent[http]:
                del self._lent[http]
                if self._https[asked] is not http:
                    await http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for each in {*self._https, *self._lent}:
            await each.aclose()

    def adopt(self, token: str) -> None:
        """Show a pass from now on; that one has expired is then waited for, since another will come."""
        if token != self._pass:
            self._pass = token
            for each in self._https:
                each.headers["Authorization"] = f"Bearer {token}"

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        token: str | None = None,
        deadline_seconds: float = 10.0,
        attempt_seconds: float | None = None,
    ) -> Any:
        """Call and return the decoded JSON answer.

        Args:
            method: HTTP method.
            path: path below the base URL, such as ``/v1/services``.
            body: a pydantic model, or anything that JSON can hold; or a function that makes one for each attempt, for
                what may have changed while the server could not be reached.
            params: query parameters; those that are None are left out.
            token: shown this time, in place of the usual one.
            deadline_seconds: time for all attempts together.
            attempt_seconds: time for one attempt; by default what remains.

        Raises:
            FlotillaError: the subclass that the server's problem names.
            Unavailable: the server could not be reached within the deadline.
            DeadlineExceeded: the server did not answer within the deadline.
        """
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if method == "POST":
            headers["Idempotency-Key"] = uuid.uuid4().hex
        query = {key: value for key, value in (params or {}).items() if value is not None}
        end = self._clock.monotonic() + deadline_seconds
        silence = math.inf
        if attempt_seconds is None and len(self._urls) > 1:
            # One that was stopped keeps its connections: the others are asked while there is time.
            silence = float(query.get("wait", 0)) + HUNG_SECONDS

        async def attempt() -> Any:
            remaining = end - self._clock.monotonic()
            budget = max(0.001, min(remaining, attempt_seconds or remaining))
            content = _encode(body() if callable(body) else body)
            limits = budget, min(budget, silence)
            send = functools.partial(self._send, method, path, content, headers, query, limits)
            faults = armed()
            return await (send() if faults is None else faults.around(Site.CLIENT_CALL, send, path=path))

        return await retry(
            attempt,
            waiting_for=f"{method} {path}",
            deadline_seconds=deadline_seconds,
            now=self._clock.monotonic,
            level=logging.DEBUG,
        )

    async def lines(
        self, path: str, *, headers: Mapping[str, str], silence_seconds: float
    ) -> AsyncGenerator[str, None]:
        """Read the lines of an answer that stays open; ends when the server closes it.

        Args:
            path: path below the base URL.
            headers: more headers.
            silence_seconds: how long the server may send nothing at all.

        Raises:
            FlotillaError: the subclass that the server's problem names.
            Unavailable: the server cannot be reached, or broke off.
            DeadlineExceeded: it was silent for too long.
        """
        async with self._streaming(path, headers, silence_seconds) as response:
            async for line in response.aiter_lines():
                yield line

    async def chunks(self, path: str, *, start: int = 0, silence_seconds: float) -> AsyncGenerator[bytes, None]:
        """Read the bytes of a file from ``start`` on.

        Args:
            path: path below the base URL, of a route that honours ``Range``.
            start: offset in bytes, below the file's size.
            silence_seconds: how long the server may send nothing at all.

        Raises:
            FlotillaError: as ``lines``.
        """
        headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
        async with self._streaming(path, headers, silence_seconds) as response:
            async for chunk in response.aiter_bytes():
                yield chunk

    @asynccontextmanager
    async def _streaming(
        self, path: str, headers: Mapping[str, str], silence_seconds: float
    ) -> AsyncGenerator[httpx.Response, None]:
        timeout = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS)
        asked, url = self._at, self.base_url
        try:
            async with (
                self._http(asked) as http,
                http.stream("GET", path, headers=dict(headers), timeout=timeout) as response,
            ):
                if not response.is_success:
                    body = await response.aread()
                    raise self._refusal(asked, response, body, f"GET {url}{path}")
                yield response
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"GET {url}{path} sent nothing for {silence_seconds:.0f} s") from error
        except httpx.TransportError as error:
            why = why_not_believed(error) or str(error) or type(error).__name__
            raise Unavailable(f"cannot read from {url}: {why}") from error

    def _refusal(self, asked: int, response: httpx.Response, body: bytes, request: str) -> FlotillaError:
        problem = problem_to_error(response.status_code, body, request)
        if isinstance(problem, NotLeading):
            self._turn_from(asked, problem.context.get("leader"))
        return problem

    async def _send(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        query: Mapping[str, Any],
        limits: tuple[float, float],
    ) -> Any:
        """Make one attempt, within seconds for all of it, and for the time without a byte."""
        budget, silence = limits
        timeout = httpx.Timeout(silence, connect=min(silence, CONNECT_SECONDS))
        asked, url = self._at, self.base_url
        try:
            # httpx limits each read and write; an answer that drips in would never end.
            async with self._http(asked) as http, asyncio.timeout(budget):
                response = await http.request(
                    method, path, content=content, headers=dict(headers), params=dict(query), timeout=timeout
                )
        except (httpx.TimeoutException, TimeoutError) as error:
            seconds = budget if isinstance(error, TimeoutError) else silence
            raise DeadlineExceeded(f"{method} {url}{path} did not answer in {seconds:.1f} s") from error
        except httpx.TransportError as error:
            why = why_not_believed(error) or str(error) or type(error).__name__
            raise Unavailable(f"cannot reach {url}: {why}") from error
        renewed = response.headers.get(RENEWED_TOKEN)
        if renewed is not None:
            self.adopt(renewed)
        request = f"{method} {url}{path}"
        if response.is_success:
            return _decoded(response, request)
        problem = self._refusal(asked, response, response.content, request)
        if isinstance(problem, Unauthorized) and self._pass is not None and "Authorization" not in headers:
            raise TokenExpired(problem.detail)
        raise problem


def _decoded(response: httpx.Response, request: str) -> Any:
    try:
        return response.json() if response.content else None
    except ValueError:
        kind = response.headers.get("Content-Type", "something")
        raise Unavailable(f"{request} was not answered by a Flotilla server: {kind} in place of JSON") from None


def _encode(body: Any) -> bytes | None:
    if body is None:
        return None
    if hasattr(body, "model_dump_json"):
        return str(body.model_dump_json()).encode()
    return json.dumps(body, allow_nan=False).encode()
