"""The embedded engine: continuous batching with versioned weights, synchronous, one step at a time.

Between two steps one version serves, whole. A step applies a weight update if nothing forbids it, admits waiting
samples, and gives every running sample one token. The engine knows nothing of threads, sockets or event loops.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.rollout.engines.admission import group_sizes, prefill_batches
from flotilla.services.rollout.engines.base import EngineLoad, GenerationRequest
from flotilla.services.rollout.engines.decoders.arrival import Arrival
from flotilla.services.rollout.engines.decoders.base import IllustratedDecoder, KeptRow, RoutedDecoder, check_images
from flotilla.services.rollout.engines.decoders.checkpoint import read_eos_token_ids
from flotilla.services.rollout.engines.decoders.host_arrays import on_device
from flotilla.services.rollout.engines.embedded.batch import ActiveRequest, Batch, Rows, Start, cached, merged
from flotilla.services.rollout.engines.embedded.loading import load_decoder
from flotilla.services.rollout.engines.embedded.outcomes import Generated, GenerationFailed, Outcome, Updated
from flotilla.services.rollout.engines.embedded.prefix_cache import KeptTurns, names_of
from flotilla.services.rollout.engines.embedded.sampling import Flight, RowSampling, sample
from flotilla.services.rollout.engines.embedded.updates import Update, UpdateQueue
from flotilla.services.rollout.engines.requests import check_request, unstarted_completion
from flotilla.services.rollout.engines.settings import EngineSettings
from flotilla.services.rollout.engines.stop_text import StopText, TextDecoder, load_text_decoder
from flotilla.shared.config.sections.asynchrony import OnWeightUpdate
from flotilla.shared.errors import FlotillaError, ModelError, RequestInFlight, Unavailable, WeightsDiverged
from flotilla.shared.host.own_memory import return_freed_memory
from flotilla.shared.schemas.trajectory import FinishReason

log = logging.getLogger(__name__)


class TorchEngine:
    """Samples completions under versioned weights; call ``step`` until ``is_idle``.

    Args:
        settings: the model and the sizes; ``threads`` is the affair of the process, see ``use_threads``.
        goes_ahead: launch a step before the host has read what the one before sampled; None: on a GPU. What is sampled
            is the same; a sample that ends by a token takes part in one step more, whose result is not used.

    Raises:
        ModelError: the model cannot be loaded as the settings say.
    """

    def __init__(self, settings: EngineSettings, *, goes_ahead: bool | None = None) -> None:
        self._settings = settings
        self._directory = Path(settings.model_path)
        self._device = torch.device(settings.device)
        self._goes_ahead = self._device.type == "cuda" if goes_ahead is None else goes_ahead
        self._flight: Flight | None = None
        loaded = load_decoder(settings)
        self._decoder, self._scorer = loaded.decoder, loaded.scorer
        self._is_padded = settings.batch_invariant and not self._decoder.is_batch_invariant
        """Whether every step is computed in the shapes of a full batch, so that bits do not depend on the batch."""
        self._eos_token_ids = read_eos_token_ids(self._directory, loaded.config)
        self.context_tokens = min(settings.context_tokens, self._decoder.max_positions)
        """The longest prompt and completion together."""
        self.version = settings.version
        routing = self._decoder.routing if isinstance(self._decoder, RoutedDecoder) else None
        self._batch = Batch(settings.slots, self.context_tokens, self._decoder.vocab_size, self._device, routing)
        self._requests: dict[str, ActiveRequest] = {}
        self._waiting: list[ActiveRequest] = []
        self._updates = UpdateQueue(self._decoder, overlap=settings.overlap_load)
        self._adapters = self._updates.adapters
        self._outcomes: list[Outcome] = []
        self._text_decoder: TextDecoder | None = None
        self._generated_tokens = 0
        # A beginning that was computed in other shapes may differ in its last bits.
        self._turns = KeptTurns(self._decoder, 0 if self._is_padded else settings.prefix_cache_mb * 10**6)
        self._is_asleep, self._has_weights = False, True
        facts = {"decoder": self._decoder.description, "context_tokens": self.context_tokens, "slots": settings.slots}
        log.info("engine loaded", extra={**facts, "dtype": settings.dtype, "device": settings.device})

    @property
    def is_idle(self) -> bool:
        """Return whether ``step`` has nothing to do."""
        return not (self._requests or self._updates or self._outcomes)

    @property
    def gains_by_threads(self) -> bool:
        """Whether several threads make a step of all slots faster, and change no bit of it."""
        return self._decoder.gains_by_threads

    @property
    def description(self) -> str:
        """How the model is computed, for people."""
        return self._decoder.description

    def load(self, adapter: str | None = None) -> EngineLoad:
        """Take a snapshot of the load, or of the part of it that one adapter's requests make."""
        whole = EngineLoad(
            version=self.version,
            running=self._batch.num_running,
            waiting=sum(active.num_waiting for active in self._waiting),
            slots=self._settings.slots,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._adapters.shares.prefilled.total(),
            reused_tokens=self._turns.reused_tokens,
            reuses=self._turns.reuses,
            cpu_seconds=time.process_time(),
            takes_adapters=self._adapters.are_taken,
        )
        if adapter is None:
            return whole
        return self._adapters.part_of(whole, adapter, self._active_with(adapter), self._batch)

    def _active_with(self, adapter: str) -> list[ActiveRequest]:
        return [active for active in self._requests.values() if active.request.adapter == adapter]

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request; its outcome comes from a later ``step``.

        Raises:
            InvalidRequest: it does not fit the engine or the model.
            PromptTooLong: it does not fit the context.
            RequestInFlight: its id is in use.
            Unavailable: it is asleep, or its weights were discarded.
        """
        if not self._has_weights:
            raise Unavailable("the engine is asleep" if self._is_asleep else "the engine has no weights yet")
        check_request(request, self.context_tokens, self._decoder.vocab_size)
        if request.images:
            check_images(self._decoder, request.images)
        self._adapters.check(request)
        if request.request_id in self._requests:
            raise RequestInFlight(f"request {request.request_id} is in flight already")
        sampling = request.sampling
        eos = () if sampling.ignore_eos else self._eos_token_ids
        stop_text = StopText(self._tokens_to_text(), sampling.stop) if sampling.stop else None
        active = ActiveRequest(request, tuple({*eos, *sampling.stop_token_ids}), stop_text)
        active.completions = [None] * len(request.seeds)
        self._requests[request.request_id] = active
        self._waiting.append(active)

    def abort(self, request_id: str) -> None:
        """End a request now, with what it has; unknown ids are ignored."""
        active = self._requests.get(request_id)
        if active is not None:
            self._take_out(active)
            completions = enumerate(active.completions)
            ended = [unstarted_completion(active.request, i) if each is None else each for i, each in completions]
            self._outcomes.append(Generated(request_id, ended))

    def abort_all(self) -> None:
        """End every request now, with what it has, and forget the updates that wait."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._updates.clear()

    def request_update(
        self, update_id: int, image: Path, version: int, mode: OnWeightUpdate, digest: str | None = None
    ) -> None:
        """Ask for a weight update; it is applied by a later ``step``, in the order of asking.

        With the publisher's digest nothing is sampled before the weights in memory are found to be those.
        """
        self._updates.add(Update(update_id, image, version, mode, digest))

    def request_adapter(
        self, update_id: int, name: str, file: Path | None, scale: float, version: int, mode: OnWeightUpdate
    ) -> None:
        """Ask for an adapter; a later ``step`` loads it, once its own samples in flight let it."""
        self._adapters.ask(update_id, name, file, scale, version, mode)

    def load_adapter(self, name: str, file: Path | None, scale: float, version: int) -> None:
        """Let samples have an adapter at once; they keep their KV cache. Errors are those of ``EngineAdapters.load``.

        Raises:
            Unavailable: the engine has no weights.
        """
        if not self._has_weights:
            raise Unavailable("the engine has no weights that an adapter could be added to")
        self._land()
        self._adapters.load(name, file, scale, version)
        self._batch.tag(version, name)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; see ``AddsAdapters.drop_adapter``.

        Raises:
            InvalidRequest: a request in flight has it.
        """
        requests = (active.request for active in self._requests.values())
        self._adapters.drop(name, requests, self._batch)

    def begin_transfer(self, arrival: Arrival) -> None:
        """Read an image while it is received, where loading overlaps with sampling."""
        if not self._is_asleep:
            self._updates.begin(arrival)

    def complete_transfer(self, arrival: Arrival) -> None:
        """Read an image that is whole now, ahead of the update that will ask for it, unless that is done already."""
        if not self._is_asleep:
            self._updates.complete(arrival)

    def sleep(self) -> None:
        """Free weights and cache; see ``Engine.sleep``. What is ended by it comes from the next ``step``."""
        if self._is_asleep:
            return
        self._end_all("the engine was put to sleep")
        self._decoder.release()
        self._is_asleep, self._has_weights = True, False
        self._return_memory()
        log.info("engine sleeps", extra={"version": self.version})

    def discard_weights(self) -> None:
        """Give the weights up; see ``DiscardsWeights``. What is ended by it comes from the next ``step``."""
        if self._has_weights:
            self._end_all("the engine's weights were discarded")
            self._decoder.discard()
            self._has_weights = False

    def _end_all(self, why: str) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        self._outcomes += self._updates.forget(Unavailable(why))
        self._flight = None
        self._turns.clear()
        self._adapters.clear()

    def wake(self) -> None:
        """Read the initial weights, if it has none.

        Raises:
            WeightTransferFailed: the model's files are not what they were.
        """
        if not self._has_weights:
            self._updates.forget_read()
            self._decoder.restore()
            self._has_new_weights(self._settings.version)

    def _has_new_weights(self, version: int) -> None:
        slept, self._is_asleep, self._has_weights = self._is_asleep, False, True
        self.version = version
        if slept:
            self._return_memory()
            log.info("engine is awake", extra={"version": version})

    def _return_memory(self) -> None:
        return_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def cancel_update(self, update_id: int) -> None:
        """Forget an update that has not been applied."""
        self._updates.cancel(update_id)

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Apply updates, admit samples, and sample one token for each running one."""
        if self._updates or self._waiting:
            self._land()
        if self._adapters.waiting:
            self._advance_adapters()
        if self._updates:
            self._advance_updates()
        if self._waiting:
            self._admit()
        if self._batch.num_rows:
            self._decode()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _tokens_to_text(self) -> TextDecoder:
        if self._text_decoder is None:
            self._text_decoder = load_text_decoder(self._directory)
        return self._text_decoder

    def _advance_updates(self) -> None:
        while True:
            is_busy = self._batch.num_running or self._admissible()
            update, refused = self._updates.stage_first(may_wait=not is_busy)
            self._outcomes += refused
            if update is None or self._is_held_back(update):
                return
            try:
                self._updates.apply_first()
            except WeightsDiverged as error:
                self._has_diverged(update, error)
                return
            self._turns.clear()
            self._has_new_weights(update.version)
            self._batch.tag(update.version)
            if update.mode is OnWeightUpdate.INTERRUPT and self._batch.num_running:
                self._compute_again(self._batch.alive(), update.version)
            self._outcomes.append(Updated(update.update_id, None))
            log.info("weights updated", extra={"version": update.version, "on_update": update.mode.value})

    def _advance_adapters(self) -> None:
        for update in self._adapters.take_due(self._requests.values()):
            try:
                self.load_adapter(update.name, update.file, update.scale, update.version)
            except FlotillaError as error:
                self._outcomes.append(Updated(update.update_id, error))
                continue
            rows = [self._batch.rows_of(active) for active in self._active_with(update.name) if active.is_running]
            if update.mode is OnWeightUpdate.INTERRUPT and rows:
                self._compute_again(np.concatenate(rows), update.version)
            self._outcomes.append(Updated(update.update_id, None))

    def _compute_again(self, rows: Rows, version: int) -> None:
        """Compute what rows have cached, under a version that has begun to serve."""
        self._prefill(cached(self._batch, rows))
        self._batch.kv_versions[rows] = version

    def _has_diverged(self, update: Update, error: WeightsDiverged) -> None:
        """Discard the weights in place: they are not what was published, and nothing was sampled with them."""
        log.warning("weights are not served", extra={"version": update.version, "error": error.detail})
        self.discard_weights()
        self._outcomes.append(Updated(update.update_id, error))

    def _is_held_back(self, update: Update) -> bool:
        if update.mode is OnWeightUpdate.DRAIN and self._batch.num_running:
            return True
        return any(
            active.request.adapter is not None or (active.request.holds_weights and active.admitted)
            for active in self._requests.values()
        )

    def _prefill(self, starts: Sequence[Start], kept: Sequence[tuple[KeptRow, int] | None] = ()) -> Tensor:
        """Compute sequences in batches of similar length: [len(starts), V] logits after the last tokens."""
        kept = kept or [None] * len(starts)
        new = [start.tokens.size - (had[1] if had else 0) for start, had in zip(starts, kept, strict=True)]
        for start, num in zip(starts, new, strict=True):
            self._adapters.shares.prefilled[start.adapter] += num
        if self._is_padded:
            batches = [[index] for index in range(len(starts))]
        else:
            batches = prefill_batches(new, self._settings.prefill_tokens)
        parts = [self._prefill_batch([starts[i] for i in b], [kept[i] for i in b]) for b in batches]
        order = torch.tensor([index for batch in batches for index in batch], device=self._device)
        return torch.cat(parts)[order.argsort()]

    def _prefill_batch(self, starts: Sequence[Start], kept: Sequence[tuple[KeptRow, int] | None]) -> Tensor:
        sequences, rows = [start.tokens for start in starts], [start.rows.tolist() for start in starts]
        if any(start.images for start in starts):
            assert isinstance(self._decoder, IllustratedDecoder)
            return self._decoder.prefill_illustrated(sequences, rows, [start.images for start in starts], kept)
        logits = self._decoder.prefill(sequences, rows, kept)
        if (routed := self._routed()) is not None and self._batch.experts is not None:
            lengths = [sequence.shape[0] for sequence in sequences]
            self._batch.experts.prefilled(lengths, [start.rows for start in starts], routed.cpu().numpy())
        return logits

    def _routed(self) -> Tensor | None:
        return self._decoder.routed() if isinstance(self._decoder, RoutedDecoder) else None

    def _admissible(self) -> list[ActiveRequest]:
        """List the waiting requests that may join, oldest first, given the update that waits."""
        update = self._updates.first
        waiting = [active for active in self._waiting if self._adapters.may_join(active)]
        if update is None:
            return waiting
        drains = update.mode is OnWeightUpdate.DRAIN
        return [
            a
            for a in waiting
            if a.request.adapter is not None or (a.admitted if a.request.holds_weights else not drains)
        ]

    def _admit(self) -> None:
        batch, slots = self._batch, self._settings.slots
        candidates = self._admissible()
        sizes = group_sizes([active.num_waiting for active in candidates], slots - batch.num_running, slots)
        if not sizes:
            return
        rows = np.split(batch.free_rows(sum(sizes)), np.cumsum(sizes)[:-1])
        joining = candidates[: len(sizes)]
        starts: list[Start] = []
        for active, group in zip(joining, rows, strict=True):
            version = self._adapters.version_of(active.request.adapter, self.version)
            starts += active.starts(group, version)
            self._adapters.assign(group, active.request)
            batch.join(group, active, version)
        starts = merged(starts)
        kept = [None if each.adapter else self._turns.kept_of(names_of(each.tokens, each.images)) for each in starts]
        logits = self._prefill(starts, kept)
        self._waiting = [active for active in self._waiting if active.num_waiting]
        flat = np.concatenate([start.rows for start in starts])
        places = np.repeat(np.arange(len(starts)), [start.rows.size for start in starts])
        origins = torch.from_numpy(places).to(self._device)
        self._sample(logits[origins], flat, batch.draws(flat), batch.sampling_of(flat))

    def _decode(self) -> None:
        batch = self._batch
        if self._flight is not None and (batch.some_end_for_certain() or batch.needs_last_tokens):
            self._land()
        before = self._flight
        if before is None:
            if not batch.num_rows:
                return
            self._compact()
        # A matrix product of another number of rows may add in another order.
        num_rows = self._settings.slots if self._is_padded else batch.num_rows
        lengths = batch.lengths[:num_rows]
        token_ids = on_device(batch.last_tokens[:num_rows], self._device)
        if before is not None:
            sampled = min(before.token_ids.shape[0], num_rows)
            token_ids[:sampled] = before.token_ids[:sampled]
        logits = self._decoder.decode(token_ids, torch.from_numpy(lengths), int(lengths.max()))
        routed = self._routed()
        # Rows without a sample stay empty: what was computed for them lies at position 0 and is never read.
        lengths += lengths > 0
        draws = batch.step_draws(unread=int(before is not None))
        token_ids, log_probs = self._sampled(logits[: batch.num_rows], draws, batch.sampling())
        flight = Flight(token_ids, log_probs, None if routed is None else routed[: batch.num_rows])
        self._land()
        self._flight = flight
        if not self._goes_ahead:
            self._land()

    def _compact(self) -> None:
        """Move samples together once an eighth of the rows is empty; fewer cost less than the copies."""
        batch = self._batch
        if (batch.num_rows - batch.num_running) * 8 > batch.num_rows:
            sources, targets = batch.compaction()
            if sources.size:
                self._decoder.move_rows(sources.tolist(), targets.tolist(), int(batch.lengths.max()))
                batch.move(sources, targets)

    def _sample(self, logits: Tensor, rows: Rows, draws: npt.NDArray[np.float64], how: RowSampling) -> None:
        """Sample the first tokens of rows that join."""
        token_ids, log_probs, _ = Flight(*self._sampled(logits, draws, how)).land()
        self._record(rows, token_ids, log_probs)

    def _sampled(self, logits: Tensor, draws: npt.NDArray[np.float64], how: RowSampling) -> tuple[Tensor, Tensor]:
        return sample(logits, on_device(draws, self._device), how)

    def _land(self) -> None:
        """Record what the last step sampled, if that is not done."""
        flight, self._flight = self._flight, None
        if flight is not None:
            token_ids, log_probs, chosen = flight.land()
            self._record(np.arange(token_ids.shape[0]), token_ids, log_probs, chosen)

    def _record(
        self,
        rows: Rows,
        token_ids: npt.NDArray[np.int64],
        values: npt.NDArray[np.float32],
        chosen: npt.NDArray[np.int16] | None = None,
    ) -> None:
        batch = self._batch
        self._generated_tokens += min(rows.size, batch.num_running)
        ended = batch.record(rows, token_ids, values, chosen)
        if not np.isfinite(values).all():
            self._fail_broken()
            ended = ended[[batch.samples[row] is not None for row in ended]]
        if ended.size:
            self._turns.keep(batch, ended, self.version)
            for active in batch.leave_finished(ended):
                done = [completion for completion in active.completions if completion is not None]
                del self._requests[active.request.request_id]
                # What is sampled to be judged, and not to be trained, keeps the log-probabilities of its own sampling.
                if self._scorer is not None and not active.request.holds_weights:
                    done = [self._scorer.rescored(active.request, each) for each in done]
                self._outcomes.append(Generated(active.request.request_id, done))

    def _fail_broken(self) -> None:
        """Fail the requests whose logits are not finite: such weights sample nothing meaningful."""
        for active in self._batch.broken():
            self._take_out(active)
            version = self._adapters.version_of(active.request.adapter, self.version)
            error = ModelError(f"logits are not finite under policy version {version}", version=version)
            self._outcomes.append(GenerationFailed(active.request.request_id, error))
        # Not only theirs: rows without a sample were computed along.
        self._decoder.clear_rows(self._batch.free_rows(self._settings.slots).tolist())

    def _take_out(self, active: ActiveRequest) -> None:
        """Forget a request; its unfinished completions end as aborted."""
        rows = self._batch.rows_of(active)
        self._batch.leave(rows, [FinishReason.ABORTED] * rows.size)
        del self._requests[active.request.request_id]
        if active in self._waiting:
            self._waiting.remove(active)


def use_threads(num: int) -> None:
    """Set how many threads torch computes with, in this process."""
    torch.set_num_threads(num)
