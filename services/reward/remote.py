"""Graders behind URLs.

A grader's outage is an error of the samples, never a reward. One call of ``score`` is one request, repeated under the
same id until it is answered, refused, or out of time; each attempt may go to another of the grader's URLs.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import httpx

from flotilla.services.reward.grader_call import (
    GraderCall,
    Reachability,
    Retryable,
    Unusable,
    asked_pause,
    parse_grades,
    parse_openrlhf,
    read_json,
)
from flotilla.shared.clock import Clock, SystemClock
from flotilla.shared.config.sections.reward import RemoteConfig
from flotilla.shared.environment.settings import LOOPBACK, IPNetwork
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.authorisation.tokens import new_callback_key
from flotilla.shared.net.client.address_policy import Resolver, resolve
from flotilla.shared.net.retry import (
    DATA_PLANE,
    OTHERS_FIRST_PAUSE_SECONDS,
    OTHERS_LONGEST_PAUSE_SECONDS,
    Backoff,
    retry,
)
from flotilla.shared.schemas.grading import Grade, GradingRequest, GradingSample
from flotilla.shared.schemas.service import GRADER, Failure
from flotilla.shared.schemas.trajectory import GradeStatus
from flotilla.shared.streams.mailbox import Mailbox, wait_for_answer

LONGEST_REST_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.25
"""How soon it is worth asking again while a call is under way to a URL that rests."""


@dataclass(slots=True)
class _Breaker:
    url: str
    weight: float
    failures: int = 0
    rests_until: float = 0.0
    rest_seconds: float = 0.0
    is_tried: bool = False
    under_way: int = 0


class Endpoints:
    """The URLs of one grader.

    Args:
        urls: with their weights, above 0.
        failures: in a row, after which a URL rests.
        rest_seconds: the first rest.
        now: a clock in seconds that never goes back.
        choose: picks one of several by weights.
    """

    def __init__(
        self,
        urls: Sequence[tuple[str, float]],
        *,
        failures: int,
        rest_seconds: float,
        now: Callable[[], float],
        choose: Callable[[Sequence[str], Sequence[float]], str] = lambda urls, weights: random.choices(urls, weights)[
            0
        ],
    ) -> None:
        self._breakers = {url: _Breaker(url, weight) for url, weight in urls}
        self._failures = failures
        self._rest_seconds = rest_seconds
        self._now = now
        self._choose = choose
        self.last_failure = ""
        """What was wrong with the call that failed last."""

    def pick(self, avoid: Collection[str] = ()) -> str | None:
        """Choose a URL, one of ``avoid`` only if no other may be asked; None while all rest."""
        usable = [each for each in self._breakers.values() if self._may_be_asked(each)]
        fresh = [each for each in usable if each.url not in avoid] or usable
        if not fresh:
            return None
        return self._choose([each.url for each in fresh], [each.weight for each in fresh])

    def has_other(self, avoid: Collection[str]) -> bool:
        """Return whether a URL that is not in ``avoid`` may be asked now."""
        return any(self._may_be_asked(each) for each in self._breakers.values() if each.url not in avoid)

    def seconds_until_usable(self) -> float:
        """Return how long to wait while all rest; a call under way may end its URL's rest."""
        if any(each.under_way for each in self._breakers.values()):
            return POLL_SECONDS
        rest = min(each.rests_until for each in self._breakers.values()) - self._now()
        return max(POLL_SECONDS, rest)

    @contextmanager
    def asking(self, url: str, is_failure: Callable[[BaseException], bool]) -> Iterator[None]:
        """Note how the call inside the block ends; an error that is no failure proves that the URL answers."""
        breaker = self._breakers[url]
        breaker.is_tried = True
        breaker.under_way += 1
        try:
            yield
        except Exception as error:
            if is_failure(error):
                self.last_failure = str(error)
                self._failed(breaker)
            else:
                self._answered(breaker)
            raise
        else:
            self._answered(breaker)
        finally:
            breaker.is_tried = False
            breaker.under_way -= 1

    def _may_be_asked(self, breaker: _Breaker) -> bool:
        if not breaker.rests_until:
            return True
        return self._now() >= breaker.rests_until and not breaker.is_tried

    def _failed(self, breaker: _Breaker) -> None:
        if self._now() < breaker.rests_until:
            # It was under way when the rest began, and adds no information.
            return
        breaker.failures += 1
        if breaker.failures >= self._failures:
            breaker.rest_seconds = min(2 * breaker.rest_seconds or self._rest_seconds, LONGEST_REST_SECONDS)
            breaker.rests_until = self._now() + breaker.rest_seconds

    def _answered(self, breaker: _Breaker) -> None:
        breaker.failures, breaker.rests_until, breaker.rest_seconds = 0, 0.0, 0.0


