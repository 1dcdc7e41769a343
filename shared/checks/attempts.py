"""Attempts to reach ports of other services, as the fleet itself reaches them."""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Iterable
from ssl import SSLError
from typing import Final
from urllib.parse import urlsplit

import httpx

from flotilla.shared.checks.addresses import address_elsewhere
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.schemas.checks import (
    ANOTHER,
    FAILED,
    LONGEST_USE,
    MOST_TARGETS,
    NO_ROUTE,
    NOT_BELIEVED,
    REACHED,
    REFUSED,
    SILENT,
    Attempt,
    CheckTarget,
)

ATTEMPT_SECONDS: Final = 4.0
"""A lost SYN is sent again after one second, and after three."""
AT_ONCE: Final = 32
HTTP: Final = "http"
UNROUTABLE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
LONGEST_DETAIL: Final = 200


async def reach_all(targets: Iterable[CheckTarget], check_id: str) -> tuple[Attempt, ...]:
    """Try every port of these services, many at once."""
    room = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    # Each attempt has a deadline of its own.
    async with httpx.AsyncClient(verify=tls_context(), trust_env=False, timeout=None, limits=limits) as http:  # noqa: S113

        async def one(target: CheckTarget, use: str, port: int) -> Attempt:
            async with room:
                ask = (lambda: _ask(http, target)) if use == HTTP else (lambda: _greet(target, port, check_id))
                return await attempt(target.service_id, use, port, ask)

        return tuple(
            await asyncio.gather(
                *(
                    one(target, use, port)
                    for target in list(targets)[:MOST_TARGETS]
                    for use, port in [(HTTP, port_of(target.url)), *list(target.ports.items())[:3]]
                )
            )
        )


async def attempt(service_id: str, use: str, port: int, ask: Callable[[], Awaitable[str | None]]) -> Attempt:
    """Make one attempt.

    Args:
        ask: reaches the port; what it returns is something else that answered there.
    """
    began, detail = time.monotonic(), ""
    try:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            another = await ask()
        outcome, detail = (REACHED, "") if another is None else (ANOTHER, another)
    except TimeoutError:
        outcome = SILENT
    except Exception as error:
        # Addresses and ports are reported by other services: any exception is an outcome.
        outcome, detail = _outcome(error), str(error) or type(error).__name__
    return Attempt(
        service_id=service_id,
        port=port,
        use=use[:LONGEST_USE],
        outcome=outcome,
        detail=detail[:LONGEST_DETAIL],
        seconds=round(time.monotonic() - began, 3),
    )


def port_of(url: str) -> int:
    """Return the port of a URL; 0 of one that has none that could be."""
    try:
        parts = urlsplit(url)
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return 0


async def _ask(http: httpx.AsyncClient, target: CheckTarget) -> str | None:
    # At the origin: a path that a service has put into its address is not asked for.
    url = httpx.URL(target.url).copy_with(raw_path=b"/healthz")
    headers, name = {"host": url.netloc.decode()}, {"sni_hostname": url.raw_host.decode()}
    url = url.copy_with(host=await _address_of(target, url.host, port_of(target.url)))
    async with http.stream("GET", url, headers=headers, extensions=name) as answer:
        return None if answer.status_code == httpx.codes.OK else f"/healthz answers {answer.status_code}"


async def _greet(target: CheckTarget, port: int, check_id: str) -> str | None:
    host = await _address_of(target, urlsplit(target.url).hostname or "", port)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        said = await reader.read(len(check_id))
    finally:
        writer.close()
    return None if said == check_id.encode() else "it does not say what this examination listens with"


async def _address_of(target: CheckTarget, host: str, port: int) -> str:
    return await address_elsewhere(host, port) if target.is_elsewhere else host


def _outcome(error: BaseException) -> str:
    """Find what an error means, in those that it was raised from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, SSLError):
            return NOT_BELIEVED
        if isinstance(seen, ConnectionRefusedError):
            return REFUSED
        if isinstance(seen, TimeoutError):
            return SILENT
        if isinstance(seen, OSError) and seen.errno in UNROUTABLE:
            return NO_ROUTE
        seen = seen.__cause__ or seen.__context__
    return FAILED
