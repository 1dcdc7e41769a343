"""The embedded engine: continuous batching with versioned weights, synchronous, one step at a time.

Between two steps one version serves, whole. A step applies a weight update if nothing forbids it, admits waiting
samples, and gives every running sample one token. The engine knows nothing of threads, sockets or event loops.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from services.rollout.engines.admission import group_sizes, prefill_batches
from services.rollout.engines.base import Completion, EngineLoad, GenerationRequest
from services.rollout.engines.batch import ActiveRequest, Batch
from services.rollout.engines.checkpoint import read_eos_token_ids
from services.rollout.engines.loading import load_decoder
from services.rollout.engines.requests import check_request, empty_completion
from services.rollout.engines.sampling import RowSampling, sample
from services.rollout.engines.settings import EngineSettings
from services.rollout.engines.stop_text import StopText, TextDecoder, load_text_decoder
from shared.config.asynchrony import OnWeightUpdate
from shared.errors import FlotillaError, InvalidRequest, ModelError, WeightTransferFailed
from shared.schemas.trajectory import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A request has ended: one completion per seed."""

    request_id: str
    completions: Sequence[Completion]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationFailed:
    """A request has failed."""

    request_id: str
    error: FlotillaError


@dataclass(frozen=True, slots=True, eq=False)
class Updated:
    """A weight update was applied, or was refused with ``error``."""

    update_id: int
    error: FlotillaError | None


Outcome = Generated | GenerationFailed | Updated


@dataclass(slots=True, eq=False)
class _Update:
    update_id: int
    image: Path
    version: int
    mode: OnWeightUpdate
    is_staged: bool = False


