"""Sessions of the Tinker API, and what belongs to one: its models, its sampling sessions.

A session ends when its client says so, or was not heard of for long: what belongs to it is released then, but for what
was saved under a name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from redis.asyncio import Redis

from flotilla.shared.errors import TooManyRequests
from flotilla.shared.tinker.queue import ANSWER_SECONDS, DONE_LENGTH, Answer, Form, TinkerQueue, Work
from flotilla.shared.tinker.records import Category, Failure, Model, Sampler, Session, Update
from flotilla.shared.tinker.scripts import CLOSE, GAPS, OPEN, RUNS, SKIP
from flotilla.shared.tinker.store import Store, key, session_of

MOST_SESSIONS: Final = 1000
"""That one owner has open."""
ENDED: Final = "the model's session ended, and the model was let go"
MOST_SAMPLERS: Final = 50_000
"""Of one session."""
MOST_LISTED: Final = 500
"""Models that are read at a time, the newest: Redis and the gateway do nothing else meanwhile."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A model whose requests wait for an earlier one that did not come.

    Attributes:
        model_id: of the model.
        next: the place that is missing.
        first: the first one that waits behind it.
        seconds: since the missing one is waited for.
    """

    model_id: str
    next: int
    first: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """A trained model, how far it is, and what became of its requests.

    Attributes:
        model: what it is.
        seen: when its last request came, in seconds since the epoch.
        closed: why it takes no more requests; empty while it does.
        is_open: whether its session is.
        updates: that were done.
        accepted: requests that were taken, counted as it happens, as are the next two.
        answered: of those, with a result.
        failed: with a reason.
        waiting: counted from what waits.
    """

    model: Model
    seen: float
    closed: str
    is_open: bool
    updates: int
    accepted: int
    answered: int
    failed: int
    waiting: int

    @classmethod
    def read(cls, row: Sequence[bytes]) -> Self:
        """Read a model's record in Redis."""
        record, seen, closed, updates, accepted, answered, failed, waiting, session = row
        is_open = bool(session) and not Session.model_validate_json(session).is_finished and not closed
        counts = (int(each) for each in (updates, accepted, answered, failed, waiting))
        return cls(Model.model_validate_json(record), float(seen), closed.decode(), is_open, *counts)


