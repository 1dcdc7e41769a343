"""One request to one URL of a grader: address policy, signature, bounds, and what its answer means for a retry.

An answer is grades or a ``GradingFailed``, whichever process wrote it. Its bytes are bounded before they are parsed,
and so is the number of values: parsing holds the event loop for as long as it makes objects. ``Reachability`` keeps
which of the servers did not answer their last call.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Final

import httpx
from pydantic import ValidationError

from flotilla.shared.clock import Clock
from flotilla.shared.environment.settings import IPNetwork
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.authorisation.tokens import signature
from flotilla.shared.net.client.address_policy import AddressRefused, Resolver, permitted_address, resolve
from flotilla.shared.net.client.bounded_json import ReplyTooLong, at_most, is_packed, parse_json
from flotilla.shared.schemas.grading import GRADING_SCHEMA, Grade
from flotilla.shared.schemas.reward_number import reward_number
from flotilla.shared.schemas.service import Failure

MAX_ANSWER_BYTES: Final = 1024 * 1024
MAX_NAMES: Final = 64
"""Most components, and most metrics, of one sample."""
MAX_NAME_CHARACTERS: Final = 200


def read_json(content: bytes) -> object:
    """Parse a bounded answer; whole numbers become floats.

    Raises:
        GradingFailed: it is not JSON, or has too many values or levels.
    """
    if len(content) > MAX_ANSWER_BYTES:
        raise GradingFailed(f"the grader's answer is longer than {MAX_ANSWER_BYTES} bytes")
    try:
        return parse_json(content)
    except ValueError as error:
        raise GradingFailed(f"the grader's answer {error}") from None


def parse_grades(answer: object, num_samples: int, name: str) -> list[Grade]:
    """Read an answer in our own schema (``GradingResponse``). A bad grade is an error of its sample alone.

    Args:
        answer: the parsed JSON.
        num_samples: how many grades it must have.
        name: id of the request; the answer need not have it, but must not have another one.

    Raises:
        GradingFailed: the answer as a whole cannot be matched to the samples.
    """
    if not isinstance(answer, Mapping) or not isinstance(grades := answer.get("grades"), list):
        raise GradingFailed("the answer has no list `grades`")
    if answer.get("version", GRADING_SCHEMA) != GRADING_SCHEMA:
        version = answer["version"]
        given = f"{version:g}" if isinstance(version, float) else f"of a {type(version).__name__}"
        raise GradingFailed(f"the answer has schema version {given}, this one reads {GRADING_SCHEMA}")
    if answer.get("id") not in (None, name):
        raise GradingFailed("the answer has the id of another request")
    if len(grades) != num_samples:
        raise GradingFailed(f"the answer has {len(grades)} grades for {num_samples} samples")
    return [_grade(given) for given in grades]


def _grade(given: object) -> Grade:
    for field in ("components", "metrics"):
        named = given.get(field) if isinstance(given, Mapping) else None
        if isinstance(named, Mapping) and not _are_short(named):
            return Grade.error(
                f"the grader's {field} have over {MAX_NAMES} names, or longer than {MAX_NAME_CHARACTERS} characters"
            )
    try:
        return Grade.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "grade"
        return Grade.error(f"the grader's {where} is not valid: {first['msg'].removeprefix('Value error, ')}")
    except RecursionError:
        return Grade.error("the grader's grade has too many levels")


def _are_short(named: Mapping[object, object]) -> bool:
    return len(named) <= MAX_NAMES and all(len(str(name)) <= MAX_NAME_CHARACTERS for name in named)


def parse_openrlhf(answer: object, num_samples: int) -> list[Grade]:
    """Read an answer in OpenRLHF's form: lists ``rewards`` and, optionally, ``scores`` and ``extra_logs`` by name.

    A reward of null is an abstention. ``scores`` and ``extra_logs`` become metrics.

    Raises:
        GradingFailed: a list is missing or has another length than there are samples, or there are too many names.
    """
    if not isinstance(answer, Mapping):
        raise GradingFailed("the answer is not an object")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise GradingFailed("`extra_logs` is not an object")
    if not _are_short(logs):
        raise GradingFailed(
            f"`extra_logs` has more than {MAX_NAMES} names, or longer than {MAX_NAME_CHARACTERS} characters"
        )
    columns = {str(name): column for name, column in logs.items()}
    if answer.get("scores") is not None:
        columns["score"] = answer["scores"]
    for name, column in {"rewards": answer.get("rewards"), **columns}.items():
        if not isinstance(column, list) or len(column) != num_samples:
            length = len(column) if isinstance(column, list) else "no list of"
            raise GradingFailed(f"the answer has {length} {name} for {num_samples} samples")
    grades = []
    for index, reward in enumerate(answer["rewards"]):
        metrics = {name: float(column[index]) for name, column in columns.items() if _is_finite(column[index])}
        if reward is None:
            grades.append(Grade.abstained())
        else:
            grades.append(_scored(reward, metrics))
    return grades


def _scored(reward: object, metrics: Mapping[str, float]) -> Grade:
    try:
        return Grade.scored(reward_number(reward), metrics=metrics)
    except ValueError as error:
        return Grade.error(f"the grader's reward is not valid: {error}")


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


RETRIED_STATUSES: Final = {408, 425, 429, 500, 502, 503, 504}
ASKS_FOR_PAUSE: Final = 429
REASON_BYTES: Final = 4096
REASON_LENGTH: Final = 300
"""Characters that are kept of a grader's reason for a refusal."""


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
    """Return the failing server's ``Retry-After`` in seconds."""
    return error.after_seconds if isinstance(error, Retryable) else 0.0


class Unusable(GradingFailed):
    """The answer cannot be parsed. It is final for this call; other calls use the URL less often."""


class GraderCall:
    """Posts a body to a URL.

    Args:
        client: must not follow redirects nor use the environment's proxies; stays the caller's to close.
        clock: for the signature's timestamp.
        secret: signs the requests; None leaves them unsigned.
        private: networks that are not public and may be asked.
        resolver: how names are found.
        headers: sent besides.
        peer: the called server's name in errors.
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
    """Read ``Retry-After`` in seconds or as a date; 0 without it."""
    if not header:
        return 0.0
    try:
        seconds = float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - now
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0
    return max(0.0, seconds)


async def _reason(response: httpx.Response) -> str:
    """A grader's reason for its refusal: the usual fields of a JSON object, else the beginning of the text."""
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


class Reachability:
    """Keeps the result of the last call of each URL.

    Args:
        component: the called server's name in failures, such as ``grader``.
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._failures: dict[str, str] = {}

    @property
    def problem(self) -> Failure | None:
        """A server that does not answer; None if each answered when it was last asked."""
        url = next(iter(self._failures), None)
        if url is None:
            return None
        return Failure(component=self._component, cause=f"{_plain(url)}: {self._failures[url]}", fatal=False)

    @contextmanager
    def asking(self, url: str) -> Iterator[None]:
        """Note how the call inside the block ends; an answer of any kind, a refusal too, shows that the URL answers."""
        try:
            yield
        except GradingFailed as error:
            is_outage = isinstance(error, AddressRefused) or (isinstance(error, Retryable) and error.is_outage)
            if is_outage:
                self._failures[url] = error.detail
            else:
                self._failures.pop(url, None)
            raise
        else:
            self._failures.pop(url, None)


def _plain(url: str) -> str:
    """Leave out of a URL what may be secret."""
    return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
