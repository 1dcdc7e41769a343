"""One request to one URL of a grader: address policy, signature, bounds, and what its answer means for a retry."""

import json
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final

import httpx

from flotilla.services.reward.reply import MAX_ANSWER_BYTES
from flotilla.shared.clock import Clock
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.authorisation.tokens import signature
from flotilla.shared.net.client.address_policy import Resolver, permitted_address, resolve
from flotilla.shared.net.client.bounded_json import ReplyTooLong, at_most, is_packed

RETRIED_STATUSES: Final = {408, 425, 429, 500, 502, 503, 504}
ASKS_FOR_PAUSE: Final = 429
REASON_BYTES: Final = 4096
REASON_LENGTH: Final = 300
"""Of what a grader says about a refusal, what is kept."""


class Retryable(GradingFailed):
    """This attempt failed in a way that the next may not.

    Args:
        detail: what happened.
        after_seconds: how long the grader asks to be left alone.
        is_outage: whether it speaks against the URL: it did not answer, or not as a server that works.
        answered: the status that it answered with; None if it did not.
    """

    def __init__(
        self, detail: str, after_seconds: float = 0.0, *, is_outage: bool = True, answered: int | None = None
    ) -> None:
        super().__init__(detail)
        self.after_seconds = after_seconds
        self.is_outage = is_outage
        self.answered = answered


def asked_pause(error: Exception) -> float:
    """Return how long whoever failed asks to be left alone, in seconds."""
    return error.after_seconds if isinstance(error, Retryable) else 0.0


class Unusable(GradingFailed):
    """The answer is none that can be read. It is final for those who asked; the URL is asked less often by others."""


class GraderCall:
    """Posts a body to a URL.

    Args:
        client: must not follow redirects nor use the environment's proxies; stays the caller's to close.
        clock: for the signature's timestamp.
        secret: signs the requests; None leaves them unsigned.
        private: networks that are not public and may be asked.
        resolver: how names are found.
        headers: sent besides.
        peer: what errors call who is asked.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        clock: Clock,
        secret: str | None = None,
        *,
        private: Sequence[IPNetwork] = (),
        resolver: Resolver = resolve,
        headers: Mapping[str, str] | None = None,
        peer: str = "the grader",
    ) -> None:
        self._client = client
        self._clock = clock
        self._secret = secret
        self._private = private
        self._resolver = resolver
        self._headers = dict(headers or {})
        self._peer = peer

    async def post(
        self, url: str, body: bytes, name: str, *, may_be_later: bool = False, max_bytes: int | None = None
    ) -> bytes | None:
        """Send a request and return the body of a 200; None for a 202, where that is allowed.

        Args:
            url: of the grader.
            body: JSON.
            name: the request's id, the same at every attempt.
            may_be_later: whether a callback was offered.
            max_bytes: the longest answer; None for that of a grader.

        Raises:
            Retryable: the next attempt may succeed.
            Unusable: the answer is too long, or compressed.
            GradingFailed: it will not.
        """
        most = MAX_ANSWER_BYTES if max_bytes is None else max_bytes
        try:
            request = await self._request(url, body, name)
            response = await self._client.send(request, stream=True)
            try:
                if await self._is_later(response, may_be_later):
                    return None
                content = bytearray()
                async for piece in at_most(response.aiter_bytes(), most):
                    content += piece
            finally:
                await response.aclose()
        except ReplyTooLong as error:
            raise Unusable(f"{self._peer}'s answer is longer than {most} bytes") from error
        except (httpx.HTTPError, OSError) as error:
            raise Retryable(f"{self._peer} does not answer: {error!r}"[:500]) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise GradingFailed(f"{self._peer}'s URL cannot be used: {error}"[:500]) from error
        return bytes(content)

    async def _request(self, text: str, body: bytes, name: str) -> httpx.Request:
        url = httpx.URL(text)
        port = url.port or (443 if url.scheme == "https" else 80)
        host = url.raw_host.decode()
        address = await permitted_address(host, port, private=self._private, resolver=self._resolver)
        headers = {
            "Host": url.netloc.decode(),
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Idempotency-Key": name,
            **self._headers,
        }
        if self._secret is not None:
            timestamp = str(int(self._clock.now()))
            headers["X-Flotilla-Timestamp"] = timestamp
            headers["X-Flotilla-Signature"] = f"sha256={signature(self._secret, timestamp, body)}"
        return self._client.build_request(
            "POST", url.copy_with(host=address), content=body, headers=headers, extensions={"sni_hostname": host}
        )

    async def _is_later(self, response: httpx.Response, may_be_later: bool) -> bool:
        # Before a byte is read.
        if is_packed(response.headers):
            raise Unusable(f"{self._peer} answered {response.status_code}, compressed, though it was asked not to")
        if response.status_code == 200:
            return False
        if response.status_code == 202:
            if may_be_later:
                return True
            raise GradingFailed(f"{self._peer} answered 202 (later), but it was offered no callback")
        reason = await _reason(response)
        if response.status_code in RETRIED_STATUSES:
            after = _retry_after(response.headers.get("Retry-After"), self._clock.now())
            is_outage = response.status_code != ASKS_FOR_PAUSE
            detail = f"{self._peer} answered {response.status_code}{reason}"
            raise Retryable(detail, after, is_outage=is_outage, answered=response.status_code)
        raise GradingFailed(f"{self._peer} refused the request with {response.status_code}{reason}")


def _retry_after(header: str | None, now: float) -> float:
    """Read ``Retry-After`` in seconds or as a date; 0 if it says nothing."""
    if not header:
        return 0.0
    try:
        seconds = float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - now
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0
    return max(0.0, seconds)


async def _reason(response: httpx.Response) -> str:
    """What a grader says about its refusal: the usual fields of a JSON object, else the beginning of the text."""
    content = b""
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > REASON_BYTES:
            break
    text = content[:REASON_BYTES].decode("utf-8", "replace")
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        text = next((str(answer[key]) for key in ("detail", "error", "message", "title") if answer.get(key)), text)
    words = "".join(character if character.isprintable() else " " for character in text).split()
    return f": {' '.join(words)}"[:REASON_LENGTH] if words else ""
