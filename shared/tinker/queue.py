"""Requests and answers of the Tinker API in Redis: kept until they are done, whoever ends meanwhile.

A model's requests are numbered by its client, come in any order, and are handed on in theirs: the first that is missing
holds back the later ones. A request that comes again is the same one; its answer is written once, in one step with its
removal from the stream. Only the latest process of each kind may answer.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, cast

from redis.asyncio import Redis

from flotilla.shared.errors import ClaimLost, Conflict, NotFound
from flotilla.shared.streams.redis.connection import retried
from flotilla.shared.tinker.records import Failure, Model, Sampler, Session

PREFIX: Final = "flotilla:tinker:"
DEADLINE_SECONDS: Final = 30.0
BLOCK_MILLISECONDS: Final = 500
ANSWER_SECONDS: Final = 24 * 3600
"""How long an answer is kept: a client that was away asks again."""
DONE_LENGTH: Final = 10_000

SUBMIT: Final = """
local request, model, pending = KEYS[1], KEYS[2], KEYS[3]
local known = redis.call('HGET', request, 'digest')
if known then
  if known == ARGV[3] then return 'same' end
  return 'other'
end
local next = tonumber(redis.call('HGET', model, 'next') or '0')
local seq = tonumber(ARGV[2])
if seq > 0 and not redis.call('HGET', model, 'record') then return 'unknown' end
if seq < next then return 'passed' end
redis.call('HSET', request, 'digest', ARGV[3], 'verb', ARGV[4], 'seq', ARGV[2], 'model', ARGV[6], 'body', ARGV[5])
if ARGV[7] ~= '' then
  redis.call('HSET', model, 'record', ARGV[7])
  redis.call('SADD', KEYS[5], ARGV[6])
end
redis.call('HSET', model, 'seen', ARGV[8])
redis.call('HSET', pending, seq, ARGV[1])
while true do
  local id = redis.call('HGET', pending, next)
  if not id then break end
  redis.call('XADD', KEYS[4], '*', 'request', id)
  redis.call('HDEL', pending, next)
  next = next + 1
end
redis.call('HSET', model, 'next', next)
return 'new'
"""
ASK: Final = """
local known = redis.call('HGET', KEYS[1], 'digest')
if known then
  if known == ARGV[2] then return 'same' end
  return 'other'
