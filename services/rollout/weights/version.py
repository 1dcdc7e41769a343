"""The version that an engine serves, and the one that it is about to serve, as something that can be waited for."""

import asyncio


class VersionGate:
    """Holds the serving version; ``None`` while the engine has no weights that may be sampled from."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._coming = -1
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int | None:
        """The version that serves now."""
        return self._version

    async def set(self, version: int | None) -> None:
        """Record that ``version`` serves from now on."""
        async with self._changed:
            self._version = version
            self._coming = max(self._coming, -1 if version is None else version)
            self._changed.notify_all()

    async def announce(self, version: int) -> None:
        """Record that ``version`` is to serve next: what it makes too old need not be finished first."""
        async with self._changed:
            self._coming = max(self._coming, version)
            self._changed.notify_all()

    async def comes(self, version: int) -> None:
        """Wait until ``version`` or a newer one serves or is announced."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._coming >= version)

    async def at_least(self, version: int, wait_seconds: float) -> int:
        """Wait until ``version`` or a newer one serves, and return which.

        Raises:
            TimeoutError: it did not come within ``wait_seconds``.
        """
        async with asyncio.timeout(wait_seconds), self._changed:
            await self._changed.wait_for(lambda: self._version is not None and self._version >= version)
            assert self._version is not None
            return self._version