class TinkerSessions(Store):
    """What sessions, models and sampling sessions there are.

    Args:
        redis: a client whose answers are bytes.
        queue: of their requests.
    """

    def __init__(self, redis: Redis, queue: TinkerQueue) -> None:
        super().__init__(redis)
        self._queue = queue

    async def put_session(self, session_id: str, session: Session, owner: str) -> None:
        """Keep a new session.

        Raises:
            TooManyRequests: the owner has as many open as it may.
        """
        keys = [key("sessions"), key("sessions", owner), key("owners"), key("owner", owner)]
        arguments = [session_id, session.model_dump_json(), session.created, MOST_SESSIONS, owner, session.owner]
        if not await self._run(OPEN, keys, arguments):
            raise TooManyRequests(f"a token has at most {MOST_SESSIONS} sessions open: finish some")

    async def session(self, session_id: str) -> Session | None:
        """Find a session."""
        found = await self._retried("HGET", key("sessions"), session_id)
        return None if found is None else Session.model_validate_json(found)

    async def seen(self, session_id: str, owner: str, now: float) -> None:
        """Note that a session's client is there."""
        await self._retried("ZADD", key("sessions", owner), "XX", now, session_id)

    async def unseen_since(self, moment: float) -> list[tuple[str, str]]:
        """List sessions, with their owners' short names, whose clients were not heard of since then."""
        found = list[tuple[str, str]]()
        for owner in await self._names("owners"):
            ids = await self._retried("ZRANGEBYSCORE", key("sessions", owner), "-inf", moment)
            found += [(each.decode(), owner) for each in ids]
        return found

    async def close_models(self, session_id: str) -> list[str]:
        """Take no more requests of a session's models; returns their ids. Waiting requests are answered."""
        ids = await self._names("models", session_id)
        for model_id in ids:
            whose = await self._owner_of(model_id)
            keys = [key("model", model_id), key("pending", model_id), key("open", whose), key("owner", whose)]
            keys += [key("gaps"), key("done")]
            await self._run(CLOSE, keys, [key("request", ""), model_id, ENDED, key("answer", ""), "", 0, 0])
        return ids

    async def gaps(self) -> list[Gap]:
        """List models whose requests wait for an earlier one."""
        rows = await self._run(GAPS, [key("gaps")], [key("model", ""), key("pending", "")])
        return [Gap(name.decode(), int(missing), int(first), float(since)) for name, missing, first, since in rows]

    async def skip(self, model_id: str, gap: int, last: int) -> bool:
        """Hand on what waits behind requests that were lost, from ``gap`` on, which the model has up to ``last``.

        Returns whether they are still missing; nothing happens where the client sent one of them again.
        """
        whose = await self._owner_of(model_id)
        keys = [key("model", model_id), key("pending", model_id), key(Work.TRAIN, whose), key("owners", Work.TRAIN)]
        keys += [key("bell", Work.TRAIN), key("owner", whose), key("gaps")]
        return bool(await self._run(SKIP, keys, [model_id, last, whose, key("request", ""), gap]))

    async def give_up(self, model_id: str, why: str) -> None:
        """Take no more requests of a model, and answer those that wait for an earlier one, with the reason."""
        whose = await self._owner_of(model_id)
        keys = [key("model", model_id), key("pending", model_id), key("open", whose), key("owner", whose)]
        failure = Form.FAILED.encode() + Answer.failed(Failure(error=why, category=Category.SERVER)).content
        arguments = [key("request", ""), model_id, why, key("answer", ""), failure, ANSWER_SECONDS, DONE_LENGTH]
        await self._run(CLOSE, [*keys, key("gaps"), key("done")], arguments)

    async def _owner_of(self, model_id: str) -> str:
        return (await self._retried("HGET", key("model", model_id), "owner") or b"").decode()

    async def is_idle(self, model_id: str) -> bool:
        """Return whether all that was asked of a model is answered."""
        next_seq, done = await self._retried("HMGET", key("model", model_id), "next", "done")
        return int(done or -1) >= int(next_seq or 0) - 1

    async def forget_model(self, model_id: str, *, keeps_record: bool) -> None:
        """Release a closed model's requests, and of what it was unless that is wanted for what it saved."""
        first, end = await self._retried("HMGET", key("model", model_id), "kept_from", "next")
        await self._queue.forget_bodies(model_id, int(first or 0), int(end or 0) - 1)
        await self._retried("HDEL", key("inflight"), model_id)
        if not keeps_record:
            whose = await self._owner_of(model_id)
            await self._retried("ZREM", key("created"), model_id)
            await self._retried("ZREM", key("created", whose), model_id)
            await self._retried("DEL", key("model", model_id), key("points", model_id))

    async def end(self, session_id: str, session: Session, owner: str, seen: float) -> None:
        """Mark a session as finished, and as last heard of at a moment, so that it is released when that is past."""
        record = session.model_copy(update={"is_finished": True}).model_dump_json()
        await self._retried("HSET", key("sessions"), session_id, record)
        await self.seen(session_id, owner, seen)

    async def forget_session(self, session_id: str, owner: str) -> None:
        """Release a session, whose models were released."""
        await self._retried("DEL", key("models", session_id), key("samplers", session_id))
        await self._retried("ZREM", key("sessions", owner), session_id)
        await self._retried("HDEL", key("sessions"), session_id)

    async def owners(self) -> list[str]:
        """List the short names of all that ever opened a session."""
        return await self._names("owners")

    async def put_sampler(self, sampler_id: str, sampler: Sampler) -> None:
        """Keep a sampling session.

        Raises:
            TooManyRequests: the session has as many as it may.
        """
        kept = key("samplers", sampler.session_id)
        if int(await self._retried("HLEN", kept)) >= MOST_SAMPLERS:
            raise TooManyRequests(f"a session has at most {MOST_SAMPLERS} sampling sessions: open another one")
        await self._retried("HSET", kept, sampler_id, sampler.model_dump_json())

    async def sampler(self, sampler_id: str) -> Sampler | None:
        """Find a sampling session."""
        found = await self._retried("HGET", key("samplers", session_of(sampler_id)), sampler_id)
        return None if found is None else Sampler.model_validate_json(found)

    async def runs(
        self, model_id: str = "", owner: str = "", offset: int = 0, limit: int = MOST_LISTED
    ) -> tuple[int, list[Run]]:
        """List models, newest first, each as it is in one instant, and count them.

        Args:
            model_id: the one alone.
            owner: whose alone, by its short name; empty: everybody's.
            offset: how many newer ones are left out.
            limit: how many are read at most; Redis does nothing else meanwhile.
        """
        listed = key("created", owner) if owner else key("created")
        keys = [listed, key("sessions"), key("models"), key("created")]
        arguments = [key("model", ""), key("pending", ""), model_id, offset, limit, key("created", "")]
        count, rows = await self._run(RUNS, keys, arguments)
        return count, [Run.read(row) for row in rows]

    async def updates(self, model_id: str, after: int = 0) -> tuple[int, list[Update]]:
        """List what is known of a model's newest updates, oldest first, behind the first ``after``; return their count.

        The count is of all that were ever noted: the next call begins behind it.
        """
        rows = [each.decode().split(" ") for each in await self._retried("LRANGE", key("points", model_id), 0, -1)]
        found = [
            Update(
                step=int(step),
                grad_norm=float(norm),
                learning_rate=float(rate),
                loss=float(loss) if loss else None,
                seconds=int(seconds),
            )
            for number, seconds, step, norm, rate, loss in rows
            if int(number) > after
        ]
        return int(rows[-1][0]) if rows else after, found

    async def inflight(self, model_id: str) -> str | None:
        """Return from what the sampling sessions in flight of a model sample."""
        found: bytes | None = await self._retried("HGET", key("inflight"), model_id)
        return None if found is None else found.decode()
