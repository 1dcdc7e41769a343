"""Several services in one process: each on a socket of its own; one that has left the fleet ends alone."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from flotilla.shared.environment.settings import MOST_EXPERIMENTS, experiments_from
from flotilla.shared.errors import InvalidRequest
from flotilla.shared.net.server.serving import address_of, bind, serve_several
from flotilla.shared.schemas.service import ObservedState
from flotilla.shared.service.app import at_work, create_service_app, leave

SECONDS = 10.0


class Service:
    """Works as the test says, and notes when it was closed."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self.notify: Callable[[], None] = lambda: None
        self.is_closed = False
        self.refusal: InvalidRequest | None = None
        self.listening = bind("127.0.0.1", 0)
        self.address = address_of(self.listening)

    def observe(self) -> ObservedState:
        """Tell nothing."""
        return ObservedState()

    async def apply(self, desired: object) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Work."""
        async with asyncio.timeout(SECONDS):
            await self._work()

    def served(self) -> tuple[FastAPI, socket.socket]:
        """Make its app."""

        @contextlib.asynccontextmanager
        async def open_state() -> AsyncIterator[Any]:
            if self.refusal is not None:
                raise self.refusal
            membership = SimpleNamespace(notify=print, run=asyncio.Event().wait, is_connected=True)
            async with at_work(self, membership):  # type: ignore[arg-type]
                yield SimpleNamespace(service=self, membership=membership)
            self.is_closed = True

        return create_service_app("trial", "flotilla.shared.service", open_state), self.listening


async def answers(address: str) -> bool:
    """Whether something is alive there."""
    try:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{address}/healthz")).status_code == 200
    except httpx.TransportError:
        return False


def test_one_that_has_left_ends_alone_and_the_process_with_the_last() -> None:
    async def at_once() -> None:
        while not await answers(other.address):
            await asyncio.sleep(0.01)

    async def when_the_first_is_gone() -> None:
        while not first.is_closed or await answers(first.address):
            await asyncio.sleep(0.01)
        assert await answers(other.address)

    first, other = Service(at_once), Service(when_the_first_is_gone)
    serve_several([first.served(), other.served()], departs=None, tls=None)

    assert first.is_closed
    assert other.is_closed


def test_one_that_fails_ends_all_so_that_their_owner_starts_them_again() -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    failing, other = Service(fail), Service(asyncio.Event().wait)  # type: ignore[arg-type]
    serve_several([failing.served(), other.served()], departs=lambda: partial(leave, 1.0), tls=None)

    assert other.is_closed


def test_one_that_cannot_start_ends_all_with_its_reason() -> None:
    refused, other = Service(asyncio.Event().wait), Service(asyncio.Event().wait)  # type: ignore[arg-type]
    refused.refusal = InvalidRequest("FLOTILLA_DEVICES must be numbers")

    with pytest.raises(InvalidRequest, match="FLOTILLA_DEVICES"):
        serve_several([other.served(), refused.served()], departs=None, tls=None)
    assert other.is_closed


@pytest.mark.parametrize("text", ["0", "-1", "many", str(MOST_EXPERIMENTS + 1), "1.5"])
def test_a_wrong_number_of_experiments_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="FLOTILLA_EXPERIMENTS must be a number from 1 to"):
        experiments_from({"FLOTILLA_EXPERIMENTS": text})


def test_a_process_serves_one_experiment_unless_it_is_told() -> None:
    assert [experiments_from({}), experiments_from({"FLOTILLA_EXPERIMENTS": "8"})] == [1, 8]
