"""Answers that clients wait for: whoever asks hears of an answer at once, and of none after a while."""

import asyncio
import logging
from collections import defaultdict

from flotilla.shared.errors import FlotillaError
from flotilla.shared.tinker.queue import Answer, Form, TinkerQueue, Work

log = logging.getLogger(__name__)

AWAY_SECONDS = 1.0


class Futures:
    """Wakes those who wait for answers.

    Args:
        queue: of requests.
    """

    def __init__(self, queue: TinkerQueue) -> None:
        self._queue = queue
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)

    async def run(self) -> None:
        """Hear of answers until cancelled."""
        entry: str | None = None
        while True:
            try:
                is_new = entry is None
                entry, done = await self._queue.done_since(entry)
                # Nobody knows what was answered before.
                self._wake(list(self._waiting) if is_new else done)
            except FlotillaError as error:
                log.warning("answers are not heard of", extra={"error": error.detail})
                entry = None
                await asyncio.sleep(AWAY_SECONDS)

    def _wake(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            for event in self._waiting.get(request_id, ()):
                event.set()

    async def answer(self, request_id: str, seconds: float, *, is_sampled: bool, is_scored: bool) -> Answer | None:
        """Wait for an answer; None where there is none in time.

        Args:
            request_id: of the request.
            seconds: longest wait.
            is_sampled: whether it is of a request to sample.
            is_scored: whether the prompt is scored, too: then both parts are waited for.
        """
        event = asyncio.Event()
        self._waiting[request_id].add(event)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    event.clear()
                    found = await self._read(request_id, is_scored=is_sampled and is_scored)
                    if found is not None:
                        return found
                    await event.wait()
        except TimeoutError:
            return None
        finally:
            self._waiting[request_id].discard(event)
            if not self._waiting[request_id]:
                del self._waiting[request_id]

    async def _read(self, request_id: str, *, is_scored: bool) -> Answer | None:
        found = await self._queue.answer(request_id)
        if not is_scored or (found is not None and found.form is Form.FAILED):
            return found
        scores = await self._queue.answer(request_id, Work.SCORE)
        if scores is None or scores.form is Form.FAILED:
            return scores
        # Two messages of a kind one after another are one message with the fields of both.
        return None if found is None else Answer(found.form, found.content + scores.content)
