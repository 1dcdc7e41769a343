"""Samples for the Tinker API: one engine, whose weights change with who asks.

Requests are taken in the order in which they came; those that sample from the weights that are there join the batch at
once. Sampling sessions in flight get newer weights of their model while they sample.
"""

import asyncio
import hashlib
import logging
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from flotilla.services.rollout.engines.base import Engine, GenerationRequest, SamplingParameters
from flotilla.services.rollout.tinker.images import write_image
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, InvalidRequest, WorkerDied
from flotilla.shared.schemas.trajectory import FinishReason
from flotilla.shared.tinker.messages import write_sequence
from flotilla.shared.tinker.paths import Kind, SavedPath
from flotilla.shared.tinker.queue import Answer, Form, Request, TinkerQueue, Work
from flotilla.shared.tinker.records import Category, Failure, Sample

log = logging.getLogger(__name__)

AT_A_TIME = 64
DEFAULT_TOKENS = 256
SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Source:
    """What a request samples from.

    Attributes:
        path: of saved weights; None: the base's.
        inflight_of: the model whose newest weights in flight those are.
    """

    path: str | None = None
    inflight_of: str | None = None


class SamplingWorker:
    """Takes requests from the queue and has them sampled.

    Args:
        queue: of requests.
        engine: started, with the base's weights.
        base: directory of the base.
        data: the fleet's directory.
        context_tokens: prompt and completion together.
    """

    def __init__(self, queue: TinkerQueue, engine: Engine, base: Path, data: Path, context_tokens: int) -> None:
        self._queue, self._engine, self._base, self._data = queue, engine, base, data
        self._context_tokens = context_tokens
        self._source, self._version = Source(), 0
        self._incarnation = ""
        self._active: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ClaimLost: another process does this work now.
            WorkerDied: the engine's process ended.
        """
        self._incarnation = await self._queue.begin(Work.SAMPLE)
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._take(tasks)
        except ExceptionGroup as group:
            # All in flight end of the same cause.
            raise group.exceptions[0] from group

    async def _take(self, tasks: asyncio.TaskGroup) -> None:
        # What waits comes first: an earlier process may have left it.
        after = "0"
        while True:
            for request in await self._queue.waiting(Work.SAMPLE, after, AT_A_TIME, blocks=True):
                after = request.entry
                try:
                    wanted = Sample.model_validate_json(request.body)
                    await self._serve(await self._source_of(wanted))
                except WorkerDied:
                    raise  # Another process samples what waits.
                except (FlotillaError, ValidationError) as error:
                    await self._refuse(request, error)
                    continue
                task = tasks.create_task(self._sample(request, wanted, self._version), name=request.id)
                self._active.add(task)
                task.add_done_callback(self._active.discard)
                # Its request reaches the engine before the next change of weights.
                await asyncio.sleep(0)

    async def _source_of(self, wanted: Sample) -> Source:
        if not wanted.sampling_session_id:
            return Source(wanted.path)
        sampler = await self._queue.sampler(wanted.sampling_session_id)
        if sampler is None:
            raise InvalidRequest(f"there is no sampling session {wanted.sampling_session_id}")
        if sampler.inflight_of is not None:
            return Source(await self._queue.inflight(sampler.inflight_of), sampler.inflight_of)
        return Source(sampler.path)

    async def _serve(self, source: Source) -> None:
        """Have the engine sample from these weights; what samples from others ends first, unless it is in flight."""
        if source == self._source:
            return
        saved = None
        if source.path is not None:
            path = SavedPath.read(source.path)
            if path.kind is Kind.TRAINING:
                raise InvalidRequest(f"{source.path} is to be trained from, not to be sampled from")
            saved = path.below(self._data)
        is_newer = self._source.inflight_of is not None and source.inflight_of == self._source.inflight_of
        with tempfile.TemporaryDirectory(prefix="flotilla-tinker-") as folder:
            image = Path(folder) / "image.safetensors"
            await asyncio.to_thread(write_image, self._base, saved, image)
            if not is_newer and self._active:
                # The engine may not have begun with all of them, and would sample those from the new weights.
                await asyncio.wait(self._active)
            mode = OnWeightUpdate.CONTINUE if is_newer else OnWeightUpdate.DRAIN
            await self._engine.load_weights(image, self._version + 1, mode)
        self._version, self._source = self._version + 1, source
        log.info("sampler serves", extra={"path": source.path, "version": self._version})

    async def _sample(self, request: Request, wanted: Sample, version: int) -> None:
        try:
            completions = await self._engine.generate(self._generation(request.id, wanted))
        except WorkerDied:
            raise
        except FlotillaError as error:
            await self._refuse(request, error)
            return
        if any(first < version for each in completions for _, first in each.versions):
            log.error("sampled from older weights than asked for", extra={"request_id": request.id, "version": version})
        content = b"".join(
            write_sequence(each.token_ids, each.log_probs, is_cut=each.finish_reason is not FinishReason.STOP)
            for each in completions
        )
        await self._queue.reply(Work.SAMPLE, self._incarnation, request, Answer(Form.PROTOBUF, content))

    def _generation(self, request_id: str, wanted: Sample) -> GenerationRequest:
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
        return GenerationRequest(request_id, prompt, seeds, sampling)

    async def _refuse(self, request: Request, error: FlotillaError | ValidationError) -> None:
        is_theirs = isinstance(error, ValidationError) or error.status < 500
        detail = error.detail if isinstance(error, FlotillaError) else str(error)
        failure = Failure(error=detail, category=Category.USER if is_theirs else Category.SERVER)
        log.warning("request failed", extra={"request_id": request.id, "error": detail})
        await self._queue.reply(Work.SAMPLE, self._incarnation, request, Answer.failed(failure))


async def run_until_cancelled(worker: SamplingWorker) -> None:
    """Run a worker; an order to end is no failure."""
    with suppress(asyncio.CancelledError):
        await worker.run()
