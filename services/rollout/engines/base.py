"""The engine protocol: what samples tokens, and under which weights.

An engine serves exactly one policy version at any instant and tags every token with it. It never serves half-loaded
weights. ``generate`` and ``load_weights`` may be called concurrently; what happens to samples in flight when weights
change is the caller's choice (``OnWeightUpdate``). New weights come in two parts: a ``WeightTransfer`` lets the engine
read an image while it arrives, ``load_weights`` makes it serve.

Tokens that were sampled before, elsewhere, stay as they are: their prefix is computed again. Whether they may be kept
depends on the version that serves when the sample joins the batch, so the engine decides, between two steps. A sample
whose tokens may not be kept is sampled afresh from its seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import WorkerDied
from flotilla.shared.schemas.engine import EngineCapability
from flotilla.shared.schemas.prompt_image import PromptImage as PromptImage
from flotilla.shared.schemas.publication import PublicationOrder
from flotilla.shared.schemas.routing import RoutedExperts
from flotilla.shared.schemas.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens that a completion has already.

    Attributes:
        token_ids: at least one, none of which ends the completion.
        log_probs: nats, one per token, under the version that sampled it.
        versions: run-length ``(start, version)`` over the tokens.
        experts: of the prompt and of all tokens but the last; None where none were recorded.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]
    experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """Which tokens may be kept.

    Attributes:
        mixes_versions: whether one completion may hold tokens of several versions.
        max_lag: versions that a kept token may be older than the one that serves.
    """

    mixes_versions: bool = False
    max_lag: int = 0

    def allows(self, versions: tuple[tuple[int, int], ...], serving: int) -> bool:
        """Return whether tokens of these runs may stay beside tokens that ``serving`` samples."""
        sampled_by = {version for _, version in versions}
        if not self.mixes_versions:
            return sampled_by == {serving}
        return serving - min(sampled_by) <= self.max_lag


UNMIXED = ResumeRule()


OnEngineDeath = Callable[[WorkerDied], None]
"""Called when the engine's process is found to have ended."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one completion is sampled.

    The recorded log-probability is that of the softmax of ``logits / temperature`` over the whole vocabulary, before
    top-k, top-p and min-p cut it (as SGLang does) and without penalties; greedy decoding records it at temperature 1.

    Attributes:
        max_new_tokens: at least 1.
        temperature: above 0; ignored when ``greedy``.
        top_k: keep this many most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        min_p: keep tokens at least so likely as this part of the most likely one, in [0, 1].
        repetition_penalty: what logits of tokens of prompt and completion are divided by (multiplied, if negative).
        presence_penalty: taken off the logits of the completion's tokens.
        frequency_penalty: taken off them as often as they are in it.
        greedy: take the most likely token, after penalties.
        stop_token_ids: sampling one of these ends the completion; the token is kept in it.
        stop: decoded text that ends the completion; its tokens are kept.
        ignore_eos: do not end at the model's own end-of-sequence tokens (``stop_token_ids`` still end).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Of repetition, presence, frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to be completed ``len(seeds)`` times; the prompt is prefilled once.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: at least one token id.
        seeds: one 63-bit seed per completion. A token's random number depends on (seed, position in the completion)
            alone, so a completion does not depend on what else is in the batch, nor on a restart.
        sampling: how to sample.
        holds_weights: finish all completions under the version that sampled their first token: a weight update
            waits for them (evaluation), whatever its mode.
        is_turn: a later prompt may begin with this one and its completion; an engine that can keeps what it computed.
        prefixes: tokens that each completion has already, or None; empty if none has. They count towards
            ``max_new_tokens``, and a token's random number goes by its position behind them.
        resume: which of them may be kept under the version that serves when the sample joins the batch; the others
            are sampled afresh.
        images: of the prompt, in order.
        adapter: that is added to the weights; None: nothing is. For an engine that ``AddsAdapters`` alone.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParameters
    holds_weights: bool = False
    is_turn: bool = False
    prefixes: tuple[Prefix | None, ...] = ()
    resume: ResumeRule = UNMIXED
    images: tuple[PromptImage, ...] = ()
    adapter: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What one sample produced.

    Attributes:
        token_ids: [N] int32, sampled tokens, the stop token included.
        log_probs: [N] float32 nats, under the version that sampled the token.
        versions: run-length ``(start, version)`` over the N sampled tokens.
        finish_reason: stop, length or aborted; an aborted completion holds the tokens it had.
        num_resumed: leading tokens that came with the request.
        experts: of all tokens but the last, the prompt's included; None where the engine records none. A token keeps
            those that were chosen when the one behind it was sampled, whatever was computed again later.
    """

    token_ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    num_resumed: int = 0
    experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of how busy an engine is.

    Attributes:
        version: the policy version that samples now.
        running: completions in the batch.
        waiting: completions accepted and not yet in the batch.
        slots: completions that the batch can hold.
        generated_tokens: sampled since start.
        prefilled_tokens: prompt tokens computed since start, re-prefills included.
        reused_tokens: prompt tokens that were not computed, since those of an earlier turn were kept.
        reuses: prompts that began with such tokens.
        cpu_seconds: of processor time that its process took since start, on all cores; 0 where it is not known.
        takes_adapters: whether it ``AddsAdapters`` to the model that it has.
        sharers: experiments that have their samples in one batch of it; 0: it is one experiment's own.
    """

    version: int
    running: int
    waiting: int
    slots: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int = 0
    reuses: int = 0
    cpu_seconds: float = 0.0
    takes_adapters: bool = False
    sharers: int = 0


