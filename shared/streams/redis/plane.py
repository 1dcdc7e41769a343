"""The data plane, and admission to it, on a Redis or Valkey server, 6.2 or newer."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from flotilla.shared.errors import Unavailable
from flotilla.shared.schemas.task import Lane, Task
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.admission import IssueOutcome, IssueResult, check_consecutive, check_finished
from flotilla.shared.streams.codec import (
    EntryHeader,
    encode_body,
    encode_fresh_header,
    encode_grades,
    encode_task,
    group_header,
)
from flotilla.shared.streams.hop import (
    LEASED,
    HopName,
    Resolution,
    StreamKeys,
    StreamsConfig,
    consumer_name,
    counter_of,
)
from flotilla.shared.streams.ledger import Ledger, token_counters
from flotilla.shared.streams.mailbox import KEPT_SECONDS, Delivery, Expected
from flotilla.shared.streams.redis.connection import COMPONENT, NO_ANSWER
from flotilla.shared.streams.redis.hop import RedisHop, TrainerHop
from flotilla.shared.streams.redis.scripts import Argument, ScriptRunner
from flotilla.shared.streams.redis.trainer import RedisTrainerQueue
from flotilla.shared.streams.sharing import TRIMMED, SharedGroup, SharedRead, Taken
from flotilla.shared.telemetry.tracing.recording import record_issues

MOST_DIGITS: Final = 9
"""Of a number of groups that ended."""


class RedisAdmission:
    """Issues tasks in one script; see ``Admission``."""

    def __init__(self, runner: ScriptRunner, keys: StreamKeys) -> None:
        self._runner = runner
        self._keys = keys

    async def issue(self, task: Task, *, limit: int) -> IssueResult:
        """See ``Admission.issue``."""
        return await self.issue_many([task], limit=limit)

    async def issue_many(self, tasks: Sequence[Task], *, limit: int) -> IssueResult:
        """See ``Admission.issue_many``."""
        check_consecutive(tasks)
        entries: list[Argument] = []
        for task in tasks:
            entries += [encode_fresh_header(task), encode_task(task), task.min_version]
        result = await self._issue([task.group_id for task in tasks], entries, HopName.TASKS, limit)
        record_issues(self._keys.experiment_id, tasks[: result.count])
        return result

    async def issue_groups(self, groups: Sequence[Group], *, hop: HopName, limit: int) -> IssueResult:
        """See ``Admission.issue_groups``."""
        check_finished(groups, hop)
        entries: list[Argument] = []
        for group in groups:
            header = group_header(group)
            entries += [header.to_bytes(), encode_body(group), group.task.min_version]
            entries += [encode_grades(group), header.token_count]
        result = await self._issue([group.task.group_id for group in groups], entries, hop, limit)
        record_issues(self._keys.experiment_id, [group.task for group in groups[: result.count]])
        return result

    async def _issue(
        self, group_ids: Sequence[int], entries: Sequence[Argument], hop: HopName, limit: int
    ) -> IssueResult:
        if not group_ids:
            return IssueResult(IssueOutcome.ISSUED, 0, await self.next_group_id())
        keys = self._keys
        names = [keys.stream(hop), keys.ledger, keys.outstanding, keys.state, keys.consumed, keys.handed_over]
        names += map(keys.stream, HopName)
        arguments = [group_ids[0], len(group_ids), limit, " ".join(token_counters(hop)), *entries]
        count, next_id, is_full = await self._runner.run("issue", names, arguments)
        if count == len(group_ids):
            outcome = IssueOutcome.ISSUED
        elif next_id != group_ids[0] + count:
            outcome = IssueOutcome.CURSOR_MOVED
        else:
            outcome = IssueOutcome.STREAM_FULL if is_full else IssueOutcome.BUDGET_FULL
        return IssueResult(outcome, count, next_id)

    async def life(self) -> str:
        """See ``Admission.life``."""
        return await _life(self._runner, self._keys.state)

    async def take(self, read: SharedRead, *, limit: int, life: str = "") -> Taken:
        """See ``Admission.take``."""
        keys = self._keys
        entries: list[Argument] = []
        for each in read.groups:
            header = each.header
            entries += [each.number, header.group_id, header.to_bytes(), each.payload, max(header.oldest_version, 0)]
            entries += [each.grades, header.token_count]
        names = [keys.stream(HopName.SCORED), keys.ledger, keys.outstanding, keys.state, keys.handed_over]
        names += map(keys.stream, HopName)
        counters = " ".join(token_counters(HopName.SCORED))
        missing = counter_of(Resolution.DROPPED, TRIMMED)
        arguments: list[Argument] = [read.reached, limit, counters, missing, life, *entries]
        count, through, is_full = _in_life(await self._runner.run("take", names, arguments))
        return Taken(count, through, bool(is_full))

    async def taken_through(self) -> int:
        """See ``Admission.taken_through``."""
        return int(await self._state("taken_through") or 0)

    async def begin_taking(self, after: int, life: str = "") -> None:
        """See ``Admission.begin_taking``."""
        _in_life(await self._runner.run("begin_taking", [self._keys.state], [after, life]))

    async def come_from(self, group_id: int) -> None:
        """See ``Admission.come_from``."""
        await self._runner.run("come_from", [self._keys.state], [group_id])

    async def next_group_id(self) -> int:
        """See ``Admission.next_group_id``."""
        return int(await self._state("next_group_id") or 0)

    async def begin_at(self, group_id: int) -> None:
        """See ``Admission.begin_at``."""
        await self._runner.command("HSETNX", self._keys.state, "next_group_id", group_id)

    async def published(self, version: int) -> bool:
        """See ``Admission.published``."""
        return bool(await self._runner.run("published", [self._keys.state, self._keys.consumed], [version]))

    async def published_version(self) -> int | None:
        """See ``Admission.published_version``."""
        recorded = await self._state("published_version")
        return None if recorded is None else int(recorded)

    async def follow_ends(self, ended: Callable[[int], None]) -> None:
        """See ``Admission.follow_ends``."""
        try:
            async with self._runner.redis.pubsub() as channel:
                await channel.subscribe(self._keys.ends)
                async for message in channel.listen():
                    # The first message confirms the subscription. Any client that runs scripts may publish anything.
                    told = bytes(message["data"]) if message["type"] == "message" else b""
                    ended(int(told) if told.isdigit() and len(told) <= MOST_DIGITS else 0)
        except (RedisError, OSError) as error:
            raise Unavailable(f"the Redis server announces no ended groups: {error}", component=COMPONENT) from error

    async def outstanding_older_than(self, version: int) -> list[int]:
        """See ``Admission.outstanding_older_than``."""
        return sorted(
            map(int, await self._runner.command("ZRANGEBYSCORE", self._keys.outstanding, "-inf", f"({version}"))
        )

    async def bound(self, stream_bytes: int | None) -> dict[HopName, int]:
        """See ``Admission.bound``."""
        keys = [self._keys.state, self._keys.handed_over, *map(self._keys.stream, HopName)]
        sizes = await self._runner.run("set_limit", keys, ["" if stream_bytes is None else stream_bytes])
        return dict(zip(HopName, sizes, strict=True))

    async def forget_consumers(self, idle_seconds: float) -> int:
        """See ``Admission.forget_consumers``."""
        return int(
            await self._runner.run(
                "prune_consumers", list(map(self._keys.stream, HopName)), [round(idle_seconds * 1000)]
            )
        )

    async def _state(self, field: str) -> bytes | None:
        value: bytes | None = await self._runner.command("HGET", self._keys.state, field)
        return value


class RedisSharing:
    """See ``Sharing``."""

    def __init__(self, runner: ScriptRunner, keys: StreamKeys) -> None:
        self._runner = runner
        self._keys = keys

    async def subscribe(self, name: str) -> int:
        """See ``Sharing.subscribe``."""
        return int(await self._runner.run("subscribe", [self._keys.shared], [name]))

    async def read(self, after: int, count: int) -> SharedRead:
        """See ``Sharing.read``."""
        # In this order: what comes in between is among the entries, and what is trimmed in between is missing in them.
        newest, life = await self._runner.run("last_shared", [self._keys.shared])
        entries = await self._runner.command("XRANGE", self._keys.shared, f"{after + 1}-0", "+", "COUNT", count)
        groups = tuple(_shared(entry_id, fields) for entry_id, fields in entries)
        is_all = len(groups) < count
        reached = max([newest if is_all else 0, *(each.number for each in groups)])
        return SharedRead(groups, reached, life.decode())

    async def life(self) -> str:
        """See ``Sharing.life``."""
        return await _life(self._runner, self._keys.shared)

    async def confirm(self, name: str, number: int, life: str = "") -> None:
        """See ``Sharing.confirm``."""
        _in_life(await self._runner.run("confirm", [self._keys.shared, self._keys.state], [name, number, life]))

    async def unsubscribe(self, name: str) -> None:
        """See ``Sharing.unsubscribe``."""
        await self._runner.run("confirm", [self._keys.shared, self._keys.state], [name, "", ""])

    async def subscribers(self) -> dict[str, int]:
        """See ``Sharing.subscribers``."""
        flat = await self._runner.run("subscribers", [self._keys.shared])
        return {name.decode(): int(taken) for name, taken in zip(flat[::2], flat[1::2], strict=True)}


def _shared(entry_id: bytes, fields: Mapping[bytes, bytes]) -> SharedGroup:
    number, header = int(entry_id.partition(b"-")[0]), EntryHeader.from_bytes(fields[b"header"])
    return SharedGroup(number, header, fields[b"payload"], fields[b"grades"])


async def _life(runner: ScriptRunner, key: str) -> str:
    life: bytes = await runner.run("life", [key])
    return life.decode()


def _in_life(answer: Any) -> Any:
    """Give a script's answer.

    Raises:
        Unavailable: it had no effect, since the server has restarted after its arguments were read.
    """
    if answer == b"restarted":
        raise Unavailable("the Redis server has restarted meanwhile", component=COMPONENT, condition=NO_ANSWER)
    return answer


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
        self.sharing = RedisSharing(self._runner, self._keys)
        self.mailbox = RedisMailbox(self._runner, self._keys)
        self._read: tuple[Any, Ledger] | None = None

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
        answer = await self._runner.run("ledger", keys)
        # A waiter polls many times a second, and making a ledger takes as long as fetching it.
        if self._read is None or self._read[0] != answer:
            self._read = answer, _ledger_of(answer)
        return self._read[1]

    async def oldest_seconds(self) -> dict[HopName, float]:
        """See ``DataPlane.oldest_seconds``."""
        ages = await self._runner.run("oldest", list(map(self._keys.stream, HopName)))
        return {hop: age / 1000 for hop, age in zip(HopName, ages, strict=True) if age >= 0}

    async def remove(self) -> None:
        """See ``DataPlane.remove``."""
        await self._runner.command("UNLINK", *self._keys.all())


def _ledger_of(answer: Sequence[Any]) -> Ledger:
    """Read what the script of that name returns."""
    flat, outstanding, consumed, depths = answer
    counters = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    by_hop = {hop: (waiting, claimed) for hop, (waiting, claimed) in zip(HopName, depths, strict=True)}
    versions = {int(group): int(version) for group, version in zip(*[iter(outstanding)] * 2, strict=True)}
    return Ledger.from_counters(counters, by_hop, outstanding=versions, consumed=consumed)
