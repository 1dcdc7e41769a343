"""Which of a grader's URLs is asked next: by weight, around those that fail, and one careful request after a rest.

Each URL has a circuit breaker: after ``failures`` calls in a row that failed, or were answered with nothing that can be
used, it rests for ``rest_seconds``, then one call tries it; if that fails too, it rests for twice as long, up to
``LONGEST_REST_SECONDS``.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

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
        """Tell whether a URL that is not in ``avoid`` may be asked now."""
        return any(self._may_be_asked(each) for each in self._breakers.values() if each.url not in avoid)

    def seconds_until_usable(self) -> float:
        """Tell how long nobody needs to ask, while all rest; a call that is under way may end its URL's rest."""
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
            # It was under way when the rest began, and says nothing new.
            return
        breaker.failures += 1
        if breaker.failures >= self._failures:
            breaker.rest_seconds = min(2 * breaker.rest_seconds or self._rest_seconds, LONGEST_REST_SECONDS)
            breaker.rests_until = self._now() + breaker.rest_seconds

    def _answered(self, breaker: _Breaker) -> None:
        breaker.failures, breaker.rests_until, breaker.rest_seconds = 0, 0.0, 0.0
