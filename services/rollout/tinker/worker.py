"""Samples for the Tinker API: one engine, and many models' weights.

Owners take turns, each one's requests in the order in which they came; those that sample from weights that are there
join the batch at once. Sampling sessions in flight get newer weights of their model while they sample.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from flotilla.services.rollout.engines.base import Engine, GenerationRequest, SamplingParameters
from flotilla.services.rollout.tinker.serving import ServedWeights, Serving, Source
from flotilla.shared.errors import ClaimLost, FlotillaError, InvalidRequest, NotFound, Unavailable, WorkerDied
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.tinker.messages import write_sequence
from flotilla.shared.tinker.queue import MOST_ATTEMPTS, NOTHING, Answer, Form, Made, Request, TinkerQueue, Work
from flotilla.shared.tinker.records import Category, Failure, Sample, SampledSequences
from flotilla.shared.tinker.sessions import TinkerSessions
from flotilla.shared.tinker.store import AWAY_SECONDS, as_long_as_it_takes
from flotilla.shared.tinker.turns import Turns

log = logging.getLogger(__name__)

AT_A_TIME, AT_A_TURN = 64, 16
DEFAULT_TOKENS = 256
SEEDS = 2**63


class SamplingWorker:
    """Takes requests from the queue and has them sampled.

    Args:
        queue: of requests.
        sessions: what they sample from.
        engine: started, with the base's weights.
        base: directory of the base.
        data: the fleet's directory.
        context_tokens: prompt and completion together.
    """

    def __init__(
        self,
        queue: TinkerQueue,
        sessions: TinkerSessions,
        engine: Engine,
        base: Path,
        data: Path,
        context_tokens: int,
    ) -> None:
        self._queue, self._sessions, self._engine = queue, sessions, engine
        self._weights = ServedWeights(engine, base, data, self._drained)
        self._context_tokens = context_tokens
        self._turns = Turns()
        self._incarnation = ""
        self._active: set[asyncio.Task[None]] = set()
        # Of requests that were begun and wait for room on the disk: counted once by one process.
        self._attempts: dict[str, int] = {}
        self._aside: dict[str, float] = {}

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ClaimLost: another process does this work now.
            WorkerDied: the engine's process ended.
        """
        self._incarnation = await self._queue.begin(Work.SAMPLE)
        await self._weights.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._take(tasks)
        except ExceptionGroup as group:
            # All in flight end of the same cause.
            raise group.exceptions[0] from group

    async def _take(self, tasks: asyncio.TaskGroup) -> None:
        # What waits comes first: an earlier process may have left it.
        after: dict[str, str] = {}
        heard = "0"
        while True:
            owner = None
            try:
                waiting = set(await self._queue.owners(Work.SAMPLE))
                after = {owner: entry for owner, entry in after.items() if owner in waiting}
                owner, requests = await self._turn(waiting, after)
                if owner is None:
                    heard = await self._queue.hears(Work.SAMPLE, heard)
                    continue
                for request in requests:
                    self._turns.uses(owner, await self._begin(request, tasks))
                    after[owner] = request.entry
            except Unavailable as error:
                # Redis, or room on the disk for the weights that one owner samples from: others continue.
                log.warning("what is sampled waits", extra={"error": error.detail})
                if owner is None:
                    await asyncio.sleep(AWAY_SECONDS)
                else:
                    self._aside[owner] = time.monotonic() + AWAY_SECONDS

    async def _turn(self, waiting: set[str], after: Mapping[str, str]) -> tuple[str | None, list[Request]]:
        """Return whose turn it is, and requests of theirs that were not begun; None where there are none."""
        now = time.monotonic()
        self._aside = {owner: until for owner, until in self._aside.items() if until > now}
        left = waiting - self._aside.keys()
        while (owner := self._turns.next(left)) is not None:
            requests = await self._queue.waiting(Work.SAMPLE, owner, after.get(owner, "0"), AT_A_TURN)
            if requests:
                return owner, requests
            left.discard(owner)
        return None, []

    async def _begin(self, request: Request, tasks: asyncio.TaskGroup) -> float:
        """Have a request sampled, once there is room for it; returns its cost in tokens."""
        while len(self._active) >= AT_A_TIME:
            await asyncio.wait(self._active, return_when=asyncio.FIRST_COMPLETED)
        attempt = self._attempts.get(request.id) or await self._queue.attempt(request, Work.SAMPLE)
        self._attempts[request.id] = attempt
        try:
            if attempt > MOST_ATTEMPTS:
                await self._refuse(request, WorkerDied(f"the engine ended {MOST_ATTEMPTS} times in this request"))
                return 1.0
            wanted = Sample.model_validate_json(request.body)
            serving = await self._serve_newest(wanted)
        except (WorkerDied, Unavailable, ClaimLost):
            raise  # What waits is sampled by another process, or later.
        except (FlotillaError, ValidationError) as error:
            await self._refuse(request, error)
            return 1.0
        if attempt > 1:
            # One of several ended the engine: alone, those that did not are done, and that one is counted.
            await self._drained()
        self._attempts.pop(request.id, None)
        task = tasks.create_task(self._sample(request, wanted, serving), name=request.id)
        self._weights.uses(serving)
        self._active.add(task)
        task.add_done_callback(self._active.discard)
        task.add_done_callback(lambda _: self._weights.ends(serving))
        # Its request reaches the engine before the next change of weights.
        await asyncio.sleep(0)
        if attempt > 1:
            await asyncio.wait({task})
        tokens = wanted.sampling_params.max_tokens or DEFAULT_TOKENS
        return float(len(wanted.prompt.token_ids) + wanted.num_samples * min(tokens, self._context_tokens))

    async def _drained(self) -> None:
        """Wait until nothing is sampled."""
        if self._active:
            await asyncio.wait(self._active)

    async def _serve_newest(self, wanted: Sample) -> Serving:
        source = await self._source_of(wanted)
        try:
            return await self._weights.serve(source)
        except NotFound:
            # What is in flight is deleted when newer weights are: those are sampled from then. What is saved under
            # a name is not there for a moment while it is replaced.
            return await self._weights.serve(await self._source_of(wanted))

    async def _source_of(self, wanted: Sample) -> Source:
        if not wanted.sampling_session_id:
            return Source(wanted.path)
        sampler = await self._sessions.sampler(wanted.sampling_session_id)
        if sampler is None:
            raise InvalidRequest(f"there is no sampling session {wanted.sampling_session_id}")
        if sampler.inflight_of is not None:
            return Source(await self._sessions.inflight(sampler.inflight_of), sampler.inflight_of)
        return Source(sampler.path)

    async def _sample(self, request: Request, wanted: Sample, serving: Serving) -> None:
        try:
            completions = await self._engine.generate(self._generation(request.id, wanted, serving.adapter))
        except (WorkerDied, Unavailable):
            raise
        except FlotillaError as error:
            await self._refuse(request, error)
            return
        if any(sampled < serving.version for each in completions for _, sampled in each.versions):
            facts = {"request_id": request.id, "version": serving.version}
            log.error("sampled from older weights than asked for", extra=facts)
        content = b"".join(
            write_sequence(each.token_ids, each.log_probs, is_cut=each.finish_reason is not FinishReason.STOP)
            for each in completions
        )
        runs = [self._weights.runs(each.versions) for each in completions]
        made = Made(sampled=SampledSequences(sequences=runs).model_dump_json())
        await self._reply(request, Answer(Form.PROTOBUF, content), made)

    async def _reply(self, request: Request, answer: Answer, made: Made = NOTHING) -> None:
        self._attempts.pop(request.id, None)
        reply = partial(self._queue.reply, Work.SAMPLE, self._incarnation, request, answer, made)
        await as_long_as_it_takes(reply)

    def _generation(self, request_id: str, wanted: Sample, adapter: str | None) -> GenerationRequest:
        how = wanted.sampling_params
        prompt = tuple(wanted.prompt.token_ids)
        # A request that is sampled again after a restart, or whose seed was given, gives the same tokens.
        origin = request_id if how.seed is None else str(how.seed)
        digests = (hashlib.sha256(f"{origin} {number}".encode()).digest() for number in range(wanted.num_samples))
        seeds = tuple(int.from_bytes(each[:8], "big") % SEEDS for each in digests)
        stop, tokens = list[str](), list[int]()
        for each in [how.stop] if isinstance(how.stop, str) else how.stop or []:
            (stop if isinstance(each, str) else tokens).append(each)  # type: ignore[arg-type]
        room = self._context_tokens - len(prompt)
        sampling = SamplingParameters(
            max_new_tokens=min(room, DEFAULT_TOKENS) if how.max_tokens is None else how.max_tokens,
            temperature=how.temperature or 1.0,
            top_k=max(how.top_k, 0),
            top_p=how.top_p,
            greedy=how.temperature == 0,
            stop_token_ids=tuple(tokens),
            stop=tuple(stop),
            ignore_eos=how.stop == [],
        )
        return GenerationRequest(request_id, prompt, seeds, sampling, adapter=adapter)

    async def _refuse(self, request: Request, error: FlotillaError | ValidationError) -> None:
        is_theirs = isinstance(error, ValidationError) or error.status < 500
        detail = error.detail if isinstance(error, FlotillaError) else str(error)
        failure = Failure(error=detail, category=Category.USER if is_theirs else Category.SERVER)
        log.warning("request failed", extra={"request_id": request.id, "error": detail})
        await self._reply(request, Answer.failed(failure))


async def run_until_cancelled(worker: SamplingWorker) -> None:
    """Run a worker; an order to end is no failure."""
    with suppress(asyncio.CancelledError):
        await worker.run()