end
redis.call('HSET', KEYS[1], 'digest', ARGV[2], 'body', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[2], '*', 'request', ARGV[1])
if KEYS[3] then redis.call('XADD', KEYS[3], '*', 'request', ARGV[1]) end
return 'new'
"""
ATTEMPT: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
"""
ANSWER: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[5], 'done', ARGV[7]) end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4]) end
redis.call('XDEL', KEYS[3], ARGV[5])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], '*', 'request', ARGV[2])
if ARGV[8] ~= '' then redis.call('HSET', KEYS[6], ARGV[8], ARGV[9]) end
return 1
"""


class Work(StrEnum):
    """What is done with requests, each by one process."""

    TRAIN = "train"
    SCORE = "score"
    SAMPLE = "sample"


class Form(StrEnum):
    """In which form an answer is; its first byte in Redis."""

    JSON = "J"
    PROTOBUF = "P"
    FAILED = "E"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    form: Form
    content: bytes

    @classmethod
    def json(cls, content: Mapping[str, object]) -> "Answer":
        """Make one of an object."""
        return cls(Form.JSON, json.dumps(content).encode())

    @classmethod
    def failed(cls, failure: Failure) -> "Answer":
        """Make one of a failure."""
        return cls(Form.FAILED, failure.model_dump_json().encode())


@dataclass(frozen=True, slots=True)
class Request:
    """One request that waits, or is to be done again after a restart.

    Attributes:
        id: of the request.
        entry: of the stream; empty where it is only done again.
        verb: what is asked of a model; empty for samples.
        seq: place among the model's requests.
        model_id: which model; empty for samples.
        body: as it was sent, or in the form of ``records``.
    """

    id: str
    entry: str
    verb: str
    seq: int
    model_id: str
    body: bytes


def _key(*parts: str) -> str:
    return PREFIX + ":".join(parts)


class TinkerQueue:
    """Requests and answers, and what sessions, models and samplers there are.

    Args:
        redis: a client whose answers are bytes.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis

    # What the gateway does.

    async def submit(self, request: Request, digest: str, now: float, record: Model | None = None) -> None:
        """Take a request of a model; nothing happens where it is there already.

        Args:
            request: with an id made of model and seq.
            digest: of what was sent.
            now: seconds since the epoch.
            record: of the model, with its first request.

        Raises:
            Conflict: another one came with this place.
            NotFound: there is no such model, or the place is of one that was forgotten.
        """
        keys = [
            _key("request", request.id),
            _key("model", request.model_id),
            _key("pending", request.model_id),
            _key(Work.TRAIN),
            _key("models"),
        ]
        made = "" if record is None else record.model_dump_json()
        arguments = [request.id, request.seq, digest, request.verb, request.body, request.model_id, made, now]
        self._check(await self._run(SUBMIT, keys, arguments), request.id)

    async def ask(self, request_id: str, body: bytes, digest: str, *, is_scored: bool) -> None:
        """Take a request to sample, and to score the prompt; nothing happens where it is there already.

        Raises:
            Conflict: another one came with this id.
        """
        keys = [_key("request", request_id), _key(Work.SAMPLE), *([_key(Work.SCORE)] if is_scored else [])]
        self._check(await self._run(ASK, keys, [request_id, digest, body, ANSWER_SECONDS]), request_id)

    def _check(self, found: bytes, request_id: str) -> None:
        if found == b"other":
            raise Conflict(f"another request came as {request_id} before")
        if found in {b"unknown", b"passed"}:
            raise NotFound(f"{request_id}: there is no such model, or this place among its requests is over")

    async def knows(self, request_id: str) -> bool:
        """Return whether a request is there."""
        return bool(await self._retried("EXISTS", _key("request", request_id)))

    async def answer(self, request_id: str, work: Work | None = None) -> Answer | None:
        """Read an answer; None where there is none yet."""
        found: bytes | None = await self._retried("GET", _answer_key(request_id, work))
        return None if found is None else Answer(Form(found[:1].decode()), found[1:])

    async def done_since(self, entry: str | None) -> tuple[str, list[str]]:
        """Wait a moment for answers; return where to go on, and whose they are. None: only where to begin."""
        if entry is None:
            newest = await self._retried("XREVRANGE", _key("done"), "+", "-", "COUNT", 1)
            return (newest[0][0].decode() if newest else "0"), []
        found = await self._retried("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", _key("done"), entry)
        entries = _entries(found)
        return (entries[-1][0] if entries else entry), [request_id for _, request_id in entries]

    async def put_session(self, session_id: str, session: Session) -> None:
        """Keep a session."""
        await self._retried("HSET", _key("sessions"), session_id, session.model_dump_json())

    async def session(self, session_id: str) -> Session | None:
        """Find a session."""
        found = await self._retried("HGET", _key("sessions"), session_id)
        return None if found is None else Session.model_validate_json(found)

    async def put_sampler(self, sampler_id: str, sampler: Sampler) -> None:
        """Keep a sampling session."""
        await self._retried("HSET", _key("samplers"), sampler_id, sampler.model_dump_json())

    async def sampler(self, sampler_id: str) -> Sampler | None:
        """Find a sampling session."""
        found = await self._retried("HGET", _key("samplers"), sampler_id)
        return None if found is None else Sampler.model_validate_json(found)

    async def model(self, model_id: str) -> Model | None:
        """Find a model."""
        found = await self._retried("HGET", _key("model", model_id), "record")
        return None if found is None else Model.model_validate_json(found)

    async def models(self) -> list[tuple[str, float]]:
        """List the ids of all models, and when the last request of each came, in seconds since the epoch."""
        ids = sorted(each.decode() for each in await self._retried("SMEMBERS", _key("models")))
        return [(each, float(await self._retried("HGET", _key("model", each), "seen") or 0)) for each in ids]

    # What trainer and sampler do.

    async def begin(self, work: Work) -> str:
        """Become the process that answers; the earlier ones answer nothing from here on."""
        return str(await self._retried("INCR", _key("incarnation", work)))

    async def waiting(self, work: Work, after: str, count: int, *, blocks: bool) -> list[Request]:
        """Read requests behind an entry (``0``: all that wait), in order; waits a moment for one if it may."""
        wait = ["BLOCK", BLOCK_MILLISECONDS] if blocks else []
        found = await self._retried("XREAD", "COUNT", count, *wait, "STREAMS", _key(work), after)
        return [await self._request(request_id, entry) for entry, request_id in _entries(found)]

    async def _request(self, request_id: str, entry: str) -> Request:
        key = _key("request", request_id)
        verb, seq, model_id, body = await self._retried("HMGET", key, "verb", "seq", "model", "body")
        return Request(
            request_id, entry, (verb or b"").decode(), int(seq or 0), (model_id or b"").decode(), body or b""
        )

    async def attempt(self, request: Request, work: Work) -> int:
        """Count how often a request was begun; returns 1 the first time."""
        return int(await self._run(ATTEMPT, [_key("request", request.id)], [f"attempts {work}"]))

    async def reply(
        self, work: Work, incarnation: str, request: Request, answer: Answer, sampler: tuple[str, Sampler] | None = None
    ) -> None:
        """Answer a request, and take it off the stream; a sampling session that it made is known from then on.

        Raises:
            ClaimLost: a later process does this work.
        """
        done = str(request.seq) if work is Work.TRAIN else ""
        keys = [
            _key("incarnation", work),
            _answer_key(request.id, Work.SCORE if work is Work.SCORE else None),
            _key(work),
            _key("done"),
            _key("model", request.model_id),
            _key("samplers"),
        ]
        name, record = ("", "") if sampler is None else (sampler[0], sampler[1].model_dump_json())
        content = answer.form.encode() + answer.content
        arguments = [incarnation, request.id, content, ANSWER_SECONDS, request.entry, DONE_LENGTH, done, name, record]
        if not await self._run(ANSWER, keys, arguments):
            raise ClaimLost(f"another process does the work {work} now")

    async def progress(self, model_id: str) -> int:
        """Return the place of a model's last request that was answered; -1 where none was."""
        found = await self._retried("HGET", _key("model", model_id), "done")
        return -1 if found is None else int(found)

    async def past(self, model_id: str, first: int, last: int) -> AsyncIterator[Request]:
        """Yield a model's requests from one place to another, to be done again."""
        for seq in range(first, last + 1):
            yield await self._request(request_id_of(model_id, seq), "")

    async def forget_bodies(self, model_id: str, first: int, last: int) -> None:
        """Let go of what requests brought, once what they did is on the disk; their ids stay known for a day."""
        for seq in range(first, last + 1):
            key = _key("request", request_id_of(model_id, seq))
            await self._retried("HDEL", key, "body")
            await self._retried("EXPIRE", key, ANSWER_SECONDS)

    async def put_inflight(self, model_id: str, path: str) -> None:
        """Say from what the sampling sessions in flight of a model sample."""
        await self._retried("HSET", _key("inflight"), model_id, path)

    async def inflight(self, model_id: str) -> str | None:
        """Return from what they sample."""
        found: bytes | None = await self._retried("HGET", _key("inflight"), model_id)
        return None if found is None else found.decode()

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return await self._retried("EVAL", script, len(keys), *keys, *arguments)

    async def _retried(self, *command: Any) -> Any:
        async def once() -> Any:
            return await self._redis.execute_command(*command)

        return await retried(once, deadline_seconds=DEADLINE_SECONDS)


def request_id_of(model_id: str, seq: int) -> str:
    """Name a model's request."""
    return f"{model_id}:{seq}"


def _answer_key(request_id: str, work: Work | None) -> str:
    return _key("answer", request_id, *([] if work is None else [work]))


def _entries(found: object) -> list[tuple[str, str]]:
    """Read what XREAD answers of one stream: (entry, request id)."""
    if not found:
        return []
    raw = cast(list[tuple[bytes, Any]], found.items() if isinstance(found, dict) else found)
    entries = raw[0][1]
    if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], tuple):
        entries = entries[0]
    return [(entry.decode(), fields[b"request"].decode()) for entry, fields in entries]
