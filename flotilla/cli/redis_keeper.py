"""Starts a fleet's own Redis server again, from its log, whenever it ends."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from flotilla.cli.processes import restarts_of_fleet
from flotilla.shared.errors import Unavailable

WATCH_SECONDS = 0.2


class Server(Protocol):
    """The server, as far as it is kept."""

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""

    def start(self) -> str:
        """Start it and wait until it answers.

        Raises:
            Unavailable: it ended meanwhile, or is not ready in time.
        """


class RedisKeeper:
    """Watches one server. As with other processes, it may end now and then, also while it starts, but not too often.

    Args:
        redis: the server, started.
        say: gets one line for each thing that happens.
    """

    def __init__(self, redis: Server, say: Callable[[str], None]) -> None:
        self._redis = redis
        self._say = say
        self._restarts = restarts_of_fleet()
        self.gave_up: str | None = None
        """Why the server is not started again."""

    async def run(self) -> None:
        """Watch until cancelled, or until the server has ended too often."""
        while self.gave_up is None:
            await asyncio.sleep(WATCH_SECONDS)
            if self._redis.pid is None:
                self._say("redis      ended; it is started again from its log")
                await self._start()

    async def _start(self) -> None:
        pause = self._restarts.died()
        # On the thread that started it first: the server ends with the thread that starts it.
        try:
            self._redis.start()
        except Unavailable as error:
            if pause is None:
                self.gave_up = f"redis cannot be started again: {error.detail}"
                return
            self._say(f"redis      did not start: {error.detail}")
            await asyncio.sleep(pause)
