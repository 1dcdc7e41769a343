"""The mailbox on a Redis or Valkey server: one hash per expected answer, which expires."""

from flotilla.shared.streams.keys import StreamKeys
from flotilla.shared.streams.mailbox import KEPT_SECONDS, Delivery, Expected
from flotilla.shared.streams.redis.scripts import ScriptRunner


class RedisMailbox:
    """See ``Mailbox``."""

    def __init__(self, runner: ScriptRunner, keys: StreamKeys) -> None:
        self._runner = runner
        self._keys = keys

    async def expect(self, name: str, *, key: str = "", seconds: float) -> Expected:
        """See ``Mailbox.expect``."""
        found = await self._look(name, key, str(round(seconds * 1000)))
        assert found is not None
        return found

    async def accept(self, name: str) -> None:
        """See ``Mailbox.accept``."""
        await self._runner.run("accept", [self._keys.letter(name)])

    async def find(self, name: str) -> Expected | None:
        """See ``Mailbox.find``."""
        return await self._look(name, "", "")

    async def deliver(self, name: str, answer: bytes) -> Delivery:
        """See ``Mailbox.deliver``."""
        return Delivery((await self._runner.run("deliver", [self._keys.letter(name)], [answer])).decode())

    async def _look(self, name: str, key: str, milliseconds: str) -> Expected | None:
        kept = str(round(KEPT_SECONDS * 1000))
        found = await self._runner.run("expect", [self._keys.letter(name)], [key, milliseconds, kept])
        if not found:
            return None
        given, left, is_accepted, answer = found
        return Expected(given.decode(), left / 1000, bool(is_accepted), answer)
