"""Takes requests from the queue, has them done, and answers them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from flotilla.services.trainer.tinker.trainer import Trainer, Written
from flotilla.shared.errors import (
    ClaimLost,
    FlotillaError,
    InvalidRequest,
    ModelError,
    NotFound,
    Unavailable,
    WorkerDied,
)
from flotilla.shared.tinker.messages import MISSING, put_bytes, write_top
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.queue import MOST_ATTEMPTS, NOTHING, Answer, Form, Made, Request, TinkerQueue, Work
from flotilla.shared.tinker.records import Category, Failure, Model, Sample, Sampler, Save, Verb
from flotilla.shared.tinker.sessions import TinkerSessions
from flotilla.shared.tinker.store import AWAY_SECONDS, as_long_as_it_takes
from flotilla.shared.tinker.turns import Turns

log = logging.getLogger(__name__)

Result = TypeVar("Result")
SCORES_AT_A_TIME = 16
DONE_ONCE = frozenset({Verb.SAVE, Verb.SAVE_FOR_SAMPLER, Verb.SAVE_EXTERNAL, Verb.FORWARD, Verb.UNLOAD})
"""They change nothing of the model; their files are there, or were deleted since."""
CLEANING_SECONDS = 60.0
GAPS_SECONDS = 5.0

GAP_SECONDS = 30.0
"""How long a missing request is waited for, though it was done: above a long poll, whose client may send it again."""
LONGEST_GAP_SECONDS = 330.0
"""How long one is waited for that was not: above the five minutes for which the client tries to send one."""
LOST = (
    "request {next} of {model_id} was lost with the data plane's last writes, and cannot be done again: "
    "go on from the last saved state (create_training_client_from_state)"
)


class TrainingWorker:
    """Does one request after another, on one thread.

    Args:
        queue: of requests.
        sessions: what they sample from.
        trainer: does them.
    """

    def __init__(self, queue: TinkerQueue, sessions: TinkerSessions, trainer: Trainer) -> None:
        self._queue, self._sessions, self._trainer = queue, sessions, trainer
        self._training, self._scoring = Turns(), Turns()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._train = self._score = ""
        # What was begun last: where Redis was away meanwhile, it is begun again without having ended the process.
        self._begun = ""

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ClaimLost: another process does this work now.
        """
        self._train, self._score = await self._queue.begin(Work.TRAIN), await self._queue.begin(Work.SCORE)
        log.info("tinker trainer works", extra={"incarnation": self._train})
        heard, cleaned, looked = "0", 0.0, 0.0
        while True:
            try:
                if time.monotonic() >= cleaned:
                    await self._discard_closed()
                    cleaned = time.monotonic() + CLEANING_SECONDS
                if time.monotonic() >= looked:
                    await self._close_gaps()
                    looked = time.monotonic() + GAPS_SECONDS
                # Samplers wait for scores; scoring is short beside an update.
                has_scored = await self._take(Work.SCORE, self._scoring, SCORES_AT_A_TIME, self._scores_once)
                has_trained = await self._take(Work.TRAIN, self._training, 1, self._trained)
                if not has_scored and not has_trained:
                    heard = await self._queue.hears(Work.TRAIN, heard)
            except Unavailable as error:
                log.warning("Redis is waited for", extra={"error": error.detail})
                await asyncio.sleep(AWAY_SECONDS)

    async def _take(self, work: Work, turns: Turns, count: int, does: Callable[[Request], Awaitable[None]]) -> bool:
        """Do some requests of the model whose turn it is; returns whether there was one."""
        owner = turns.next(await self._queue.owners(work))
        if owner is None:
            return False
        requests = await self._queue.waiting(work, owner, "0", count)
        began = time.monotonic()
        for request in requests:
            await does(request)
        turns.uses(owner, time.monotonic() - began)
        return bool(requests)

    async def _discard_closed(self) -> None:
        for model_id in await self._compute(self._trainer.models):
            if await self._queue.is_closed(model_id):
                await self._compute(partial(self._trainer.discard, model_id))

    async def _close_gaps(self) -> None:
        """Continue with models whose lost requests were done already; report the others as lost.

        A client sends what was answered no second time: without this, later requests would wait for it for ever.
        """
        for gap in await self._sessions.gaps():
            if gap.seconds < GAP_SECONDS:
                continue
            reached = await self._compute(partial(self._trainer.reached, gap.model_id))
            if reached == gap.first - 1:
                await self._check_latest()
                # What was lost cannot be done again.
                await self._compute(partial(self._trainer.write, gap.model_id))
                if await self._sessions.skip(gap.model_id, gap.next, reached):
                    log.warning("requests were lost after they were done", extra={"model_id": gap.model_id})
            elif reached >= gap.next or gap.seconds >= LONGEST_GAP_SECONDS:
                await self._check_latest()
                await self._sessions.give_up(gap.model_id, LOST.format(next=gap.next, model_id=gap.model_id))
                log.error("requests of a model were lost", extra={"model_id": gap.model_id, "seq": gap.next})

    async def _check_latest(self) -> None:
        if not await self._queue.is_latest(Work.TRAIN, self._train):
            raise ClaimLost("another process does the work train now")

    async def _scores_once(self, request: Request) -> None:
        await self._reply(Work.SCORE, self._score, request, await self._scored(request))

    async def _reply(
        self, work: Work, incarnation: str, request: Request, answer: Answer, made: Made = NOTHING
    ) -> None:
        """Answer a request, however long Redis is away: it was done, and is not done a second time."""
        await as_long_as_it_takes(partial(self._queue.reply, work, incarnation, request, answer, made))

    async def _trained(self, request: Request) -> None:
        model = await self._queue.model(request.model_id)
        answer: Answer
        try:
            if model is None or await self._queue.is_closed(model.model_id):
                raise NotFound(f"{request.model_id}: there is no such model, or its session ended")
            await self._begin(request, Work.TRAIN)
            if await self._compute(partial(self._trainer.reached, request.model_id)) >= request.seq:
                # Redis came back older than the model: what it asks for is done again, and not on top.
                await self._check_latest()
                await self._compute(partial(self._trainer.go_back, request.model_id, request.seq))
            if not self._trainer.knows(model.model_id):
                await self._make_room()
                if request.seq > 0:
                    await self._recover(model, request)
            answer = await self._compute(partial(self._trainer.do, request, model))
        except (Unavailable, ClaimLost):
            raise  # Nothing is wrong with the request: another process does it.
        except (FlotillaError, ValidationError) as error:
            log.warning("request failed", extra={"request_id": request.id, "error": str(error)})
            answer = failed(error)
        except Exception as error:
            # Such as memory that is used up: of what it began, nothing may remain.
            log.exception("request failed", extra={"request_id": request.id})
            self._trainer.forget(request.model_id)
            answer = failed(error)
        made, replaced = await self._made(request, model, answer)
        await self._reply(Work.TRAIN, self._train, request, answer, made)
        if replaced is not None:
            await self._compute(partial(self._trainer.drop_snapshot, replaced))
        if answer.form is Form.FAILED or await self._queue.is_closed(request.model_id):
            return
        try:
            written = await self._compute(partial(self._trainer.write_what_is_due, request.model_id, request.verb))
        except Exception:
            # Such as a full disk: the requests stay in Redis until a later state is written.
            log.exception("state not written", extra={"model_id": request.model_id})
            return
        await self._let_go(written)

    async def _make_room(self) -> None:
        """Keep a model on the disk alone that was not used for longest, where another one needs its place."""
        while (unused := self._trainer.unused()) is not None:
            await self._check_latest()
            await self._let_go(await self._compute(partial(self._trainer.unload, unused)))
            log.info("model left memory", extra={"model_id": unused})

    async def _let_go(self, written: Written | None) -> None:
        if written is not None:
            await self._queue.forget_bodies(written.model_id, written.first, written.last)

    async def _begin(self, request: Request, work: Work) -> None:
        """Refuse a request that has ended the process too often."""
        if request.id == self._begun:
            return
        self._begun = request.id
        if await self._queue.attempt(request, work) > MOST_ATTEMPTS:
            raise WorkerDied(f"the trainer ended {MOST_ATTEMPTS} times while it did this request")

    async def _recover(self, model: Model, request: Request) -> None:
        """Bring a model that is not in this process to where it was before a request, or leave it out."""
        try:
            await self._do_again(model, request)
        except BaseException:
            # Half of what it was must not be gone on from.
            self._trainer.forget(model.model_id)
            raise

    async def _do_again(self, model: Model, request: Request) -> None:
        done = await self._queue.progress(model.model_id)
        on_disk = await self._compute(partial(self._trainer.restore, model, request.seq))
        again = 0
        async for past in self._queue.past(model.model_id, on_disk + 1, min(done, request.seq - 1)):
            if past.verb in DONE_ONCE or _did_nothing(past):
                continue
            if past.verb != Verb.CREATE and not past.body:
                raise ModelError(f"{model.model_id}: its state on the disk is older than what is kept of its requests")
            with suppress(FlotillaError, ValidationError):
                # An update by a gradient that is not finite is refused again, and forgets it.
                await self._compute(partial(self._trainer.do, past, model))
            again += 1
        log.info("model recovered", extra={"model_id": model.model_id, "on_disk": on_disk, "done_again": again})

    async def _made(self, request: Request, model: Model | None, answer: Answer) -> tuple[Made, str | None]:
        """Name the sampling session that a request made, if it did, and the snapshot that became unreferenced."""
        if request.verb != Verb.SAVE_FOR_SAMPLER or answer.form is Form.FAILED or model is None:
            return NOTHING, None
        save = Save.model_validate_json(request.body)
        if save.sampling_session_id is None:
            return NOTHING, None
        replaced = await self._sessions.inflight(model.model_id) if save.is_inflight else None
        inflight_of = model.model_id if save.is_inflight else None
        path = None if save.is_inflight else save.path
        sampler = Sampler(session_id=model.session_id, owner=model.owner, path=path, inflight_of=inflight_of)
        made = Made((save.sampling_session_id, sampler), inflight=save.path if save.is_inflight else "")
        return made, None if replaced == save.path else replaced

    async def _scored(self, request: Request) -> Answer:
        try:
            await self._begin(request, Work.SCORE)
            wanted = Sample.model_validate_json(request.body)
            path = wanted.path
            if wanted.sampling_session_id:
                sampler = await self._sessions.sampler(wanted.sampling_session_id)
                if sampler is None:
                    raise InvalidRequest(f"there is no sampling session {wanted.sampling_session_id}")
                path = sampler.path
                if sampler.inflight_of is not None:
                    path = await self._sessions.inflight(sampler.inflight_of)
            return await self._compute(partial(self._scores, wanted, path))
        except (Unavailable, ClaimLost):
            raise
        except (FlotillaError, ValidationError) as error:
            return failed(error)
        except Exception as error:
            log.exception("scores failed", extra={"request_id": request.id})
            return failed(error)

    def _scores(self, wanted: Sample, path: str | None) -> Answer:
        tokens, count = wanted.prompt.token_ids, wanted.topk_prompt_logprobs
        if path is not None and SavedPath.read(path).kind not in (Kind.SAMPLER, Kind.EPHEMERAL):
            raise InvalidRequest(f"{path} is not to be sampled from: save_weights_for_sampler makes what is")
        log_probs, top = self._trainer.score(path, tokens, count)
        first = 1 if wanted.prompt_logprobs_last_n is None else max(1, len(tokens) - wanted.prompt_logprobs_last_n)
        shown = np.full(len(tokens), np.nan, np.float32)
        shown[first:] = log_probs[first - 1 :]
        content = put_bytes(2, shown.astype("<f4").tobytes()) if wanted.prompt_logprobs else b""
        if count:
            ids, likeliest = (
                np.zeros((len(tokens), count), np.int32),
                np.full((len(tokens), count), MISSING, np.float32),
            )
            ids[first:], likeliest[first:] = top[0].numpy()[first - 1 :], top[1].numpy()[first - 1 :]
            content += put_bytes(3, write_top(ids, likeliest))
        return Answer(Form.PROTOBUF, content)

    async def _compute(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _did_nothing(past: Request) -> bool:
    """Return whether a request failed and left nothing; now it might not: what it would load may be there since."""
    return bool(past.failed) and (past.verb != Verb.OPTIM_STEP or past.failed == Category.SERVER)


def failed(error: Exception) -> Answer:
    """Return why a request failed, and whose fault it is."""
    if isinstance(error, FlotillaError):
        category = Category.USER if error.status < 500 else Category.SERVER
        return Answer.failed(Failure(error=error.detail, category=category))
    if isinstance(error, ValidationError):
        return Answer.failed(Failure(error=str(error), category=Category.USER))
    return Answer.failed(Failure(error=f"{type(error).__name__}: {error}", category=Category.SERVER))
