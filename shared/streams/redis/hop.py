"""Hops over Redis streams. Everything that changes the ledger is one script, so it happens wholly or not at all."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

import msgpack
from redis.exceptions import ResponseError

from flotilla.shared.errors import ClaimLost
from flotilla.shared.faults.armed import armed
from flotilla.shared.faults.sites import Site
from flotilla.shared.schemas.trajectory import Group
from flotilla.shared.streams.codec import EntryHeader
from flotilla.shared.streams.hop import (
    CONSUMER_GROUP,
    FENCED,
    HANDED_OVER,
    MAX_LOST_BY_THE_LIVING,
    Claim,
    HopName,
    Renewal,
    Resolution,
    StreamKeys,
    StreamsConfig,
    check_hop,
    counter_of,
    forwarded,
    handed_over,
    renewing,
)
from flotilla.shared.streams.partials import Partials
from flotilla.shared.streams.redis.forwarding import ForwardsTogether
from flotilla.shared.streams.redis.scripts import Argument, Call, ScriptRunner

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
"""Longest time after which a waiting claimer looks for entries that are free again."""
STRAYS_SECONDS = 5.0
"""Longest time after which a trainer that claims looks for deliveries that never arrived. It looks at once after a call
that got no answer; but that call may yet take effect, when a server that was stopped reads what was sent to it."""
SCRIPT_BYTES = 128 * 1024
"""Most that one script forwards: the server works on it while it receives the next."""
APPENDED_BYTES = SCRIPT_BYTES
"""A payload of this size or more is appended by a command of its own, in one transaction with the script: a script's
argument the server hashes as a whole and copies twice more. For smaller ones the transaction costs more than that."""
SCRIPT_ENTRIES = 128
"""Likewise in entries: about two milliseconds, in which the server does nothing else."""
MARKER_SECONDS = 86400
"""How long a forward may be repeated after its answer was lost: a partition may last, and the forwarder waits. The
markers of answers that arrived are forgotten long before."""
ANSWERED_SECONDS = 60.0
"""How long a marker is kept after its answer has arrived."""
FORGOTTEN_TOGETHER = 64


class _Ended(NamedTuple):
    """A claim whose work has ended: tokens sampled of it and, when it is forwarded, the entry to append."""

    claim: Claim
    tokens: int
    header: bytes = b""
    grades: bytes = b""
    payload: bytes = b""

    @property
    def is_appended(self) -> bool:
        """Whether a command of its own appends the entry."""
        return len(self.payload) >= APPENDED_BYTES

    @property
    def share(self) -> float:
        """How much of what one script may do it takes."""
        return 1.0 if self.is_appended else max(len(self.payload) / SCRIPT_BYTES, 1 / SCRIPT_ENTRIES)


class RedisHop:
    """One stream of a lane, read by one consumer.

    A forward is safe to repeat: the script leaves a short-lived key named after the claim's random token, and answers
    yes when it finds the claim gone but its key there. So an answer lost with a connection costs a repetition only.
    """

    def __init__(
        self, runner: ScriptRunner, keys: StreamKeys, name: HopName, consumer: str, config: StreamsConfig
    ) -> None:
        self.name = name
        self.consumer = consumer
        self.lease_seconds = config.lease_seconds
        self._runner = runner
        self._keys = keys
        self._stream = keys.stream(name)
        self._markers = keys.marker("")
        # No delivery of the trainer's hop ends but with the trainer.
        self._limits: list[Argument] = [
            config.max_deliveries,
            MAX_LOST_BY_THE_LIVING,
            keys.lost_alive(name, ""),
            keys.state,
        ]
        self._max_partial_bytes = config.max_partial_bytes
        self._sweep_seconds = min(SWEEP_SECONDS, config.lease_seconds / 4)
        self._next_sweep = 0.0
        self._is_next_full = False
        self._together = ForwardsTogether(self._forward_entries)
        self._answered: deque[tuple[float, str]] = deque()

    async def claim(self, count: int = 1, *, wait_seconds: float) -> list[Claim]:
        """See ``Hop.claim``."""
        claims = await self._next(count, wait_seconds)
        faults = armed()
        return claims if faults is None else faults.delivered(self.consumer, claims)

    async def _next(self, count: int, wait_seconds: float) -> list[Claim]:
        clock = asyncio.get_running_loop().time
        deadline = clock() + wait_seconds
        while True:
            if clock() >= self._next_sweep:
                self._next_sweep = clock() + self._sweep_seconds
                claims = await self._sweep(count)
                if claims:
                    # There may be more: do not wait for the next time.
                    self._next_sweep = clock()
                    return claims
            pause = min(deadline, self._next_sweep) - clock()
            claims = [] if self._is_next_full else await self._read(count, pause)
            if self._is_next_full:
                await asyncio.sleep(max(0.0, pause))
            if claims or clock() >= deadline:
                return claims

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """See ``Hop.renew``."""
        if not claims:
            return []
        tokens = [part for claim in claims for part in (check_hop(claim, self.name).entry_id, claim.deliveries)]
        lost = await self._runner.run("renew", [self._stream], [self.consumer, *tokens])
        return await self._lost_alive([claims[position - 1] for position in lost])

    def renewing(self, *claims: Claim) -> AbstractAsyncContextManager[Renewal]:
        """See ``Hop.renewing``."""
        return renewing(self, claims)

    async def forward(self, claim: Claim, group: Group) -> bool:
        """See ``Hop.forward``."""
        return await self._together.forward(self._forwarded(claim, group))

    async def forward_many(self, results: Sequence[tuple[Claim, Group]]) -> list[bool]:
        """See ``Hop.forward_many``."""
        if not results:
            return []
        return await self._forward_entries([self._forwarded(claim, group) for claim, group in results])

    def _forwarded(self, claim: Claim, group: Group) -> _Ended:
        made = forwarded(claim, group, self.name)
        return _Ended(claim, made.header.token_count, made.header.to_bytes(), made.grades, made.body)

    async def _forward_entries(self, entries: Sequence[_Ended]) -> list[bool]:
        destination = self.name.next
        assert destination is not None
        return await self._finish(f"tokens:{destination.value}", entries, self._keys.stream(destination))

    async def resolve(self, claim: Claim, resolution: Resolution, reason: str) -> bool:
        """See ``Hop.resolve``."""
        return (await self.resolve_many([claim], resolution, reason))[0]

    async def resolve_many(self, claims: Sequence[Claim], resolution: Resolution, reason: str) -> list[bool]:
        """See ``Hop.resolve_many``."""
        counter = counter_of(resolution, reason)
        ended = [_Ended(check_hop(claim, self.name), claim.header.token_count) for claim in claims]
        return await self._finish(counter, ended) if ended else []

    async def hand_back(self, claim: Claim) -> bool:
        """See ``Hop.hand_back``."""
        check_hop(claim, self.name)
        arguments: list[Argument] = [claim.entry_id, self.consumer, claim.deliveries]
        return bool(await self._runner.run("hand_back", [self._stream], arguments))

    async def hand_over(self, claim: Claim, partials: Partials) -> bool:
        """See ``Hop.hand_over``."""
        header, payload = handed_over(claim, self.name, partials, self._max_partial_bytes)
        keys = [self._stream, self._keys.marker(claim.token), self._keys.handed_over]
        held: list[Argument] = [claim.entry_id, self.consumer, claim.deliveries, header.group_id]
        arguments = [*held, header.to_bytes(), payload, HANDED_OVER, MARKER_SECONDS * 1000]
        return self._answer(claim, bool(await self._runner.run("hand_over", keys, arguments)))

    async def _finish(self, counter: str, ended: Sequence[_Ended], next_stream: str | None = None) -> list[bool]:
        calls = [self._finish_call(counter, chunk, next_stream) for chunk in _chunks(ended)]
        calls[-1].keys.extend(self._forgettable())
        answers = [bool(each) for answer in await self._runner.run_in_order("finish", calls) for each in answer]
        claims = [each.claim for each in ended]
        await self._lost_alive([claim for claim, answer in zip(claims, answers, strict=True) if not answer])
        return list(map(self._answer, claims, answers))

    def _answer(self, claim: Claim, is_done: bool) -> bool:
        if is_done:
            self._answered.append((asyncio.get_running_loop().time(), self._markers + claim.token))
        return is_done

    async def _lost_alive(self, claims: list[Claim]) -> list[Claim]:
        """Report claims as lost by a live holder, so that their entries are not blamed."""
        calls = [
            Call(
                [self._stream, self._keys.lost_alive(self.name, claim.entry_id)],
                [claim.entry_id, claim.token, MARKER_SECONDS * 1000],
            )
            for claim in claims
        ]
        if calls:
            await self._runner.run_in_order("lost_alive", calls)
        return claims

    def _forgettable(self) -> list[str]:
        """Take the markers of claims out of the list whose answers arrived long ago."""
        old = asyncio.get_running_loop().time() - ANSWERED_SECONDS
        found: list[str] = []
        while self._answered and self._answered[0][0] <= old and len(found) < FORGOTTEN_TOGETHER:
            found.append(self._answered.popleft()[1])
        return found

    def _finish_call(self, counter: str, ended: Sequence[_Ended], next_stream: str | None) -> Call:
        markers = [self._markers + each.claim.token for each in ended]
        mode = "resolve" if next_stream is None else "forward"
        lowest, highest = _bounds([each.claim.entry_id for each in ended])
        facts: list[Argument] = []
        payloads: list[Argument] = []
        before: list[Argument] = []
        for each in ended:
            number, held = 0, each.claim
            content: list[Argument] = [each.header, each.grades]
            if each.is_appended:
                # It is alone in its call.
                before = ["XADD", next_stream or "", "*", "header", each.header, "payload", each.payload]
                before += ["grades", each.grades]
                number, content = -1, [b"", b""]
            elif next_stream is not None:
                payloads.append(each.payload)
                number = len(payloads)
            facts += (held.entry_id, held.deliveries, each.tokens, str(held.header.group_id), number, *content)
        # The server's reader knows no binary type: headers and grades travel as raw strings.
        claims = msgpack.packb(facts, use_bin_type=False)
        ends: list[Argument] = [mode, self.consumer, MARKER_SECONDS * 1000, counter, lowest, highest]
        ends += [self._keys.state, claims]
        is_scored = next_stream == self._keys.stream(HopName.SCORED)
        keys = [self._stream, self._keys.ledger, self._keys.outstanding, next_stream or self._stream]
        keys += [self._keys.handed_over, self._keys.shared if is_scored else self._stream]
        return Call([*keys, *markers], [*ends, *payloads], before)

    async def _sweep(self, count: int) -> list[Claim]:
        lease_ms = max(1, round(self.lease_seconds * 1000))
        return await self._run_sweep(count, str(lease_ms))

    async def _run_sweep(self, count: int, *mode: str) -> list[Claim]:
        keys = [self._stream, self._keys.ledger, self._keys.outstanding, self._keys.handed_over]
        if self.name.next is not None:
            keys.append(self._keys.stream(self.name.next))
        answer = await self._runner.run("sweep", keys, [self.consumer, count, *self._limits, *mode])
        if answer == b"fenced":
            raise ClaimLost(FENCED)
        self._is_next_full = answer == b"full"
        if self._is_next_full:
            return []
        taken, given_up = answer
        if given_up:
            log.warning(
                "entries abandoned after repeated deliveries", extra={"hop": self.name.value, "count": given_up}
            )
        return await self._arrived(
            [
                self._claim(entry_id, dict(zip(fields[::2], fields[1::2], strict=True)), deliveries)
                for entry_id, deliveries, fields in taken
            ]
        )

    async def _read(self, count: int, block_seconds: float) -> list[Claim]:
        command: list[Any] = ["XREADGROUP", "GROUP", CONSUMER_GROUP, self.consumer, "COUNT", count]
        if block_seconds > 0:
            command += ["BLOCK", max(1, round(block_seconds * 1000))]
        command += ["STREAMS", self._stream, ">"]

        # A lost answer leaves entries pending without a holder; their lease expires, and they are delivered again.
        try:
            answer = await self._runner.command(*command)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            # Plans name entries of the last stream alone, and only its reader may see them.
            plans = [self._keys.plans] if self.name.next is None else []
            await self._runner.run("create_group", [self._stream, *plans])
            answer = await self._runner.command(*command)
        return await self._arrived(
            [self._claim(entry_id, fields, 1) for _, entries in answer or () for entry_id, fields in entries]
        )

    async def _arrived(self, claims: list[Claim]) -> list[Claim]:
        if claims and (faults := armed()) is not None:
            await faults.reach(Site.CLAIM)
        return claims

    def _claim(self, entry_id: bytes, fields: dict[bytes, bytes], deliveries: int) -> Claim:
        return claim_of(self.name, entry_id.decode(), fields, deliveries, self.consumer)


class TrainerHop(RedisHop):
    """The scored hop of the trainer: its claims last until a later trainer takes over.

    No lease ends here, so an entry whose delivery never arrived is found by comparing the server's list with what is
    held: after any call that failed or was cancelled, and every few seconds.
    """

    def __init__(self, runner: ScriptRunner, keys: StreamKeys, consumer: str, config: StreamsConfig) -> None:
        super().__init__(runner, keys, HopName.SCORED, consumer, config)
        self._held: set[str] = set()
        self._is_delivery_lost = False
        self._next_look = 0.0
        self._one_at_a_time = asyncio.Lock()
        self.regain: Callable[[], Awaitable[bool]] | None = None
        """Makes this the trainer again if the server lost it and no other took over; set by the queue."""

    def release(self, entry_ids: Iterable[str]) -> None:
        """Forget claims that were planned."""
        self._held.difference_update(entry_ids)

    async def claim(self, count: int = 1, *, wait_seconds: float) -> list[Claim]:
        """See ``Hop.claim``."""
        async with self._one_at_a_time:
            self._next_sweep = 0.0  # which also finds out whether this is still the trainer
            return await super().claim(count, wait_seconds=wait_seconds)

    async def resolve_many(self, claims: Sequence[Claim], resolution: Resolution, reason: str) -> list[bool]:
        """See ``Hop.resolve_many``."""
        are_resolved = await super().resolve_many(claims, resolution, reason)
        self.release(claim.entry_id for claim in claims)
        return are_resolved

    async def hand_back(self, claim: Claim) -> bool:
        """See ``Hop.hand_back``."""
        is_handed_back = await super().hand_back(claim)
        self._held.discard(claim.entry_id)
        return is_handed_back

    async def _sweep(self, count: int) -> list[Claim]:
        now = asyncio.get_running_loop().time()
        is_due = self._is_delivery_lost or now >= self._next_look
        strays = ["-", *self._held] if is_due else []
        self._is_delivery_lost = False
        if is_due:
            self._next_look = now + STRAYS_SECONDS
        try:
            claims = await self._delivered(self._run_sweep(count, "trainer", *strays))
        except ClaimLost:
            if self.regain is None or not await self.regain():
                raise
            return []
        if strays and len(claims) == count:
            self._is_delivery_lost = True  # there may be more
        return claims

    async def _read(self, count: int, block_seconds: float) -> list[Claim]:
        return await self._delivered(super()._read(count, block_seconds))

    async def _delivered(self, call: Awaitable[list[Claim]]) -> list[Claim]:
        failures = self._runner.failures
        has_arrived = False
        try:
            claims = await call
            has_arrived = self._runner.failures == failures
        finally:
            self._is_delivery_lost |= not has_arrived
        self._held.update(claim.entry_id for claim in claims)
        return claims


def claim_of(hop: HopName, entry_id: str, fields: dict[bytes, bytes], deliveries: int, consumer: str) -> Claim:
    """Make a claim of an entry as the server gives it."""
    header = EntryHeader.from_bytes(fields[b"header"])
    return Claim(hop, entry_id, header, fields[b"payload"], deliveries, consumer, fields.get(b"grades", b""))


def _bounds(entry_ids: Sequence[str]) -> tuple[str, str]:
    """Find the lowest and the highest of some entry ids."""
    if len(entry_ids) == 1:
        return entry_ids[0], entry_ids[0]
    ordered = sorted(entry_ids, key=lambda entry_id: tuple(map(int, entry_id.split("-"))))
    return ordered[0], ordered[-1]


def _chunks(ended: Sequence[_Ended]) -> list[list[_Ended]]:
    """Cut what is forwarded together so that no script holds the server for long."""
    chunks: list[list[_Ended]] = []
    taken = 0.0
    for each in ended:
        if not chunks or taken + each.share > 1:
            chunks.append([])
            taken = 0.0
        chunks[-1].append(each)
        taken += each.share
    return chunks