class TorchEngine:
    """Samples completions under versioned weights; call ``step`` until ``is_idle``.

    Args:
        settings: the model and the sizes.

    Raises:
        ModelError: the model cannot be loaded as the settings say.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._directory = Path(settings.model_path)
        self._device = torch.device(settings.device)
        loaded = load_decoder(settings)
        self._decoder = loaded.decoder
        self._eos_token_ids = read_eos_token_ids(self._directory, loaded.config)
        self.context_tokens = min(settings.context_tokens, self._decoder.max_positions)
        """The longest prompt and completion together."""
        self.version = settings.version
        self._batch = Batch(settings.slots, self.context_tokens, self._decoder.vocab_size, self._device)
        self._requests: dict[str, ActiveRequest] = {}
        self._waiting: list[ActiveRequest] = []
        self._updates: list[_Update] = []
        self._outcomes: list[Outcome] = []
        self._text_decoder: TextDecoder | None = None
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        facts = {"decoder": self._decoder.description, "context_tokens": self.context_tokens, "slots": settings.slots}
        log.info("engine loaded", extra={**facts, "dtype": settings.dtype, "device": settings.device})

    @property
    def is_idle(self) -> bool:
        """Tell whether ``step`` has nothing to do."""
        return not (self._requests or self._updates or self._outcomes)

    def load(self) -> EngineLoad:
        """Take a snapshot of the load."""
        return EngineLoad(
            version=self.version,
            running=self._batch.num_running,
            waiting=sum(active.num_waiting for active in self._waiting),
            slots=self._settings.slots,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prefilled_tokens,
        )

    def submit(self, request: GenerationRequest) -> None:
        """Accept a request; its outcome comes from a later ``step``.

        Raises:
            InvalidRequest: it does not fit the engine or the model.
        """
        check_request(request, self.context_tokens, self._decoder.vocab_size)
        if request.request_id in self._requests:
            raise InvalidRequest(f"request {request.request_id} is in flight already")
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
        if active is None:
            return
        self._take_out(active)
        missing = [empty_completion() if done is None else done for done in active.completions]
        self._finish(active, Generated(request_id, missing))

    def abort_all(self) -> None:
        """End every request now, with what it has, and forget the updates that wait."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._updates.clear()

    def request_update(self, update_id: int, image: Path, version: int, mode: OnWeightUpdate) -> None:
        """Ask for a weight update; it is applied by a later ``step``, in the order of asking."""
        self._updates.append(_Update(update_id, image, version, mode))

    def cancel_update(self, update_id: int) -> None:
        """Forget an update that has not been applied."""
        self._updates = [update for update in self._updates if update.update_id != update_id]

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Apply updates, admit samples, and sample one token for each running one."""
        self._advance_updates()
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
        while self._updates:
            update = self._updates[0]
            if not update.is_staged:
                try:
                    self._decoder.stage(update.image)
                except WeightTransferFailed as error:
                    self._outcomes.append(Updated(update.update_id, error))
                    self._updates.pop(0)
                    continue
                update.is_staged = True
            if self._is_held_back(update):
                return
            self._apply(update)
            self._updates.pop(0)
            self._outcomes.append(Updated(update.update_id, None))

    def _is_held_back(self, update: _Update) -> bool:
        if update.mode is OnWeightUpdate.DRAIN and self._batch.num_running:
            return True
        return any(active.request.holds_weights and active.admitted for active in self._requests.values())

    def _apply(self, update: _Update) -> None:
        self._decoder.switch()
        self.version = update.version
        self._batch.tag(update.version)
        if update.mode is OnWeightUpdate.INTERRUPT and self._batch.num_running:
            self._prefill_again()
        log.info("weights updated", extra={"version": update.version, "mode": update.mode.value})

    def _prefill_again(self) -> None:
        """Compute the cache of every running sample under the weights that serve now."""
        rows = [int(row) for row in self._batch.alive()]
        self._prefill([self._batch.cached_tokens(row) for row in rows], [[row] for row in rows])

    def _prefill(self, sequences: Sequence[npt.NDArray[np.int64]], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute sequences in batches of similar length: [len(sequences), V] logits after the last tokens."""
        logits: torch.Tensor | None = None
        lengths = [sequence.shape[0] for sequence in sequences]
        for batch in prefill_batches(lengths, self._settings.prefill_tokens):
            part = self._decoder.prefill([sequences[i] for i in batch], [rows[i] for i in batch])
            if logits is None:
                logits = part.new_empty((len(sequences), part.shape[1]))
            logits[batch] = part
        self._prefilled_tokens += sum(lengths)
        assert logits is not None
        return logits

    def _admissible(self) -> list[ActiveRequest]:
        """List the waiting requests that may join, oldest first, given the update that waits."""
        if not self._updates:
            return self._waiting
        drains = self._updates[0].mode is OnWeightUpdate.DRAIN
        return [active for active in self._waiting if (active.admitted if active.request.holds_weights else not drains)]

    def _admit(self) -> None:
        candidates = self._admissible()
        if not candidates:
            return
        slots = self._settings.slots
        free = slots - self._batch.num_running
        sizes = group_sizes([active.num_waiting for active in candidates], free, slots)
        if not sizes:
            return
        joining = candidates[: len(sizes)]
        places = iter(self._batch.free_rows(sum(sizes)))
        rows = [[next(places) for _ in range(size)] for size in sizes]
        prompts = [np.array(active.request.prompt_ids, dtype=np.int64) for active in joining]
        logits = self._prefill(prompts, rows)
        for active, group in zip(joining, rows, strict=True):
            for row in group:
                self._batch.join(row, active, active.admitted, self.version)
                active.admitted += 1
        self._waiting = [active for active in self._waiting if active.num_waiting]
        flat = [row for group in rows for row in group]
        origins = torch.tensor([i for i, group in enumerate(rows) for _ in group], device=self._device)
        self._sample(logits[origins], np.array(flat), self._batch.sampling_of(flat))

    def _decode(self) -> None:
        batch = self._batch
        self._compact()
        num = batch.num_rows
        lengths = batch.lengths[:num]
        token_ids = torch.from_numpy(batch.last_tokens[:num]).to(self._device)
        logits = self._decoder.decode(token_ids, torch.from_numpy(lengths).to(self._device), int(lengths.max()))
        lengths += batch.counts[:num] > 0
        self._sample(logits, slice(0, num), batch.sampling())

    def _compact(self) -> None:
        """Move samples together once an eighth of the rows is empty; fewer cost less than the copies."""
        batch = self._batch
        if (batch.num_rows - batch.num_running) * 8 > batch.num_rows:
            sources, targets = batch.compaction()
            if sources:
                self._decoder.move_rows(sources, targets, int(batch.lengths.max()))
                batch.move(sources, targets)

    def _sample(self, logits: torch.Tensor, rows: npt.NDArray[np.int64] | slice, how: RowSampling) -> None:
        batch = self._batch
        draws = torch.from_numpy(batch.draws(rows)).to(self._device)
        token_ids, log_probs = sample(logits, draws, how)
        before = int(batch.counts.sum())
        values = log_probs.cpu().numpy()
        ended = batch.record(rows, token_ids.cpu().numpy(), values)
        self._generated_tokens += int(batch.counts.sum()) - before
        if not np.isfinite(values).all():
            self._fail_broken_rows()
            ended = [row for row in ended if batch.samples[row] is not None]
        for row in ended:
            sample_ = batch.leave(row, batch.completed(row))
            if sample_.owner.is_finished:
                done = [completion for completion in sample_.owner.completions if completion is not None]
                self._finish(sample_.owner, Generated(sample_.owner.request.request_id, done))

    def _fail_broken_rows(self) -> None:
        """Fail the requests whose logits are not finite: such weights sample nothing meaningful."""
        for row in self._batch.alive():
            sample_ = self._batch.samples[row]
            if sample_ is None or self._batch.has_finite_log_prob(row):
                continue
            self._take_out(sample_.owner)
            error = ModelError(f"logits are not finite under policy version {self.version}", version=self.version)
            self._finish(sample_.owner, GenerationFailed(sample_.owner.request.request_id, error))

    def _take_out(self, active: ActiveRequest) -> None:
        for row in self._batch.alive():
            held = self._batch.samples[row]
            if held is not None and held.owner is active:
                self._batch.leave(int(row), FinishReason.ABORTED)
        if active in self._waiting:
            self._waiting.remove(active)

    def _finish(self, active: ActiveRequest, outcome: Generated | GenerationFailed) -> None:
        del self._requests[active.request.request_id]
        self._outcomes.append(outcome)


def use_threads(num: int) -> None:
    """Set how many threads torch computes with, in this process."""
    torch.set_num_threads(num)