class _AllRest(Retryable):
    """No URL may be asked now."""


class _NoneUsable(Exception):
    """Every grade of an answer is an error.

    Args:
        grades: they are.
    """

    def __init__(self, grades: list[Grade]) -> None:
        super().__init__(grades[0].reason or "each grade is an error")
        self.grades = grades


def request_id(experiment: str, samples: Sequence[GradingSample]) -> str:
    """Name a request by its content, so that a retry has the same name even from another process."""
    content = json.dumps([experiment, *(sample.model_dump(mode="json") for sample in samples)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Where graders may answer later.

    Attributes:
        mailbox: where their answers are found.
        base_url: of the gateway, as graders reach it.
    """

    mailbox: Mailbox
    base_url: str

    def url(self, experiment: str, name: str, token: str) -> str:
        """Make the address of one answer; its token permits to post there."""
        return f"{self.base_url.rstrip('/')}/v1/gradings/{name}?experiment={experiment}&token={token}"


class RemoteVerifier:
    """Posts samples to a grader.

    Args:
        config: the component's section.
        experiment: id of the experiment that asks.
        client: closed by this object; must not follow redirects nor use the environment's proxies.
        secret: signs the requests; None leaves them unsigned.
        callbacks: for answers that come later, if the spec sets ``callback_seconds``.
        private: private networks that may be called, if the spec sets ``allow_private``.
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
        callbacks: Callbacks | None = None,
        private: Sequence[IPNetwork] = LOOPBACK,
        resolver: Resolver = resolve,
        clock: Clock | None = None,
        backoff_seconds: float = OTHERS_FIRST_PAUSE_SECONDS,
    ) -> None:
        self._config = config
        self._experiment = experiment
        self._secret = secret
        self._callbacks = callbacks if config.callback_seconds is not None else None
        self._client = client
        self._clock = clock or SystemClock()
        self._backoff_seconds = backoff_seconds
        allowed = private if config.allow_private else ()
        self._call = GraderCall(client, self._clock, secret, private=allowed, resolver=resolver)
        self._endpoints = Endpoints(
            config.weighted_urls,
            failures=config.breaker_failures,
            rest_seconds=config.breaker_seconds,
            now=self._clock.monotonic,
        )
        self._reachability = Reachability(GRADER)
        self._room = asyncio.Semaphore(config.concurrency)

    @property
    def problem(self) -> Failure | None:
        """A URL of the grader that does not answer now; None if each answered when it was last asked."""
        return self._reachability.problem

    async def score(self, samples: Sequence[GradingSample]) -> list[Grade]:
        """Ask for the samples' grades; a failure of the grader is an error of each."""
        if not samples:
            return []
        try:
            return await self._answer(samples, request_id(self._experiment, samples))
        except GradingFailed as error:
            return [Grade.error(error.detail)] * len(samples)

    async def _answer(self, samples: Sequence[GradingSample], name: str) -> list[Grade]:
        """Return the answer's grades.

        Raises:
            GradingFailed: there is none, or none that can be read.
        """
        callbacks, seconds = self._callbacks, self._config.callback_seconds
        if callbacks is None or seconds is None:
            grades = await self._ask(self._body(samples, name), name, len(samples))
            assert grades is not None
            return grades
        while True:
            key = new_callback_key(self._secret, name)
            expecting = partial(callbacks.mailbox.expect, name, key=key, seconds=seconds)
            # An earlier request, perhaps of another process, continues: with the same address, until the same deadline.
            expected = await retry(expecting, waiting_for=DATA_PLANE)
            if expected.answer is not None or expected.seconds_left > 0:
                break
            # That deadline was missed: this is another request, with the same name in every process.
            name = hashlib.sha256(name.encode()).hexdigest()[:32]
        if expected.answer is None and not expected.is_accepted:
            token = expected.key.partition(":")[0]
            body = self._body(samples, name, callbacks.url(self._experiment, name, token))
            grades = await self._ask(body, name, len(samples))
            if grades is not None:
                return grades
            await retry(partial(callbacks.mailbox.accept, name), waiting_for=DATA_PLANE)
        later = await wait_for_answer(callbacks.mailbox, name)
        if later is None:
            raise GradingFailed(f"the grader answered 202 (later), and did not call back within {seconds:g} s")
        return self._read(later, name, len(samples))

    def _read(self, content: bytes, name: str, num_samples: int) -> list[Grade]:
        """Read an answer.

        Raises:
            Unusable: it cannot be read as a whole.
        """
        try:
            answer = read_json(content)
            if self._config.dialect == "openrlhf":
                return parse_openrlhf(answer, num_samples)
            return parse_grades(answer, num_samples, name)
        except GradingFailed as error:
            raise Unusable(error.detail) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _body(self, samples: Sequence[GradingSample], name: str, callback_url: str | None = None) -> bytes:
        if self._config.dialect == "openrlhf":
            return json.dumps(openrlhf_lists(samples)).encode()
        request = GradingRequest(
            id=name, experiment=self._experiment, samples=tuple(samples), callback_url=callback_url
        )
        return request.model_dump_json().encode()

    async def _ask(self, body: bytes, name: str, num_samples: int) -> list[Grade] | None:
        """Ask until there is an answer; None if it comes later. Between attempts the room is left to others."""
        config = self._config
        # The deadline begins with the first attempt: those before in the queue have one each.
        await self._room.acquire()
        is_inside = True
        deadline = self._clock.monotonic() + config.deadline_seconds
        asked: list[str] = []

        async def attempt() -> list[Grade] | None:
            nonlocal is_inside
            if not is_inside:
                await self._room.acquire()
                is_inside = True
            try:
                return await self._post(body, name, num_samples, asked, deadline)
            except _NoneUsable as answer:
                return answer.grades
            finally:
                is_inside = False
                self._room.release()

        last: list[Retryable] = []

        def is_retryable(error: Exception) -> bool:
            if isinstance(error, Retryable) and not isinstance(error, _AllRest):
                last[:] = [error]
            return isinstance(error, Retryable) and len(asked) < config.max_attempts

        try:
            return await retry(
                attempt,
                waiting_for="grader",
                deadline_seconds=config.deadline_seconds,
                backoff=_FailOver(self._backoff_seconds, self._endpoints, asked),
                is_retryable=is_retryable,
                now=self._clock.monotonic,
            )
        except Retryable as error:
            cause = last[0] if last else error
            raise GradingFailed(f"the grader failed {len(asked)} times, at last: {cause.detail}") from error
        finally:
            if is_inside:
                self._room.release()

    async def _post(
        self, body: bytes, name: str, num_samples: int, asked: list[str], deadline: float
    ) -> list[Grade] | None:
        """Ask one URL, which is added to those that were asked; None if the answer comes later.

        Raises:
            Retryable: the next attempt may succeed.
            _NoneUsable: each grade is an error.
            GradingFailed: the answer is final, and none.
        """
        url = self._endpoints.pick(avoid=asked)
        if url is None:
            detail = f"every URL of the grader failed and rests ({self._endpoints.last_failure})"
            raise _AllRest(detail, self._endpoints.seconds_until_usable())
        asked.append(url)
        with self._endpoints.asking(url, _is_failure), self._reachability.asking(url):
            try:
                async with asyncio.timeout(min(self._config.attempt_seconds, deadline - self._clock.monotonic())):
                    content = await self._call.post(url, body, name, may_be_later=self._callbacks is not None)
            except TimeoutError:
                raise Retryable("no answer in time") from None
            grades = None if content is None else self._read(content, name, num_samples)
            if grades and all(grade.status is GradeStatus.ERROR for grade in grades):
                raise _NoneUsable(grades)
            return grades


class _FailOver(Backoff):
    """No pause where another URL can be asked at once."""

    def __init__(self, first_seconds: float, endpoints: Endpoints, asked: Sequence[str]) -> None:
        super().__init__(first_seconds, OTHERS_LONGEST_PAUSE_SECONDS, pause_at_least=asked_pause)
        self._endpoints = endpoints
        self._asked = asked

    def after(self, error: Exception) -> float:
        return 0.0 if self._endpoints.has_other(self._asked) else super().after(error)


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, Unusable | _NoneUsable) or (isinstance(error, Retryable) and error.is_outage)


def openrlhf_lists(samples: Sequence[GradingSample]) -> dict[str, list[str]]:
    """Make the body of a request in OpenRLHF's dialect."""
    return {
        "query": [sample.prompt + sample.response for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "labels": [sample.label or "" for sample in samples],
    }
