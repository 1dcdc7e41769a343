"""What a gateway throws away every hour: old answers to idempotency keys, expired tokens, what is kept no longer, and
for nobody."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from flotilla.services.gateway.feeder.opening import end_left_subscriptions
from flotilla.services.gateway.retention.pruning import Retainer
from flotilla.services.gateway.runtime.parts import GatewayParts
from flotilla.shared.errors import FlotillaError

log = logging.getLogger(__name__)

CLEANING_SECONDS: Final = 3600.0


class Cleaning:
    """Cleans up now and every hour.

    Attributes:
        retainer: of what finished experiments left.
    """

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self.retainer: Final = Retainer(
            parts.repository,
            parts.commands,
            parts.events,
            parts.samples,
            parts.clock,
            parts.settings.experiments,
        )

    async def run(self) -> None:
        """Clean up until cancelled."""
        while True:
            await self.clean()
            await asyncio.sleep(CLEANING_SECONDS)

    async def clean(self) -> None:
        """Clean up once; what could not be deleted is at the next time."""
        store, clock, settings = self._parts.store, self._parts.clock, self._parts.settings
        parts: dict[str, Callable[[], Awaitable[object]]] = {
            "answers": partial(store.delete_answers, clock.now() - settings.answer_seconds),
            "tokens": self._parts.tokens.delete_expired,
            "subscriptions": partial(end_left_subscriptions, self._parts.repository),
        }
        if settings.retention.is_set:
            parts["experiments"] = partial(self.retainer.prune, settings.retention, dry_run=False)
        for name, delete in parts.items():
            try:
                await delete()
            except (FlotillaError, OSError) as error:
                facts = {"part": name, "error": repr(error)}
                log.warning("what is kept no longer could not be deleted", extra=facts)