class WeightTransfer(Protocol):
    """One image on its way to an engine. No call waits or fails, and none has an effect after the first end.

    It ends whole and right, or not at all; only ``Engine.load_weights`` makes it serve.
    """

    def advance(self, bytes_arrived: int) -> None:
        """Note that the first bytes of the image are there, not verified yet."""

    def complete(self) -> None:
        """Note that the image is whole and right: it will be loaded unless something happens."""

    def abort(self, reason: str) -> None:
        """Note that the image will not be whole, or is wrong: what was read of it is thrown away."""


class GroupBroken(Exception):
    """A weight group was not formed, or has lost a member; this one may join the next."""


@runtime_checkable
class GroupMember(Protocol):
    """An engine whose own ranks are members of a weight group, beside what ``Engine`` has.

    Nothing is sampled from ``join`` until ``serve``, ``give_up`` or ``load_weights``; one call at a time.
    """

    @property
    def received(self) -> int | None:
        """The version of which it has all weights, and which it does not serve yet."""

    @property
    def is_paused(self) -> bool:
        """Whether it samples nothing, since it has joined."""

    async def join(self, order: PublicationOrder, on_update: OnWeightUpdate) -> None:
        """Wait for running samples as the mode has it, stop sampling, and join the order's epoch with all ranks.

        One that is a member of it already only stops sampling.

        Raises:
            WeightTransferFailed: the order's tensors or ranks are not the engine's.
            GroupBroken: the group was not formed.
            WorkerDied: the engine's process ended, or is stuck.
        """

    async def receive(self, order: PublicationOrder) -> None:
        """Receive all tensors that the sender broadcasts; between the first and the last the weights are undefined.

        Raises:
            GroupBroken: a member is lost; it can join another epoch.
            WeightTransferFailed: the engine did not take them.
            WorkerDied: the engine's process ended, or is stuck.
        """

    async def serve(self) -> None:
        """Sample under what was received."""

    async def give_up(self) -> bool:
        """Leave out what was not received whole, or is not to be served.

        Returns:
            Whether it samples again as before; else its weights are lost, and ``load_weights`` or ``wake`` is next.
        """


@runtime_checkable
class DiscardsWeights(Protocol):
    """An engine that can read new weights over those that it has, beside what ``Engine`` has."""

    async def discard_weights(self) -> None:
        """Give the weights up, and keep their memory: the next ones, a transfer's as well, may be read into it.

        What is in flight ends as aborted, an update that waits with ``Unavailable``. Until weights are there again
        (``wake``, or ``load_weights``) ``generate`` raises ``Unavailable``.

        Raises:
            WorkerDied: the engine's process ended.
            DeadlineExceeded: the engine does not answer.
        """


