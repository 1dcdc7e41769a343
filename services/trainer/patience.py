"""Waiting for servers: one that is away costs time, never work."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import FlotillaError

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.2

Answer = TypeVar("Answer")


async def retrying(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeat a call that is safe to repeat until the server answers; what is not retryable leaves at once."""
    while True:
        try:
            return await call()
        except FlotillaError as error:
            if not error.retryable:
                raise
            log.warning("a server is away", extra={"error": error.detail})
            await asyncio.sleep(PAUSE_SECONDS)
