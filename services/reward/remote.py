"""Graders behind a URL.

A grader's outage is an error of the samples, never a reward. One call of ``score`` is one request, repeated under the
same id until it is answered, refused, or out of time.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from email.utils import parsedate_to_datetime

import httpx

from services.reward.address_policy import Resolver, permitted_address, resolve
from services.reward.reply import MAX_ANSWER_BYTES, parse_grades, parse_openrlhf, read_json
from shared.clock import Clock, SystemClock
from shared.config.reward import RemoteConfig
from shared.errors import GradingFailed
from shared.retry import Backoff, retry
from shared.schemas.grading import Grade, GradingRequest, GradingSample
from shared.security import signature
from shared.settings import LOOPBACK, IPNetwork

RETRIED_STATUSES = {408, 425, 429, 500, 502, 503, 504}
FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
REASON_BYTES = 4096
REASON_LENGTH = 300
"""Of what a grader says about a refusal, what is kept."""


class Retryable(GradingFailed):
    """This attempt failed in a way that the next may not.

    Args:
        detail: what happened.
        after_seconds: how long the grader asks to be left alone.
    """

    def __init__(self, detail: str, after_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.after_seconds = after_seconds


def _asked_pause(error: Exception) -> float:
    return error.after_seconds if isinstance(error, Retryable) else 0.0


def request_id(experiment: str, samples: Sequence[GradingSample]) -> str:
    """Name a request by its content, so that a retry has the same name even from another process."""
    content = json.dumps([experiment, *(sample.model_dump(mode="json") for sample in samples)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _retry_after(header: str | None, now: float) -> float:
    """Read ``Retry-After`` in seconds or as a date; 0 if it says nothing."""
    if not header:
        return 0.0
    try:
        seconds = float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - now
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0
    return max(0.0, seconds)


class RemoteVerifier:
    """Posts samples to a grader.

    Args:
        config: the component's section.
        experiment: id of the experiment that asks.
        client: closed by this object; must not follow redirects nor use the environment's proxies.
        secret: signs the requests; None leaves them unsigned.
        private: networks that are not public and may be asked, where the spec says ``allow_private``.
        resolver, clock: how names and the time are found.
        backoff_seconds: the first pause between attempts; it doubles, and a random part of it is taken.
    """

    def __init__(
        self,
        config: RemoteConfig,
        experiment: str,
        client: httpx.AsyncClient,
        secret: str | None = None,
        *,
        private: Sequence[IPNetwork] = LOOPBACK,
        resolver: Resolver = resolve,
        clock: Clock | None = None,
        backoff_seconds: float = FIRST_BACKOFF_SECONDS,
    ) -> None:
        self._config = config
        self._experiment = experiment
        self._client = client
        self._secret = secret
        self._private = private
        self._resolver = resolver
        self._clock = clock or SystemClock()
        self._backoff_seconds = backoff_seconds

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Ask for the samples' grades; a failure of the grader is an error of each."""
        if not samples:
            return []
        body, name = self._body(samples)
        try:
            answer = read_json(await self._ask(body, name))
            if self._config.dialect == "openrlhf":
                return parse_openrlhf(answer, len(samples))
            return parse_grades(answer, len(samples), name)
        except GradingFailed as error:
            return [Grade.error(error.detail)] * len(samples)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _body(self, samples: Sequence[GradingSample]) -> tuple[bytes, str]:
        name = request_id(self._experiment, samples)
        if self._config.dialect == "flotilla":
            request = GradingRequest(id=name, experiment=self._experiment, samples=tuple(samples))
            return request.model_dump_json().encode(), name
        lists = {
            "query": [sample.prompt + sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.label or "" for sample in samples],
        }
        return json.dumps(lists).encode(), name

    async def _ask(self, body: bytes, name: str) -> bytes:
        config = self._config
        deadline = self._clock.monotonic() + config.deadline_seconds
        attempts = 0

        async def attempt() -> bytes:
            nonlocal attempts
            attempts += 1
            try:
                async with asyncio.timeout(min(config.attempt_seconds, deadline - self._clock.monotonic())):
                    return await self._attempt(body, name)
            except TimeoutError:
                raise Retryable("no answer in time") from None

        try:
            return await retry(
                attempt,
                waiting_for="grader",
                deadline_seconds=config.deadline_seconds,
                backoff=Backoff(self._backoff_seconds, MAX_BACKOFF_SECONDS, pause_at_least=_asked_pause),
                is_retryable=lambda error: isinstance(error, Retryable) and attempts < config.max_attempts,
                now=self._clock.monotonic,
            )
        except Retryable as error:
            raise GradingFailed(f"the grader failed {attempts} times, at last: {error.detail}") from error

    async def _attempt(self, body: bytes, name: str) -> bytes:
        try:
            request = await self._request(body, name)
            response = await self._client.send(request, stream=True)
            try:
                await self._check(response)
                content = bytearray()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        raise GradingFailed(f"the grader's answer is longer than {MAX_ANSWER_BYTES} bytes")
            finally:
                await response.aclose()
        except (httpx.HTTPError, OSError) as error:
            raise Retryable(f"the grader does not answer: {error!r}"[:500]) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise GradingFailed(f"the grader's URL cannot be used: {error}"[:500]) from error
        return bytes(content)

    async def _request(self, body: bytes, name: str) -> httpx.Request:
        url = httpx.URL(self._config.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        host = url.raw_host.decode()
        private = self._private if self._config.allow_private else ()
        address = await permitted_address(host, port, private=private, resolver=self._resolver)
        headers = {
            "Host": url.netloc.decode(),
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Idempotency-Key": name,
        }
        if self._secret is not None:
            timestamp = str(int(self._clock.now()))
            headers["X-Flotilla-Timestamp"] = timestamp
            headers["X-Flotilla-Signature"] = f"sha256={signature(self._secret, timestamp, body)}"
        return self._client.build_request(
            "POST", url.copy_with(host=address), content=body, headers=headers, extensions={"sni_hostname": host}
        )

    async def _check(self, response: httpx.Response) -> None:
        # Before a byte is read: what a few bytes unpack to is the grader's choice.
        if response.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}:
            raise GradingFailed(f"the grader answered {response.status_code}, compressed, though it was asked not to")
        if response.status_code == 200:
            return
        if response.status_code == 202:
            raise GradingFailed("the grader answered 202 (later), but it was offered no callback")
        reason = await _reason(response)
        if response.status_code in RETRIED_STATUSES:
            after = _retry_after(response.headers.get("Retry-After"), self._clock.now())
            raise Retryable(f"the grader answered {response.status_code}{reason}", after)
        raise GradingFailed(f"the grader refused the request with {response.status_code}{reason}")


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
