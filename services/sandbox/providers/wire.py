"""Calls to a provider over HTTP: bounded in time and in bytes, retried where safe, with errors by cause.

What was sent is in no error and no log line: it holds keys.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import httpx

from flotilla.services.sandbox.providers.base import Cause, Found, ProviderFailed
from flotilla.shared.net.client.bearer_client import tls_context
from flotilla.shared.net.dead_peers import SOCKET_OPTIONS
from flotilla.shared.net.retry import Backoff, retry

CALL_SECONDS: Final = 30.0
"""For one attempt of a call that does not last."""
DEADLINE_SECONDS: Final = 60.0
"""For all attempts of one call."""
LONGEST_PAUSE_SECONDS: Final = 5.0
CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What root keeps in its own container, to install and to become others."""
MAX_BYTES: Final = 4 << 20
"""Of an answer that is not a file."""
Answered = dict[str, Any]
"""An object that a provider answers."""
ABSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""The call was not made."""
BUSY: Final = frozenset({429, 503})
CLIENT_ERRORS: Final = range(400, 500)


class _Passing(ProviderFailed):
    """May pass by itself.

    Args:
        cause, detail: of the failure.
        pause_seconds: that the provider asks for.
        was_made: whether the call may have done something.
    """

    def __init__(self, cause: Cause, detail: str, *, pause_seconds: float = 0.0, was_made: bool = True) -> None:
        super().__init__(cause, detail)
        self.pause_seconds, self.was_made = pause_seconds, was_made


class Wire:
    """One provider's HTTP interface.

    Args:
        name: of the provider, for people.
        url: base URL; ``unix://`` and a path for a socket on this host.
        headers: that each call shows, made again each time: a token in a file may change.
        transport: another one than sockets.
        tls: whom to believe; None: public authorities, and the fleet's own.
    """

    def __init__(
        self,
        name: str,
        url: str,
        headers: Callable[[], Mapping[str, str]] = dict,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._name = name
        self._headers = headers
        socket_path = url.removeprefix("unix://") if url.startswith("unix://") else None
        base = f"http://{name}" if socket_path is not None else url.replace("tcp://", "http://", 1)
        sockets = transport or httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            verify=tls or tls_context(),
            trust_env=False,
            uds=socket_path,
            socket_options=None if socket_path else SOCKET_OPTIONS,
        )
        self._client = httpx.AsyncClient(
            base_url=base.rstrip("/"),
            transport=sockets,
            trust_env=False,
            timeout=None,  # noqa: S113  each call has its own
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        allowed: Sequence[int] = (),
        seconds: float | None = None,
        is_repeatable: bool = True,
        max_bytes: int = MAX_BYTES,
        **request: Any,
    ) -> httpx.Response:
        """Make a call and read its answer.

        Args:
            method, path: of the call; the path may be a whole URL.
            allowed: statuses from 300 on that are answers.
            seconds: for one attempt; None: for a call that does not last.
            is_repeatable: whether it does no harm to make a call again that may have been made.
            max_bytes: longest answer.
            request: further parts, as of httpx.

        Raises:
            ProviderFailed: there is no answer, or it is an error.
        """
        attempts = Backoff(0.1, LONGEST_PAUSE_SECONDS, pause_at_least=_asked_pause)

        def is_retryable(error: Exception) -> bool:
            return isinstance(error, _Passing) and (is_repeatable or not error.was_made)

        async def attempt() -> httpx.Response:
            async with self.stream(method, path, allowed=allowed, seconds=seconds, **request) as reply:
                content = bytearray()
                async for piece in reply.aiter_raw():
                    content += piece
                    if len(content) > max_bytes:
                        raise ProviderFailed(Cause.FAILED, f"{self._name} answered more than {max_bytes} bytes")
                headers = httpx.Headers(reply.headers)
                headers.pop("content-encoding", None)  # none was asked for, and a small answer may become a large one
                return httpx.Response(reply.status_code, headers=headers, content=bytes(content))

        return await retry(
            attempt,
            waiting_for=self._name,
            deadline_seconds=max(DEADLINE_SECONDS, seconds or 0.0),
            backoff=attempts,
            is_retryable=is_retryable,
        )

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, allowed: Sequence[int] = (), seconds: float | None = None, **request: Any
    ) -> AsyncIterator[httpx.Response]:
        """Make a call once, and give its answer to be read within the time.

        Raises:
            ProviderFailed: there is no answer, or it is an error.
        """
        seconds = CALL_SECONDS if seconds is None else seconds
        headers = {"accept-encoding": "identity", **self._headers(), **(request.pop("headers", None) or {})}
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream(method, path, headers=headers, **request) as reply,
            ):
                if reply.status_code >= 300 and reply.status_code not in allowed:
                    raise await self._refusal(reply)
                yield reply
        except ABSENT as error:
            raise _Passing(Cause.ABSENT, f"{self._name} cannot be reached: {error!r}", was_made=False) from error
        except TimeoutError as error:
            raise _Passing(Cause.LATE, f"{self._name} did not answer within {seconds:g} s") from error
        except httpx.HTTPError as error:
            raise _Passing(Cause.FAILED, f"{self._name} did not answer to the end: {type(error).__name__}") from error
        except (httpx.InvalidURL, UnicodeError) as error:
            # An address or a token that the provider had given.
            raise ProviderFailed(Cause.FAILED, f"{self._name} cannot be asked: {type(error).__name__}") from error

    async def _refusal(self, reply: httpx.Response) -> ProviderFailed:
        """Make the error of an answer."""
        said = bytearray()
        async for piece in reply.aiter_raw():
            said += piece
            if len(said) > 4096:
                break
        status = reply.status_code
        detail = f"{self._name} answered {status}: {_sentence(bytes(said))}"
        if status in BUSY:
            pause = _seconds(reply.headers.get("retry-after"))
            # A call answered with Retry-After was not executed.
            return _Passing(Cause.BUSY, detail, pause_seconds=pause, was_made=status != 429 and not pause)
        if status == 404:
            return ProviderFailed(Cause.LOST, detail)
        if status in CLIENT_ERRORS:
            return ProviderFailed(Cause.REFUSED, detail)
        return _Passing(Cause.FAILED, detail)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Read what a provider answered, of whatever shape it is.

    Raises:
        ProviderFailed: it is of another than it should be.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        raise ProviderFailed(Cause.FAILED, f"{name} answered what cannot be read: {error!r:.300}") from error


def json_of(name: str, reply: httpx.Response) -> Any:
    """Read the JSON that a provider answered.

    Raises:
        ProviderFailed: it is none.
    """
    try:
        return reply.json()
    except (ValueError, RecursionError) as error:
        raise ProviderFailed(Cause.FAILED, f"{name} answered what is no JSON") from error


def object_of(name: str, reply: httpx.Response) -> Answered:
    """Read the object that a provider answered.

    Raises:
        ProviderFailed: it is none.
    """
    found = json_of(name, reply)
    if not isinstance(found, dict):
        raise ProviderFailed(Cause.FAILED, f"{name} answered what is no object")
    return found


def text_of(name: str, found: Answered, key: str) -> str:
    """Take a text out of what a provider answered.

    Raises:
        ProviderFailed: there is none.
    """
    value = found.get(key)
    if not isinstance(value, str) or not value:
        raise ProviderFailed(Cause.FAILED, f"{name} answered without {key!r}")
    return value


def found_boxes(name: str, listed: Any, id_key: str, labels_key: str) -> list[Found]:
    """Read a list of boxes; labels that are none of Flotilla's may be anything.

    Raises:
        ProviderFailed: it is none.
    """
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise ProviderFailed(Cause.FAILED, f"{name} answered what is no list")
    return [Found(text_of(name, each, id_key), _labels(each.get(labels_key))) for each in listed]


def _labels(given: object) -> dict[str, str]:
    return {str(key): str(value) for key, value in given.items()} if isinstance(given, dict) else {}


def _asked_pause(error: Exception) -> float:
    return error.pause_seconds if isinstance(error, _Passing) else 0.0


def _seconds(header: str | None) -> float:
    """Read ``Retry-After``; 0 without it."""
    text = (header or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0.0


def _sentence(said: bytes) -> str:
    return " ".join(said.decode("utf-8", "replace").split())[:300] or "nothing"
