"""The requests that a server's engine has accepted; all of them can be ended at the server and continued later."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix

ABORT_SECONDS = 1.0
"""After which an abort is sent again: one that overtakes its request is not heard."""


@dataclass(slots=True, eq=False)
class Active:
    """A request that was accepted, its completions' ids, and the calls that sample them once they are sent."""

    request: GenerationRequest
    ids: list[str]
    is_aborted: bool = False
    calls: list[asyncio.Task[Completion]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    """The completions that the server samples now, or is about to."""

    @property
    def num_open(self) -> int:
        """Completions that have not ended."""
        return sum(not call.done() for call in self.calls) if self.calls else len(self.ids)


class InFlight(dict[str, Active]):
    """Requests by id.

    Attributes:
        num_interruptions: how often all of them were ended at the server, to continue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_interruptions = 0
        self._answered = asyncio.Event()

    @contextmanager
    def asking(self, active: Active, index: int) -> Iterator[None]:
        """Note that the server has a completion while the block runs."""
        active.asked.add(index)
        try:
            yield
        finally:
            active.asked.discard(index)
            self._answered.set()

    async def interrupt(self, abort: Callable[[str], Awaitable[None]], *, is_over: Callable[[], bool]) -> None:
        """End all completions at the server; returns when it has answered each with what it sampled.

        Nothing is sent meanwhile.

        Args:
            abort: asks the server to end one by its id there.
            is_over: whether no answer will come any more.
        """
        self.num_interruptions += 1
        while (ids := self._ids_asked()) and not is_over():
            self._answered.clear()
            await asyncio.gather(*map(abort, ids))
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_SECONDS):
                    while self._ids_asked():
                        await self._answered.wait()
                        self._answered.clear()

    def _ids_asked(self) -> list[str]:
        return [active.ids[index] for active in self.values() for index in active.asked]


def what_it_has(completion: Completion) -> Prefix | None:
    """Make what a completion that was ended continues with; None where it has no token."""
    if not completion.token_ids.size:
        return None
    return Prefix(
        token_ids=tuple(completion.token_ids.tolist()),
        log_probs=tuple(completion.log_probs.tolist()),
        versions=completion.versions,
        experts=completion.experts,
    )
