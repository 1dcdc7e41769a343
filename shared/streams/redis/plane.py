"""The data plane on a Redis or Valkey server, 6.2 or newer."""

from collections.abc import Collection

from redis.asyncio import Redis

from flotilla.shared.schemas.task import Lane
from flotilla.shared.streams.hop import consumer_name
from flotilla.shared.streams.keys import LEASED, HopName, StreamKeys
from flotilla.shared.streams.ledger import Ledger
from flotilla.shared.streams.mailbox import KEPT_SECONDS, Delivery, Expected
from flotilla.shared.streams.redis.admission import RedisAdmission
from flotilla.shared.streams.redis.hop import RedisHop, TrainerHop
from flotilla.shared.streams.redis.scripts import ScriptRunner
from flotilla.shared.streams.redis.trainer import RedisTrainerQueue
from flotilla.shared.streams.settings import StreamsConfig


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


class RedisDataPlane:
    """One lane of one experiment on a Redis or Valkey server. The client stays the caller's to close."""

    def __init__(
        self, redis: Redis, experiment_id: str, lane: Lane = Lane.TRAIN, config: StreamsConfig | None = None
    ) -> None:
        self._config = config or StreamsConfig()
        self._keys = StreamKeys(experiment_id, lane)
        self._runner = ScriptRunner(redis, deadline_seconds=self._config.deadline_seconds)
        self.admission = RedisAdmission(self._runner, self._keys)
        self.mailbox = RedisMailbox(self._runner, self._keys)

    def hop(self, name: HopName, service_id: str) -> RedisHop:
        """See ``DataPlane.hop``."""
        if name is HopName.SCORED and self._keys.lane is Lane.TRAIN:
            raise ValueError("the scored hop of training belongs to the trainer: use trainer()")
        return RedisHop(self._runner, self._keys, name, consumer_name(service_id), self._config)

    def trainer(self, service_id: str) -> RedisTrainerQueue:
        """See ``DataPlane.trainer``."""
        if self._keys.lane is not Lane.TRAIN:
            raise ValueError("only the train lane has a trainer")
        hop = TrainerHop(self._runner, self._keys, consumer_name(service_id), self._config)
        return RedisTrainerQueue(self._runner, self._keys, hop)

    async def holders(self) -> set[str]:
        """See ``DataPlane.holders``."""
        names = await self._runner.run("holders", [self._keys.stream(hop) for hop in LEASED])
        return {name.decode() for name in names}

    async def release(self, consumers: Collection[str]) -> int:
        """See ``DataPlane.release``."""
        if not consumers:
            return 0
        return int(await self._runner.run("release", [self._keys.stream(hop) for hop in LEASED], list(consumers)))

    async def ledger(self) -> Ledger:
        """See ``DataPlane.ledger``."""
        keys = [self._keys.ledger, self._keys.outstanding, self._keys.consumed, *map(self._keys.stream, HopName)]
        flat, outstanding, consumed, depths = await self._runner.run("ledger", keys)
        counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
        by_hop = {hop: (waiting, claimed) for hop, (waiting, claimed) in zip(HopName, depths, strict=True)}
        return Ledger.from_counters(counters, by_hop, outstanding=outstanding, consumed=consumed)

    async def oldest_seconds(self) -> dict[HopName, float]:
        """See ``DataPlane.oldest_seconds``."""
        ages = await self._runner.run("oldest", list(map(self._keys.stream, HopName)))
        return {hop: age / 1000 for hop, age in zip(HopName, ages, strict=True) if age >= 0}

    async def remove(self) -> None:
        """See ``DataPlane.remove``."""
        await self._runner.command("UNLINK", *self._keys.all())
