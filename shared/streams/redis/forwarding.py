"""Forwards that happen at the same time share a round trip.

A worker forwards each group as it gets ready, and many get ready while an earlier forward is on its way. Those wait for
it and are then sent together: there is no timer, and the busier the worker, the larger the batches.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from flotilla.shared.errors import FlotillaError

MAX_TOGETHER = 64

Entry = TypeVar("Entry")


class _Waiting(NamedTuple, Generic[Entry]):
    entry: Entry
    answer: asyncio.Future[bool]


class ForwardsTogether(Generic[Entry]):
    """Joins single forwards of one hop.

    Args:
        send: sends entries, which were encoded before: what is wrong with one of them is an error of its own sender.
            Each stands alone, and repeating one is safe.
    """

    def __init__(self, send: Callable[[Sequence[Entry]], Awaitable[list[bool]]]) -> None:
        self._send_many = send
        self._waiting: list[_Waiting[Entry]] = []
        self._is_sending = asyncio.Lock()

    async def forward(self, entry: Entry) -> bool:
        """Forward one, alone if nothing else is on its way; see ``Hop.forward``."""
        mine = _Waiting(entry, asyncio.get_running_loop().create_future())
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

    async def _send(self, first: _Waiting[Entry]) -> None:
        """Send the oldest that wait, ``first`` among them."""
        self._waiting.remove(first)
        batch = [first, *self._waiting[: MAX_TOGETHER - 1]]
        del self._waiting[: MAX_TOGETHER - 1]
        try:
            await self._send_batch(batch)
        except asyncio.CancelledError:
            # The sender alone was cancelled. The others send again, which is safe.
            self._waiting[:0] = [each for each in batch[1:] if not each.answer.done()]
            raise

    async def _send_batch(self, batch: Sequence[_Waiting[Entry]]) -> None:
        try:
            answers = await self._send_many([each.entry for each in batch])
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, FlotillaError):
                # Which of them the server refused is not said: each gets an answer of its own.
                for each in batch:
                    await self._send_batch([each])
                return
            # The server is unavailable, or this consumer was replaced: that holds for all of them.
            for each in batch:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        for each, answer in zip(batch, answers, strict=True):
            if not each.answer.done():
                each.answer.set_result(answer)
