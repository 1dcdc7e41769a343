"""Which of the servers that a verifier asks do not answer now, as the last call of each said."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from flotilla.services.reward.grader_call import Retryable
from flotilla.shared.errors import GradingFailed
from flotilla.shared.net.client.address_policy import AddressRefused
from flotilla.shared.schemas.service import Failure


class Reachability:
    """Keeps what the last call of each URL said of it.

    Args:
        component: what failures call who is asked, such as ``grader``.
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
