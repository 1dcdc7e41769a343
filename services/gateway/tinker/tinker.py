"""The Tinker API's sessions, models and requests, for whom they are.

Everything is in the queue's Redis before a request is answered, so a gateway that is killed and started again
continues.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from flotilla.services.gateway.tinker.bodies import (
    LARGEST_NUMBER,
    AskSample,
    CreateModel,
    CreateSampler,
    LoadWeights,
    OfModel,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from flotilla.services.gateway.tinker.futures import Futures
from flotilla.services.gateway.tinker.packing import UnpackedBodies
from flotilla.services.gateway.tinker.saved import SavedModels
from flotilla.shared.clock import Clock
from flotilla.shared.errors import Conflict, InvalidRequest, NotFound
from flotilla.shared.net.authorisation.access import Principal, Scope
from flotilla.shared.schemas.tinker import TinkerLedger
from flotilla.shared.tinker.capabilities import context_tokens_of
from flotilla.shared.tinker.messages import Head
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.queue import Answer, Request, TinkerQueue
from flotilla.shared.tinker.records import Load, Model, Sample, Sampled, SampledSequences, Sampler, Save, Session, Verb
from flotilla.shared.tinker.sessions import MOST_LISTED, Run, TinkerSessions
from flotilla.shared.tinker.store import request_id_of, short_name

LONG_POLL_SECONDS = 20.0
SESSION_SECONDS = 24 * 3600.0
"""After so long without a word of its client a session is over; it says one every ten seconds."""
GRACE_SECONDS = 600.0
"""How long what belongs to a finished session is kept: answers may be on their way."""
SAMPLE = ":sample:"
EPHEMERAL_SECONDS = 2 * 24 * 3600
"""How long the weights of a sampling session are kept that have no name."""


class Gone(Conflict):
    """A session that was finished, or an answer that is no longer kept: what asked for it may be sent again."""

    code, title, status = "gone", "No longer there", 410


class Tinker:
    """What the routes of the Tinker API do.

    Args:
        model: directory of the base model.
        data: the fleet's directory.
        queue: of requests.
        sessions: and what belongs to them.
        clock: for what is kept.
    """

    def __init__(self, model: Path, data: Path, queue: TinkerQueue, sessions: TinkerSessions, clock: Clock) -> None:
        self._model, self._queue, self.sessions, self._clock = model, queue, sessions, clock
        self.saved = SavedModels(data, clock)
        self.futures = Futures(queue)
        self.unpacking = UnpackedBodies()
        self.context_tokens = context_tokens_of(model)

    @property
    def base_model(self) -> str:
        """The base model's name: its directory."""
        return str(self._model)

    async def create_session(self, who: Principal, tags: list[str], sdk_version: str) -> str:
        """Open a session; returns its id."""
        session_id = secrets.token_hex(8)
        session = Session(owner=who.actor, created=self._clock.now(), tags=tags, sdk_version=sdk_version)
        await self.sessions.put_session(session_id, session, short_name(who.actor))
        return session_id

    async def heartbeat(self, who: Principal, session_id: str) -> None:
        """Note that a session's client is there.

        Raises:
            Gone: there is no such session of the caller's, or it ended: the client stops asking.
        """
        try:
            session = await self.session(who, session_id)
        except NotFound as error:
            raise Gone(error.detail) from None
        await self.sessions.seen(session_id, short_name(session.owner), self._clock.now())

    async def session(self, who: Principal, session_id: str) -> Session:
        """Find an open session.

        Raises:
            NotFound: it is not the caller's.
            Gone: it was finished.
        """
        found = await self.sessions.session(session_id)
        if found is None or not _may_touch(who, found.owner):
            raise NotFound(f"there is no session {session_id}")
        if found.is_finished:
            raise Gone(f"the session {session_id} was finished")
        return found

    async def finish_session(self, who: Principal, session_id: str) -> None:
        """End a session: nothing is asked in it from here on."""
        session = await self.session(who, session_id)
        soon = self._clock.now() - SESSION_SECONDS + GRACE_SECONDS
        await self.sessions.end(session_id, session, short_name(session.owner), soon)

    async def model(self, who: Principal, model_id: str) -> Model:
        """Find a model.

        Raises:
            NotFound: it is not the caller's.
        """
        found = await self._queue.model(model_id)
        if found is None or not _may_touch(who, found.owner):
            raise NotFound(f"there is no model {model_id}")
        return found

    async def runs(
        self, who: Principal | None, offset: int = 0, limit: int = MOST_LISTED, model_id: str = ""
    ) -> tuple[int, list[Run]]:
        """List the caller's models, newest first, and count them; None and operators: everybody's.

        With an id that one alone, whoever's it is.
        """
        owner = "" if who is None or who.scope is Scope.OPERATOR else short_name(who.actor)
        return await self.sessions.runs(model_id, owner, offset, min(limit, MOST_LISTED))

    async def create_model(self, who: Principal, body: CreateModel) -> Request:
        """Take the first request of a model."""
        self._check_base(body.base_model)
        _check_optimizer(body.optimizer_config.type)
        await self.session(who, body.session_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        record = self._record(who, model_id, body.session_id, body.user_metadata).model_copy(
            update={"lora": body.lora_config}
        )
        return await self._submit(who.actor, Verb.CREATE, model_id, 0, b"", body, record)

    def _record(self, who: Principal, model_id: str, session_id: str, metadata: Mapping[str, str] | None) -> Model:
        return Model(
            model_id=model_id,
            session_id=session_id,
            owner=who.actor,
            created=self._clock.now(),
            user_metadata=dict(metadata or {}),
        )

    async def forward_backward(self, who: Principal, raw: bytes) -> Request:
        """Take what is to be computed; what is wrong with it, its answer says."""
        head = Head.read(raw)
        if not 1 <= head.seq_id <= LARGEST_NUMBER:
            raise InvalidRequest(f"seq_id must be from 1 to {LARGEST_NUMBER}")
        model = await self._open_model(who, head.model_id)
        verb = Verb.FORWARD if head.is_forward_only else Verb.FORWARD_BACKWARD
        return await self._submit(model.owner, verb, head.model_id, head.seq_id, raw, raw)

    async def unload(self, who: Principal, body: OfModel) -> Request:
        """Take a request to keep a model on the disk alone, until it is asked for again."""
        model = await self._open_model(who, body.model_id)
        return await self._submit(model.owner, Verb.UNLOAD, body.model_id, body.seq_id, b"", body)

    async def optim_step(self, who: Principal, body: OptimStep) -> Request:
        """Take an update."""
        model = await self._open_model(who, body.model_id)
        content = body.optim_params.model_dump_json().encode()
        return await self._submit(model.owner, Verb.OPTIM_STEP, body.model_id, body.seq_id, content, body)

    async def save(self, who: Principal, body: SaveWeights | SaveExternal) -> Request:
        """Take a request to save a model to train from it, or its adapter to be downloaded."""
        model = await self._open_model(who, body.model_id)
        verb, kind, save = Verb.SAVE, Kind.TRAINING, Save(path="", ttl_seconds=body.ttl_seconds)
        if isinstance(body, SaveWeights):
            update = {"overwrite": body.overwrite, "user_metadata": body.user_metadata or {}}
            save = save.model_copy(update=update)
        else:
            _check_external(body, model)
            verb, kind = Verb.SAVE_EXTERNAL, Kind.EXTERNAL
        path = SavedPath(body.model_id, kind, body.path or f"{body.seq_id:06d}")
        content = save.model_copy(update={"path": str(path)}).model_dump_json().encode()
        return await self._submit(model.owner, verb, body.model_id, body.seq_id, content, body)

    async def save_for_sampler(self, who: Principal, body: SaveForSampler) -> Request:
        """Take a request to save a model to sample from it: under a name, or for one sampling session."""
        model = await self._open_model(who, body.model_id)
        if (body.path is None) is (body.sampling_session_seq_id is None):
            raise InvalidRequest("give path, or sampling_session_seq_id: one of both")
        kind = Kind.EPHEMERAL if body.path is None else Kind.SAMPLER
        session = f"{model.session_id}{SAMPLE}{body.sampling_session_seq_id}" if body.path is None else None
        save = Save(
            path=str(SavedPath(body.model_id, kind, body.path or f"{body.seq_id:06d}")),
            ttl_seconds=EPHEMERAL_SECONDS if kind is Kind.EPHEMERAL else body.ttl_seconds,
            user_metadata=body.user_metadata or {},
            sampling_session_id=session,
            is_inflight=body.kind == "inflight" and body.path is None,
        )
        content = save.model_dump_json().encode()
        return await self._submit(model.owner, Verb.SAVE_FOR_SAMPLER, body.model_id, body.seq_id, content, body)

    async def load(self, who: Principal, body: LoadWeights) -> Request:
        """Take a request to continue from what was saved: in a new model, or in one that was just made."""
        saved = await asyncio.to_thread(self.saved.read, who, SavedPath.read(body.path))
        _check_optimizer("adamw" if body.optimizer_config is None else body.optimizer_config.type)
        content = Load(path=body.path, optimizer=body.optimizer).model_dump_json().encode()
        if body.session_id is None or body.model_seq_id is None:
            if body.model_id is None or body.seq_id is None:
                raise InvalidRequest("give session_id and model_seq_id, or model_id and seq_id")
            model = await self._open_model(who, body.model_id)
            return await self._submit(model.owner, Verb.LOAD, body.model_id, body.seq_id, content, body)
        await self.session(who, body.session_id)
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        record = self._record(who, model_id, body.session_id, body.user_metadata)
        record = record.model_copy(update={"lora": saved.lora, "began_from": body.path, "began_at": saved.step})
        return await self._submit(who.actor, Verb.LOAD, model_id, 0, content, body, record)

    async def create_sampler(self, who: Principal, body: CreateSampler) -> str:
        """Open a sampling session; returns its id."""
        await self.session(who, body.session_id)
        if body.model_path is not None:
            await self._check_sampled(who, body.model_path)
        elif body.base_model is None:
            raise InvalidRequest("give base_model, or model_path")
        else:
            self._check_base(body.base_model)
        sampler_id = f"{body.session_id}{SAMPLE}{body.sampling_session_seq_id}"
        sampler = Sampler(session_id=body.session_id, owner=who.actor, path=body.model_path)
        await self.sessions.put_sampler(sampler_id, sampler)
        return sampler_id

    async def sampler(self, who: Principal, sampler_id: str) -> Sampler:
        """Find a sampling session.

        Raises:
            NotFound: it is not the caller's.
        """
        found = await self.sessions.sampler(sampler_id)
        if found is None or not _may_touch(who, found.owner):
            raise NotFound(f"there is no sampling session {sampler_id}")
        return found

    async def sample(self, who: Principal, body: AskSample) -> tuple[str, list[str]]:
        """Take a request to sample; returns its id, and that of each sequence."""
        if body.topk_sample_logprobs or body.prompt_alt_tokens_k or body.target_prompt_logprobs is not None:
            raise InvalidRequest(
                "topk_sample_logprobs, prompt_alt_tokens_k and target_prompt_logprobs are not served here"
            )
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise InvalidRequest("a prompt may hold encoded text alone: pictures and sound are not served here")
        if body.sampling_session_id:
            sampler = await self.sampler(who, body.sampling_session_id)
            await self.session(who, sampler.session_id)
            if body.seq_id is None:
                raise InvalidRequest("seq_id goes with sampling_session_id")
            request_id = f"{body.sampling_session_id}:{body.seq_id}"
        else:
            if body.model_path is not None:
                await self._check_sampled(who, body.model_path)
            else:
                self._check_base(body.base_model or "")
            request_id = f"{secrets.token_hex(8)}{SAMPLE}0:0"
        # Of a sampling session, the session alone says from what: nobody checked whose another path is.
        path = None if body.sampling_session_id else body.model_path
        wanted = Sample.model_validate(body.model_dump() | {"path": path})
        content = wanted.model_dump_json().encode()
        request_id = f"{request_id}:scored" if body.is_scored else request_id
        whose = _whose(who)
        owner = short_name(who.actor)
        await self._queue.ask(f"{whose}{request_id}", content, _digest(content), owner, is_scored=body.is_scored)
        return request_id, [f"{request_id}:{number}" for number in range(body.num_samples)]

    async def answer(self, who: Principal, request_id: str) -> Answer | None:
        """Wait for an answer; None: not yet.

        Raises:
            Gone: there is no such request of the caller's, or it is no longer kept.
        """
        is_sampled = SAMPLE in request_id
        key = f"{_whose(who)}{request_id}" if is_sampled else request_id
        if not is_sampled:
            await self.model(who, request_id.rpartition(":")[0])
        if not await self._queue.knows(key):
            raise Gone(f"the request {request_id} is not known, or no longer")
        is_scored = request_id.endswith(":scored")
        try:
            return await self.futures.answer(key, LONG_POLL_SECONDS, is_sampled=is_sampled, is_scored=is_scored)
        except NotFound as error:
            raise Gone(error.detail) from None

    async def sampled(self, who: Principal, sequence_id: str) -> list[Sampled]:
        """Return which weights sampled each token of a sequence, as runs of tokens.

        Raises:
            NotFound: there is no such sequence of the caller's, it is not sampled yet, or no longer kept.
        """
        request_id, _, number = sequence_id.rpartition(":")
        found = await self._queue.sampled(f"{_whose(who)}{request_id}") if SAMPLE in request_id else None
        sequences = [] if found is None else SampledSequences.model_validate_json(found).sequences
        if not (number.isascii() and number.isdigit()) or int(number) >= len(sequences):
            raise NotFound(f"there is no sequence {sequence_id} that was sampled within the last day")
        return sequences[int(number)]

    async def ledgers(self, who: Principal) -> list[TinkerLedger]:
        """Count what became of the caller's requests; for an operator, of everybody's."""
        owners = await self.sessions.owners() if who.scope is Scope.OPERATOR else [short_name(who.actor)]
        return [await self._queue.ledger(owner) for owner in owners]

    async def _open_model(self, who: Principal, model_id: str) -> Model:
        model = await self.model(who, model_id)
        await self.session(who, model.session_id)
        return model

    async def _submit(
        self,
        whose: str,
        verb: Verb,
        model_id: str,
        seq: int,
        content: bytes,
        sent: BaseModel | bytes,
        record: Model | None = None,
    ) -> Request:
        owner = short_name(whose)
        request = Request(request_id_of(model_id, seq), "", verb, seq, model_id, content, owner)
        raw = sent if isinstance(sent, bytes) else sent.model_dump_json().encode()
        is_new = await self._queue.submit(request, _digest(verb.encode() + raw), self._clock.now(), record)
        return replace(request, is_new=is_new)

    def _check_base(self, name: str) -> None:
        if name not in {self.base_model, self._model.name}:
            raise NotFound(f"the base model here is {self.base_model}, not {name!r}")

    async def _check_sampled(self, who: Principal, path: str) -> None:
        saved = SavedPath.read(path)
        if saved.kind is not Kind.SAMPLER:
            use = "trained from" if saved.kind is Kind.TRAINING else "downloaded"
            raise InvalidRequest(f"{path} is to be {use}: save_weights_for_sampler makes what is sampled from")
        await asyncio.to_thread(self.saved.read, who, saved)


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise InvalidRequest(f"optimizer_config: {kind!r} is not served here: adamw")


def _check_external(body: SaveExternal, model: Model) -> None:
    if body.age_encryption_recipients:
        raise InvalidRequest("age_encryption_recipients are not served here: leave them out")
    if model.lora is None:
        raise InvalidRequest("save_weights_external is of adapters here; this model trains whole: use save_weights")


def _may_touch(who: Principal, owner: str) -> bool:
    return who.scope is Scope.OPERATOR or who.actor == owner


def _whose(who: Principal) -> str:
    """Keep the ids of samples that different tokens choose apart."""
    return f"{short_name(who.actor)}:"


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
