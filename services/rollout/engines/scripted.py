"""An engine without a model: tokens come from a function, time and failures from the test that uses it.

It keeps every promise of the protocol (versions, what an update does to samples in flight, aborts), so that what is
built on an engine can be tested in milliseconds.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flotilla.services.rollout.engines.admission import group_sizes
from flotilla.services.rollout.engines.base import Completion, EngineLoad, GenerationRequest
from flotilla.services.rollout.engines.requests import check_request, unstarted_completion
from flotilla.services.rollout.engines.stop_text import StopText
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.config.sections.engine import TorchEngineConfig
from flotilla.shared.errors import FlotillaError, RequestInFlight, Unavailable, WeightTransferFailed, WorkerDied
from flotilla.shared.schemas.trajectory import FinishReason

NextToken = Callable[[Sequence[int], int, int, int], int]


def rolling_token(prompt_ids: Sequence[int], seed: int, position: int, version: int) -> int:
    """Make a token out of all that it may depend on: between 2 and 99."""
    return 2 + (sum(prompt_ids) + 7 * seed + 13 * position + 31 * version) % 98


class NumberText:
    """Decodes token ids as their numbers, each followed by a blank."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Write the numbers down."""
        return "".join(f"{token_id} " for token_id in token_ids)


@dataclass(slots=True, eq=False)
class ScriptedSample:
    """A completion in the batch.

    Attributes:
        seed: of the request.
        tokens, log_probs: so far.
        runs: of versions, over them.
        finish_reason: None while it runs.
        resumed: leading tokens that came with the request.
        script: what an engine has chosen for it; see ``RecordedEngine``.
    """

    seed: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    resumed: int = 0
    script: object | None = None

    def completion(self, request: GenerationRequest, index: int) -> Completion:
        if not self.tokens:
            return unstarted_completion(request, index)
        log_probs = np.array(self.log_probs, np.float32)
        reason = self.finish_reason or FinishReason.ABORTED
        return Completion(np.array(self.tokens, np.int32), log_probs, tuple(self.runs), reason, self.resumed)


@dataclass(slots=True, eq=False)
class _Request:
    request: GenerationRequest
    samples: list[ScriptedSample]
    done: asyncio.Future[Sequence[Completion]]
    admitted: int = 0

    def running(self) -> list[ScriptedSample]:
        return [sample for sample in self.samples[: self.admitted] if sample.finish_reason is None]

    @property
    def num_waiting(self) -> int:
        return len(self.samples) - self.admitted

    def admit(self, size: int, version: int) -> None:
        for index in range(self.admitted, self.admitted + size):
            prefix = self.request.prefixes[index] if self.request.prefixes else None
            if prefix is not None and self.request.resume.allows(prefix.versions, version):
                sample = self.samples[index]
                sample.tokens, sample.runs = list(prefix.token_ids), list(prefix.versions)
                sample.log_probs = list(prefix.log_probs)
                sample.resumed = len(sample.tokens)
        self.admitted += size

    def completions(self) -> list[Completion]:
        return [sample.completion(self.request, index) for index, sample in enumerate(self.samples)]


@dataclass(slots=True, eq=False)
class _Update:
    version: int
    mode: OnWeightUpdate
    done: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class ScriptedTransfer:
    """A ``WeightTransfer`` that records its calls.

    Attributes:
        end: complete, or why it was aborted; None while it is under way.
    """

    image: Path
    version: int
    bytes_arrived: int = 0
    end: str | None = None

    def advance(self, bytes_arrived: int) -> None:
        """Record how far it is."""
        if self.end is None:
            self.bytes_arrived = max(self.bytes_arrived, bytes_arrived)

    def complete(self) -> None:
        """Record that it is whole."""
        self.end = self.end or "complete"

    def abort(self, reason: str) -> None:
        """Record that it will not be."""
        self.end = self.end or reason


def log_prob_of(token: int) -> float:
    """Return the log-probability that the scripted engine claims for a token."""
    return -0.5 - token / 100


