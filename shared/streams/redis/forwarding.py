"""Forwards that happen at the same time share a round trip.

A worker forwards each group as it gets ready, and many get ready while an earlier forward is on its way. Those wait for
it and then go together: nobody waits for a timer, and the busier the worker, the larger the batches.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from shared.errors import FlotillaError
from shared.schemas.trajectory import Group
from shared.streams.hop import Claim

MAX_TOGETHER = 64


class _Waiting(NamedTuple):
    claim: Claim
    group: Group
    answer: asyncio.Future[bool]


class ForwardsTogether:
    """Joins single forwards of one hop.

    Args:
        forward_many: forwards several; each stands alone, and repeating one is safe.
    """

    def __init__(self, forward_many: Callable[[Sequence[tuple[Claim, Group]]], Awaitable[list[bool]]]) -> None:
        self._forward_many = forward_many
        self._waiting: list[_Waiting] = []
        self._is_sending = asyncio.Lock()

    async def forward(self, claim: Claim, group: Group) -> bool:
        """Forward one, alone if nothing else is on its way; see ``Hop.forward``."""
        mine = _Waiting(claim, group, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            async with self._is_sending:
                if not mine.answer.done():
                    await self._send(mine)
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            if not mine.answer.done():
                mine.answer.cancel()
        return mine.answer.result()

    async def _send(self, first: _Waiting) -> None:
        """Send the oldest that wait, ``first`` among them."""
        self._waiting.remove(first)
        batch = [first, *self._waiting[: MAX_TOGETHER - 1]]
        del self._waiting[: MAX_TOGETHER - 1]
        try:
            answers = await self._forward_many([(each.claim, each.group) for each in batch])
        except FlotillaError as error:
            # The server is away, or this consumer is no longer the one: that holds for all of them.
            for each in _unanswered(batch[1:]):
                each.answer.set_exception(error)
            raise
        except BaseException:
            # The sender alone was cancelled, or one of them is at fault. The others send again, which is safe.
            self._waiting[:0] = _unanswered(batch[1:])
            raise
        for each, answer in zip(batch, answers, strict=True):
            if not each.answer.done():
                each.answer.set_result(answer)


def _unanswered(batch: Sequence[_Waiting]) -> list[_Waiting]:
    return [each for each in batch if not each.answer.done()]
