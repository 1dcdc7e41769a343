"""Requests and answers of the Tinker API in Redis: kept until they are done, whichever process ends meanwhile.

A model's requests are numbered by its client, come in any order, and are handed on in theirs: the first that is missing
holds back the later ones. A request that comes again is the same one; its answer is written once, in one step with its
removal from the stream. Only the latest process of each kind may answer.
"""

import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, cast

from redis.asyncio import Redis

from flotilla.shared.errors import ClaimLost, Conflict, NotFound, TooManyRequests
from flotilla.shared.schemas.tinker import TinkerLedger
from flotilla.shared.tinker.records import Failure, Model, Sampler, Update, Verb
from flotilla.shared.tinker.scripts import ANSWER, ASK, ATTEMPT, LEDGER, SUBMIT
from flotilla.shared.tinker.store import Store, answer_key, key, request_id_of, session_of

BLOCK_MILLISECONDS: Final = 500
ANSWER_SECONDS: Final = 24 * 3600
"""How long an answer is kept: a client that was away asks again."""
DONE_LENGTH: Final = 10_000

REQUEST_FIELDS: Final = ("verb", "seq", "model", "body", "owner", "failed")
MOST_REQUESTS: Final = 4096
"""That one owner has waiting."""
MOST_BYTES: Final = 256 * 1024 * 1024
"""Of their bodies."""
MOST_ANSWER_BYTES: Final = 512 * 1024 * 1024
"""Of the answers that are kept for one owner; older ones go first."""
MOST_MODELS: Final = 256
"""Of one session."""
MOST_OWNED_MODELS: Final = 4096
"""Of one owner that are known: of sessions that are open, or with something saved."""
MOST_POINTS: Final = 4096
"""Updates of a model that are remembered with their losses, the newest."""
MOST_ATTEMPTS: Final = 3
"""A request that ended its process so often is not begun again: it would end that of all."""


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
    """What became of a request.

    Attributes:
        form: of the content.
        content: the answer to its client.
        loss: of a pass whose gradients wait for an update; noted, as is the update.
        update: of the model, without its loss: that is counted from those of the passes.
    """

    form: Form
    content: bytes
    loss: float | None = None
    update: Update | None = None

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
        owner: short name of whose it is (``short_name``).
        failed: whose fault it was, of one that failed; empty for others.
        is_new: False where it had come before.
    """

    id: str
    entry: str
    verb: str
    seq: int
    model_id: str
    body: bytes
    owner: str = ""
    failed: str = ""
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one owner may have."""

    requests: int = MOST_REQUESTS
    num_bytes: int = MOST_BYTES
    answer_bytes: int = MOST_ANSWER_BYTES
    models: int = MOST_OWNED_MODELS


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a request beside its answer.

    Attributes:
        sampler: a sampling session, with its id.
        sampled: what sampled each sequence (``records.Sampled``, JSON).
        inflight: what the sampling sessions in flight of the request's model sample from now.
    """

    sampler: tuple[str, Sampler] | None = None
    sampled: str = ""
    inflight: str = ""


NOTHING: Final = Made()


class TinkerQueue(Store):
    """Requests and answers.

    Args:
        redis: a client whose answers are bytes.
        bounds: of what waits, and is kept, of one owner.
    """

    def __init__(self, redis: Redis, bounds: Bounds | None = None) -> None:
        super().__init__(redis)
        self._bounds = bounds or Bounds()

    # What the gateway does.

    async def submit(self, request: Request, digest: str, now: float, record: Model | None = None) -> bool:
        """Take a request of a model; returns False, and nothing happens, where it is there already.

        Args:
            request: with an id made of model and seq, and its owner.
            digest: of what was sent.
            now: seconds since the epoch.
            record: of the model, with its first request.

        Raises:
            Conflict: another one came with this place.
            NotFound: there is no such model, or the place is of one that was forgotten.
            TooManyRequests: the owner has as much waiting or as many models, or the session as many, as it may.
        """
        whose = request.owner
        keys = [
            key("request", request.id),
            key("model", request.model_id),
            key("pending", request.model_id),
            key(Work.TRAIN, whose),
            key("created"),
            key("owners", Work.TRAIN),
            key("bell", Work.TRAIN),
            key("open", whose),
            key("owner", whose),
            key("models", session_of(request.model_id)),
            key("gaps"),
            key("created", whose),
        ]
        made = "" if record is None else record.model_dump_json()
        arguments = [request.id, request.seq, digest, request.verb, request.body, request.model_id, made, now]
        bounds = [whose, self._bounds.requests, self._bounds.num_bytes, MOST_MODELS, key("request", "")]
        bounds.append(self._bounds.models)
        found: bytes = await self._run(SUBMIT, keys, arguments + bounds)
        self._check(found, request.id)
        return found == b"new"

    async def ask(self, request_id: str, body: bytes, digest: str, owner: str, *, is_scored: bool) -> None:
        """Take a request to sample, and to score the prompt; nothing happens where it is there already.

        Raises:
            Conflict: another one came with this id.
            TooManyRequests: the owner has as much waiting as it may.
        """
        keys = [key("request", request_id), key("open", owner), key("owner", owner)]
        for work in (Work.SAMPLE, Work.SCORE) if is_scored else (Work.SAMPLE,):
            # One process trains and scores.
            keys += [key(work, owner), key("owners", work), key("bell", Work.TRAIN if work is Work.SCORE else work)]
        arguments = [request_id, digest, body, owner, self._bounds.requests, self._bounds.num_bytes]
        self._check(await self._run(ASK, keys, arguments), request_id)

    def _check(self, found: bytes, request_id: str) -> None:
        match found:
            case b"other":
                raise Conflict(f"another request came as {request_id} before")
            case b"unknown" | b"passed":
                raise NotFound(f"{request_id}: there is no such model, or this place among its requests is over")
            case _ if found.startswith(b"closed "):
                raise NotFound(f"{request_id}: {found.decode().removeprefix('closed ')}")
            case b"models":
                raise TooManyRequests(f"a session has at most {MOST_MODELS} models: open another one")
            case b"owned":
                raise TooManyRequests(
                    f"a token has at most {self._bounds.models} models: finish sessions, and delete what old ones saved"
                )
            case b"full":
                raise TooManyRequests(
                    f"a token has at most {self._bounds.requests} requests and {self._bounds.num_bytes} bytes "
                    "waiting: send this one again when some are answered"
                )

    async def ledger(self, owner: str) -> TinkerLedger:
        """Count an owner's requests."""
        found = await self._run(LEDGER, [key("owner", owner), key("open", owner)], [])
        accepted, done, failed, waiting, num_bytes = (int(each or 0) for each in found[1:])
        return TinkerLedger(
            owner=(found[0] or owner.encode()).decode(),
            accepted=accepted,
            done=done,
            failed=failed,
            waiting=waiting,
            waiting_bytes=num_bytes,
        )

    async def knows(self, request_id: str) -> bool:
        """Return whether a request is there."""
        return bool(await self._retried("EXISTS", key("request", request_id)))

    async def answer(self, request_id: str, work: Work | None = None) -> Answer | None:
        """Read an answer; None where there is none yet.

        Raises:
            NotFound: it is no longer kept.
        """
        # First whether it was answered: an answer that comes between the two is found then.
        request = key("request", request_id)
        parts = [work] if work is not None else [Work.TRAIN, Work.SAMPLE]
        is_answered = any(await self._retried("HMGET", request, *(f"answered {each}" for each in parts)))
        found: bytes | None = await self._retried("GET", answer_key(request_id, *([] if work is None else [work])))
        if found is None and is_answered:
            raise NotFound(f"the answer to {request_id} is no longer kept")
        return None if found is None else Answer(Form(found[:1].decode()), found[1:])

    async def done_since(self, entry: str | None) -> tuple[str, list[str]]:
        """Wait a moment for answers; return where to continue, and whose they are. None: only where to begin."""
        if entry is None:
            newest = await self._retried("XREVRANGE", key("done"), "+", "-", "COUNT", 1)
            return (newest[0][0].decode() if newest else "0"), []
        found = await self._retried("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", key("done"), entry)
        entries = _entries(found)
        return (entries[-1][0] if entries else entry), [request_id for _, request_id in entries]

    async def model(self, model_id: str) -> Model | None:
        """Find a model."""
        found = await self._retried("HGET", key("model", model_id), "record")
        return None if found is None else Model.model_validate_json(found)

    # What trainer and sampler do.

    async def begin(self, work: Work) -> str:
        """Become the process that answers; the earlier ones answer nothing from here on."""
        return str(await self._retried("INCR", key("incarnation", work)))

    async def owners(self, work: Work) -> list[str]:
        """List the models with waiting work of a kind."""
        return await self._names("owners", work)

    async def waiting(self, work: Work, owner: str, after: str, count: int) -> list[Request]:
        """Read an owner's requests behind an entry (``0``: all that wait), in order."""
        found = await self._retried(
            "XRANGE", key(work, owner), f"({after}" if after != "0" else "-", "+", "COUNT", count
        )
        return [await self._request(request_id, entry) for entry, request_id in _pairs(found)]

    async def hears(self, work: Work, heard: str) -> str:
        """Wait a moment for a new request; returns where to continue, at first from ``0``."""
        found = await self._retried("XREAD", "BLOCK", BLOCK_MILLISECONDS, "STREAMS", key("bell", work), heard)
        entries = _entries(found)
        return entries[-1][0] if entries else heard

    async def _request(self, request_id: str, entry: str) -> Request:
        request = key("request", request_id)
        verb, seq, model_id, body, owner, failed = await self._retried("HMGET", request, *REQUEST_FIELDS)
        name, model, whose, fault = ((each or b"").decode() for each in (verb, model_id, owner, failed))
        return Request(request_id, entry, name, int(seq or 0), model, body or b"", whose, fault)

    async def attempt(self, request: Request, work: Work) -> int:
        """Count how often a request was begun; returns 1 the first time."""
        return int(await self._run(ATTEMPT, [key("request", request.id)], [f"attempts {work}"]))

    async def reply(self, work: Work, incarnation: str, request: Request, answer: Answer, made: Made = NOTHING) -> None:
        """Answer a request, and take it off the stream; what it made is known from then on.

        Raises:
            ClaimLost: a later process does this work.
        """
        owner = request.owner
        sampler_id, record = ("", "") if made.sampler is None else (made.sampler[0], made.sampler[1].model_dump_json())
        keys = [
            key("incarnation", work),
            key("request", request.id),
            answer_key(request.id, *([Work.SCORE] if work is Work.SCORE else [])),
            key(work, owner),
            key("owners", work),
            key("done"),
            key("model", request.model_id),
            key("samplers", session_of(sampler_id)),
            key("open", owner),
            key("owner", owner),
            key("answers", owner),
            key("inflight"),
            key("points", request.model_id),
        ]
        done = str(request.seq) if work is Work.TRAIN else ""
        failed = Failure.model_validate_json(answer.content).category if answer.form is Form.FAILED else ""
        # An update that is refused forgets gradients, and does so again when it is done again.
        is_over = work is not Work.TRAIN or request.verb == Verb.FORWARD
        drops_body = "1" if is_over or (failed and request.verb != Verb.OPTIM_STEP) else ""
        content = answer.form.encode() + answer.content
        arguments = [incarnation, request.id, content, ANSWER_SECONDS, request.entry, DONE_LENGTH, done]
        arguments += [sampler_id, record, owner, str(work), drops_body, made.sampled, self._bounds.answer_bytes]
        arguments += [key("request", ""), str(failed), request.model_id, made.inflight]
        # A loss that is none (inf, NaN) is no number to Redis; its update is refused anyway.
        arguments.append("" if answer.loss is None or not math.isfinite(answer.loss) else repr(answer.loss))
        arguments.append("" if answer.update is None else _written(answer.update))
        arguments.append(MOST_POINTS)
        if not await self._run(ANSWER, keys, arguments):
            raise ClaimLost(f"another process does the work {work} now")

    async def sampled(self, request_id: str) -> bytes | None:
        """Return the sampler's answer for each sequence of a request; None where there is none yet."""
        found: bytes | None = await self._retried("HGET", key("request", request_id), "sampled")
        return found

    async def is_latest(self, work: Work, incarnation: str) -> bool:
        """Return whether no later process does this work."""
        found: bytes | None = await self._retried("GET", key("incarnation", work))
        return found is not None and found.decode() == incarnation

    async def is_closed(self, model_id: str) -> bool:
        """Return whether a model takes no more requests."""
        found = await self._retried("HMGET", key("model", model_id), "record", "closed")
        return found[0] is None or found[1] is not None

    async def progress(self, model_id: str) -> int:
        """Return the place of a model's last request that was answered; -1 where none was."""
        found = await self._retried("HGET", key("model", model_id), "done")
        return -1 if found is None else int(found)

    async def past(self, model_id: str, first: int, last: int) -> AsyncIterator[Request]:
        """Yield a model's requests from one place to another, to be done again."""
        for seq in range(first, last + 1):
            yield await self._request(request_id_of(model_id, seq), "")

    async def forget_bodies(self, model_id: str, first: int, last: int) -> None:
        """Release what requests brought, once what they did is on the disk; their ids stay known for a day."""
        for seq in range(first, last + 1):
            request = key("request", request_id_of(model_id, seq))
            await self._retried("HDEL", request, "body")
            await self._retried("EXPIRE", request, ANSWER_SECONDS)
        await self._retried("HSET", key("model", model_id), "kept_from", last + 1)


def _written(update: Update) -> str:
    return f"{update.step} {update.grad_norm!r} {update.learning_rate!r}"


def _entries(found: object) -> list[tuple[str, str]]:
    """Read what XREAD answers of one stream: (entry, request id)."""
    if not found:
        return []
    raw = cast(list[tuple[bytes, Any]], found.items() if isinstance(found, dict) else found)
    entries = next(iter(raw))[1]
    if entries and isinstance(entries[0], list) and entries[0] and isinstance(entries[0][0], tuple):
        entries = entries[0]
    return _pairs(entries)


def _pairs(entries: Any) -> list[tuple[str, str]]:
    return [(entry.decode(), fields[b"request"].decode()) for entry, fields in entries]