class ScriptedEngine:
    """An ``Engine`` whose tokens are a function of prompt, seed, position and version.

    Args:
        next_token: that function.
        version: the version that serves first.
        slots: completions that the batch holds.
        context_tokens: the longest prompt and completion together.
        vocab_size: prompts with larger ids are refused.
        eos_token_id: ends a completion unless the request ignores it.
        token_seconds: time that one token of every running sample takes.
    """

    capabilities = TorchEngineConfig.CAPABILITIES

    def __init__(
        self,
        next_token: NextToken = rolling_token,
        *,
        version: int = 0,
        slots: int = 128,
        context_tokens: int = 4096,
        vocab_size: int = 1000,
        eos_token_id: int = 1,
        token_seconds: float = 0.0,
    ) -> None:
        self.version = version
        self.token_seconds = token_seconds
        self.transfers: list[ScriptedTransfer] = []
        self._next_token = next_token
        self._slots, self._context_tokens, self._vocab_size = slots, context_tokens, vocab_size
        self._eos_token_id = eos_token_id
        self._requests: dict[str, _Request] = {}
        self._updates: list[_Update] = []
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._loop_task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self.is_asleep = False
        self._initial_version = version

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests in flight."""
        return tuple(self._requests)

    def pause(self) -> None:
        """Sample nothing more until ``resume``; calls are still accepted."""
        self._unpaused.clear()

    def resume(self) -> None:
        """Continue sampling."""
        self._unpaused.set()

    def die(self, error: FlotillaError | None = None) -> None:
        """End as a killed process does: every waiting and later call raises ``error``, by default ``WorkerDied``."""
        self._stop(error or WorkerDied("the scripted engine was told to die"))

    async def start(self) -> None:
        """Begin to work; see ``Engine.start``."""
        self._loop_task = asyncio.create_task(self._run(), name="scripted engine")

    async def close(self) -> None:
        """Abort what is in flight; see ``Engine.close``."""
        for request_id in list(self._requests):
            await self.abort(request_id)
        self._stop(WorkerDied("the engine was closed"))

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample one completion per seed; see ``Engine.generate``."""
        self._check_running()
        if self.is_asleep:
            raise Unavailable("the engine is asleep")
        check_request(request, self._context_tokens, self._vocab_size)
        if request.request_id in self._requests:
            raise RequestInFlight(f"request {request.request_id} is in flight already")
        active = _Request(
            request, [ScriptedSample(s) for s in request.seeds], asyncio.get_running_loop().create_future()
        )
        self._requests[request.request_id] = active
        self._work.set()
        try:
            return await active.done
        finally:
            self._requests.pop(request.request_id, None)

    async def abort(self, request_id: str) -> None:
        """End a request now; see ``Engine.abort``."""
        active = self._requests.pop(request_id, None)
        if active is not None and not active.done.done():
            active.done.set_result(active.completions())

    def begin_transfer(self, image: Path, version: int) -> "ScriptedTransfer":
        """Record the transfer in ``transfers``, and read nothing; see ``Engine.begin_transfer``."""
        self._check_running()
        self.transfers.append(ScriptedTransfer(image, version))
        return self.transfers[-1]

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        """Serve another version once the image proves to be a safetensors file; see ``Engine.load_weights``."""
        self._check_running()
        check_image(image)
        update = _Update(version, on_update, asyncio.get_running_loop().create_future())
        self._updates.append(update)
        self._work.set()
        try:
            await update.done
        finally:
            self._updates = [other for other in self._updates if other is not update]

    async def sleep(self) -> None:
        """Abort what is in flight, and sample nothing until it has weights again; see ``Engine.sleep``."""
        self._check_running()
        for request_id in list(self._requests):
            await self.abort(request_id)
        for update in self._updates:
            if not update.done.done():
                update.done.set_exception(Unavailable("the engine was put to sleep"))
        self._updates.clear()
        self.is_asleep = True

    async def discard_weights(self) -> None:
        """Sample nothing until it has weights again; see ``DiscardsWeights``."""
        await self.sleep()

    async def wake(self) -> None:
        """Serve the first version again, if it is asleep; see ``Engine.wake``."""
        self._check_running()
        if self.is_asleep:
            self.version, self.is_asleep = self._initial_version, False

    async def load(self) -> EngineLoad:
        """Take a snapshot of the load; see ``Engine.load``."""
        self._check_running()
        return EngineLoad(
            version=self.version,
            running=sum(len(active.running()) for active in self._requests.values()),
            waiting=sum(active.num_waiting for active in self._requests.values()),
            slots=self._slots,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
        )

    async def _run(self) -> None:
        while True:
            await self._unpaused.wait()
            if not self._requests and not self._updates:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.token_seconds)
            if self._unpaused.is_set():
                self._step()

    def _step(self) -> None:
        while self._updates and not self._is_held_back(self._updates[0]):
            self._apply(self._updates.pop(0))
        self._admit()
        for active in list(self._requests.values()):
            for sample in active.running():
                self._extend(active.request, sample)
            if not active.num_waiting and not active.running() and not active.done.done():
                active.done.set_result(active.completions())

    def _is_held_back(self, update: _Update) -> bool:
        held = any(active.request.holds_weights and active.admitted for active in self._requests.values())
        is_running = any(active.running() for active in self._requests.values())
        return held or (update.mode is OnWeightUpdate.DRAIN and is_running)

    def _apply(self, update: _Update) -> None:
        if update.done.done():
            return
        self.version, self.is_asleep = update.version, False
        if update.mode is OnWeightUpdate.INTERRUPT:
            lengths = [(a, s) for a in self._requests.values() for s in a.running()]
            self._prefilled_tokens += sum(len(a.request.prompt_ids) + len(s.tokens) for a, s in lengths)
        update.done.set_result(None)

    def _admit(self) -> None:
        waiting = [active for active in self._requests.values() if active.num_waiting]
        if self._updates:
            drains = self._updates[0].mode is OnWeightUpdate.DRAIN
            waiting = [a for a in waiting if (a.admitted if a.request.holds_weights else not drains)]
        free = self._slots - sum(len(active.running()) for active in self._requests.values())
        sizes = group_sizes([active.num_waiting for active in waiting], free, self._slots)
        for active, size in zip(waiting, sizes, strict=False):
            active.admit(size, self.version)
            self._prefilled_tokens += len(active.request.prompt_ids)

    def _extend(self, request: GenerationRequest, sample: ScriptedSample) -> None:
        sampling = request.sampling
        token = self._next_token(request.prompt_ids, sample.seed, len(sample.tokens), self.version)
        self._append(sample, token, log_prob_of(token))
        is_eos = token == self._eos_token_id and not sampling.ignore_eos
        has_text = bool(sampling.stop) and StopText(NumberText(), sampling.stop).ends(np.array(sample.tokens, np.int32))
        if is_eos or token in sampling.stop_token_ids or has_text:
            sample.finish_reason = FinishReason.STOP
        elif len(sample.tokens) >= sampling.max_new_tokens:
            sample.finish_reason = FinishReason.LENGTH

    def _append(self, sample: ScriptedSample, token: int, log_prob: float) -> None:
        if not sample.runs or sample.runs[-1][1] != self.version:
            sample.runs.append((len(sample.tokens), self.version))
        sample.tokens.append(token)
        sample.log_probs.append(log_prob)
        self._generated_tokens += 1

    def _check_running(self) -> None:
        if self._loop_task is None or self._loop_task.done() or self._loop_task.cancelling():
            raise WorkerDied("the engine does not run")

    def _stop(self, error: FlotillaError) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
        for active in self._requests.values():
            if not active.done.done():
                active.done.set_exception(error)
        for update in self._updates:
            if not update.done.done():
                update.done.set_exception(error)


def check_image(image: Path) -> None:
    """Check that a file begins as a safetensors file does.

    Raises:
        WeightTransferFailed: it does not, or is not there.
    """
    try:
        with image.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begins_as_json = file.read(1) == b"{"
        is_whole = 8 + length <= image.stat().st_size
    except OSError as error:
        raise WeightTransferFailed(f"weights in {image} cannot be read: {error}") from error
    if not (begins_as_json and is_whole):
        raise WeightTransferFailed(f"{image} is no safetensors file")
