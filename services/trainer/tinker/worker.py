"""Takes requests from the queue, has them done, and answers them."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from flotilla.services.trainer.tinker.trainer import Trainer
from flotilla.shared.errors import FlotillaError, InvalidRequest, ModelError, NotFound, Unavailable, WorkerDied
from flotilla.shared.tinker.fields import put_bytes
from flotilla.shared.tinker.messages import MISSING, write_top
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.queue import Answer, Form, Request, TinkerQueue, Work
from flotilla.shared.tinker.records import Category, Failure, Model, Sample, Sampler, Save, Verb

log = logging.getLogger(__name__)

Result = TypeVar("Result")
SCORES_AT_A_TIME = 16
MOST_ATTEMPTS = 3
"""A request that ended the process so often is not begun again: it would end that of all."""
SAVING = frozenset({Verb.SAVE, Verb.SAVE_FOR_SAMPLER})
"""Their files are there, or were deleted since."""


class TrainingWorker:
    """Does one request after another, on one thread.

    Args:
        queue: of requests.
        trainer: does them.
    """

    def __init__(self, queue: TinkerQueue, trainer: Trainer) -> None:
        self._queue, self._trainer = queue, trainer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._train = self._score = ""

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ClaimLost: another process does this work now.
        """
        self._train, self._score = await self._queue.begin(Work.TRAIN), await self._queue.begin(Work.SCORE)
        log.info("tinker trainer works", extra={"incarnation": self._train})
        while True:
            # What is scored is waited for by who samples; it is short beside an update.
            scores = await self._queue.waiting(Work.SCORE, "0", SCORES_AT_A_TIME, blocks=False)
            for request in scores:
                await self._queue.reply(Work.SCORE, self._score, request, await self._scored(request))
            for request in await self._queue.waiting(Work.TRAIN, "0", 1, blocks=not scores):
                await self._trained(request)

    async def _trained(self, request: Request) -> None:
        model = await self._queue.model(request.model_id)
        answer: Answer
        try:
            if model is None:
                raise NotFound(f"{request.model_id}: there is no such model")
            await self._begin(request, Work.TRAIN)
            if not self._trainer.knows(model.model_id) and request.seq > 0:
                await self._recover(model, request)
            answer = await self._compute(partial(self._trainer.do, request, model))
        except Unavailable:
            raise  # Nothing is wrong with the request: another process does it.
        except (FlotillaError, ValidationError) as error:
            log.warning("request failed", extra={"request_id": request.id, "error": str(error)})
            answer = failed(error)
        except Exception as error:
            # Such as memory that is used up: of what it began, nothing may remain.
            log.exception("request failed", extra={"request_id": request.id})
            self._trainer.forget(request.model_id)
            answer = failed(error)
        made = await self._made(request, model, answer)
        await self._queue.reply(Work.TRAIN, self._train, request, answer, made)
        if answer.form is Form.FAILED:
            # A load that was refused leaves gradients that no state holds.
            return
        try:
            before = await self._compute(partial(self._trainer.state_is_due, request.model_id, request.verb))
        except Exception:
            # Such as a full disk: the requests stay in Redis until a later state is written.
            log.exception("state not written", extra={"model_id": request.model_id})
            return
        if before is not None:
            await self._queue.forget_bodies(request.model_id, before + 1, request.seq)

    async def _begin(self, request: Request, work: Work) -> None:
        """Refuse a request that has ended the process too often."""
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
        on_disk = await self._compute(partial(self._trainer.restore, model))
        again = 0
        async for past in self._queue.past(model.model_id, on_disk + 1, min(done, request.seq - 1)):
            if past.verb in SAVING or await self._did_nothing(past):
                continue
            if past.verb != Verb.CREATE and not past.body:
                raise ModelError(f"{model.model_id}: its state on the disk is older than what is kept of its requests")
            with suppress(FlotillaError, ValidationError):
                # An update by a gradient that is not finite is refused again, and forgets it.
                await self._compute(partial(self._trainer.do, past, model))
            again += 1
        log.info("model recovered", extra={"model_id": model.model_id, "on_disk": on_disk, "done_again": again})

    async def _did_nothing(self, past: Request) -> bool:
        """Return whether a request failed and left nothing; now it might not: what it would load may be there since."""
        answered = await self._queue.answer(past.id)
        if answered is None or answered.form is not Form.FAILED:
            return False
        return past.verb != Verb.OPTIM_STEP or Failure.model_validate_json(answered.content).category is Category.SERVER

    async def _made(self, request: Request, model: Model | None, answer: Answer) -> tuple[str, Sampler] | None:
        """Name the sampling session that a request made, if it did."""
        if request.verb != Verb.SAVE_FOR_SAMPLER or answer.form is Form.FAILED or model is None:
            return None
        save = Save.model_validate_json(request.body)
        if save.sampling_session_id is None:
            return None
        if save.is_inflight:
            await self._queue.put_inflight(model.model_id, save.path)
        inflight_of = model.model_id if save.is_inflight else None
        path = None if save.is_inflight else save.path
        sampler = Sampler(session_id=model.session_id, owner=model.owner, path=path, inflight_of=inflight_of)
        return save.sampling_session_id, sampler

    async def _scored(self, request: Request) -> Answer:
        try:
            await self._begin(request, Work.SCORE)
            wanted = Sample.model_validate_json(request.body)
            path = wanted.path
            if wanted.sampling_session_id:
                sampler = await self._queue.sampler(wanted.sampling_session_id)
                if sampler is None:
                    raise InvalidRequest(f"there is no sampling session {wanted.sampling_session_id}")
                path = sampler.path
                if sampler.inflight_of is not None:
                    path = await self._queue.inflight(sampler.inflight_of)
            return await self._compute(partial(self._scores, wanted, path))
        except (FlotillaError, ValidationError) as error:
            return failed(error)
        except Exception as error:
            log.exception("scores failed", extra={"request_id": request.id})
            return failed(error)

    def _scores(self, wanted: Sample, path: str | None) -> Answer:
        tokens, count = wanted.prompt.token_ids, wanted.topk_prompt_logprobs
        if path is not None and SavedPath.read(path).kind is Kind.TRAINING:
            raise InvalidRequest(f"{path} is to be trained from, not to be sampled from")
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


def failed(error: Exception) -> Answer:
    """Say why a request failed, and whose fault it is."""
    if isinstance(error, FlotillaError):
        category = Category.USER if error.status < 500 else Category.SERVER
        return Answer.failed(Failure(error=error.detail, category=category))
    if isinstance(error, ValidationError):
        return Answer.failed(Failure(error=str(error), category=Category.USER))
    return Answer.failed(Failure(error=f"{type(error).__name__}: {error}", category=Category.SERVER))