@runtime_checkable
class AddsAdapters(Protocol):
    """An engine that may sample several adapters of its weights in one batch, beside what ``Engine`` has.

    Whether it does so with its model, ``EngineLoad.takes_adapters`` tells. New weights forget all adapters, and wait
    until no request in flight has one.
    """

    async def load_adapter(
        self,
        name: str,
        file: Path | None,
        scale: float,
        version: int,
        on_update: OnWeightUpdate = OnWeightUpdate.CONTINUE,
    ) -> None:
        """Let requests have an adapter from now on.

        Where there is one of the name it takes its place between two tokens, also for samples in flight. Requests that
        hold their weights end before, and samples of other adapters do not notice.

        Args:
            name: by which requests name it.
            file: with A [r, in] and B [out, r] under peft's names; it may change or vanish as soon as this returns.
                None: of one that adds nothing.
            scale: factor of B A.
            version: of the tokens that are sampled with it.
            on_update: what happens to samples in flight with the one before, as of ``Engine.load_weights``.

        Raises:
            WeightTransferFailed: it cannot be read, or does not fit the model; what was there stays.
            Unavailable: the engine has no weights now.
        """

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter; nothing happens where there is none of the name.

        Raises:
            InvalidRequest: a request in flight has it.
        """


@runtime_checkable
class ProfilesSteps(Protocol):
    """An engine that can record its own operations, beside what ``Engine`` has."""

    def profile(self, directory: Path, versions: frozenset[int], num_steps: int, service_id: str) -> None:
        """Record its next steps under each of some versions, once; takes the place of what was asked for before.

        Args:
            directory: where a Chrome trace of each is written.
            versions: policy versions.
            num_steps: steps that a trace has, fewer where the version ends before.
            service_id: of the rollout, in the traces' names.

        Raises:
            WorkerDied: the engine's process ended.
        """


@runtime_checkable
class ProvesWeights(Protocol):
    """An engine that can prove what it serves from its own memory, in addition to ``Engine``."""

    async def load_proved(self, image: Path, version: int, on_update: OnWeightUpdate, digest: str) -> bool:
        """Do what ``Engine.load_weights`` does, and sample nothing before the weights are found to be the right ones.

        Args:
            image, version, on_update: as of ``load_weights``.
            digest: of what was published, in the engine's type; see ``flotilla.shared.weights.image.digests``.

        Returns:
            Whether they were read back; False where this engine, as it runs, cannot.

        Raises:
            WeightsDiverged: something else serves. The engine has no weights now: ``load_weights`` or ``wake`` is next.
            WeightTransferFailed: as of ``load_weights``.
        """


class Engine(Protocol):
    """Samples completions under versioned weights."""

    @property
    def capabilities(self) -> frozenset[EngineCapability]:
        """What it promises beyond this protocol, which a spec may require.

        Without ``SEEDED_SAMPLING`` the values of seeds mean nothing; without ``EXACT_SPANS`` a run of versions that
        begins under ``continue`` may begin one token early.
        """

    async def start(self) -> None:
        """Load the initial weights; returns when the engine can generate.

        Raises:
            ModelError: the model cannot be loaded.
            WorkerDied: the engine's process ended meanwhile.
            Unavailable: it is an external server, and cannot be reached now.
        """

    async def close(self) -> None:
        """Abort what is in flight and free everything; may be called more than once."""

    async def generate(self, request: GenerationRequest) -> Sequence[Completion]:
        """Sample one completion per seed; returns when the last one is finished.

        Raises:
            InvalidRequest: a field is not allowed.
            PromptTooLong: the prompt and ``max_new_tokens`` do not fit the engine's context.
            RequestInFlight: a request with this id is being sampled.
            WorkerDied: the engine's process ended.
        """

    async def abort(self, request_id: str) -> None:
        """End a request now: its ``generate`` returns what it has, as aborted. Unknown ids are ignored."""

    def begin_transfer(self, image: Path, version: int) -> WeightTransfer:
        """Announce an image that is being received, or is there already, and may be loaded as ``version``.

        An engine that overlaps loading with sampling reads it as far as it has arrived. What serves does not change.
        Of several transfers the latest counts: what was read of an earlier one may be thrown away.

        Args:
            image: a file of the image's size; its bytes mean nothing beyond what the handle was advanced to.
            version: that it will be.

        Raises:
            WorkerDied: the engine's process ended.
        """

    async def load_weights(self, image: Path, version: int, on_update: OnWeightUpdate) -> None:
        """Replace the weights by a weight image (a safetensors file); returns when ``version`` serves.

        ``drain`` lets running samples finish under the old weights and holds new ones back; ``interrupt`` keeps the
        tokens of running samples and re-computes their prefix under the new weights; ``continue`` keeps their KV
        cache. The file may change or vanish as soon as this returns.

        Raises:
            WeightTransferFailed: names, shapes or dtypes do not fit the model; the old version keeps serving.
        """

    async def sleep(self) -> None:
        """Free weights and KV cache, so that others can have the device; an engine with ``SLEEP`` alone can.

        What is in flight ends as aborted, an update that waits with ``Unavailable``. Until weights are there again
        (``wake``, or ``load_weights``) ``generate`` raises ``Unavailable``, and transfers are not read.
        """

    async def wake(self) -> None:
        """Read the initial weights again; nothing happens while the engine has weights.

        Raises:
            WeightTransferFailed: the model's files are not what they were.
        """

    async def load(self) -> EngineLoad:
        """Take a snapshot of the load."""
