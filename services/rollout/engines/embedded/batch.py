"""The running batch: which sample is in which row, and what each has sampled.

State is kept in arrays over rows, so that one step costs a few array operations whatever the number of rows; Python
touches a sample only when it joins, finishes or checks stop strings. A row without a sample is computed along with the
others and ignored.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flotilla.services.rollout.engines.base import Completion, GenerationRequest, Prefix, PromptImage
from flotilla.services.rollout.engines.embedded.row_experts import Chosen, RowExperts
from flotilla.services.rollout.engines.embedded.sampling import History, RowPenalties, RowSampling, seed_keys, uniforms
from flotilla.services.rollout.engines.stop_text import StopText
from flotilla.shared.schemas.routing import RoutingSizes
from flotilla.shared.schemas.trajectory import FinishReason

NO_TOKEN = -1
DRAWS_AHEAD = 16
NO_PENALTIES = (1.0, 0.0, 0.0)
"""Of repetition, presence, frequency."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What some rows begin with.

    Attributes:
        tokens: [T] int64.
        rows: [N] int64.
        images: among the tokens.
        adapter: that the rows have.
    """

    tokens: Rows
    rows: Rows
    images: tuple[PromptImage, ...] = ()
    adapter: str | None = None


def merged(starts: Sequence[Start]) -> list[Start]:
    """Join the rows of those that start with the same tokens, images and adapter, which are then computed once."""
    found: dict[tuple[bytes, tuple[PromptImage, ...], str | None], list[Start]] = {}
    for start in starts:
        found.setdefault((start.tokens.tobytes(), start.images, start.adapter), []).append(start)
    return [replace(same[0], rows=np.concatenate([each.rows for each in same])) for same in found.values()]


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that the engine has accepted.

    Attributes:
        request: what was asked.
        stop_ids: tokens that end its completions, the model's own included unless ignored.
        stop_text: its stop strings, or None.
        admitted: how many of its seeds have joined the batch.
        completions: one per seed, None while unfinished.
    """

    request: GenerationRequest
    stop_ids: tuple[int, ...]
    stop_text: StopText | None
    admitted: int = 0
    completions: list[Completion | None] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Count the seeds that have not joined the batch."""
        return len(self.request.seeds) - self.admitted

    def prefix_of(self, index: int, version: int) -> Prefix | None:
        """Return the tokens that a seed has already, if they may be kept under the version that serves."""
        prefix = self.request.prefixes[index] if self.request.prefixes else None
        return prefix if prefix is not None and self.request.resume.allows(prefix.versions, version) else None

    def starts(self, rows: Rows, version: int) -> list[Start]:
        """List what the next seeds begin with, and their rows: the prompt once, each kept prefix by itself."""
        images, adapter = self.request.images, self.request.adapter
        prompt = np.array(self.request.prompt_ids, dtype=np.int64)
        prefixes = [self.prefix_of(index, version) for index in range(self.admitted, self.admitted + rows.size)]
        fresh = np.array([prefix is None for prefix in prefixes])
        begun = [(prefix, rows[place : place + 1]) for place, prefix in enumerate(prefixes) if prefix is not None]
        resumed = [(np.concatenate([prompt, np.array(prefix.token_ids, dtype=np.int64)]), row) for prefix, row in begun]
        found = ([(prompt, rows[fresh])] if fresh.any() else []) + resumed
        return [Start(tokens, taken, images, adapter) for tokens, taken in found]

    @property
    def is_running(self) -> bool:
        """Return whether one of its samples is in the batch."""
        return any(completion is None for completion in self.completions[: self.admitted])

    @property
    def is_finished(self) -> bool:
        """Return whether every seed has its completion."""
        return all(completion is not None for completion in self.completions)


@dataclass(slots=True, eq=False)
class Sample:
    """One seed of a request, in a row.

    Attributes:
        runs: its run-length versions.
        resumed: leading tokens that it joined with.
    """

    owner: ActiveRequest
    index: int
    runs: list[tuple[int, int]]
    resumed: int = 0


class Batch:
    """Rows of samples, at most ``num_slots``.

    Args:
        num_slots: the most rows.
        context_tokens: the longest prompt and completion together.
        vocab_size: of the model.
        device: of the tensors that it hands to the sampler.
        routing: of a model whose routers are recorded.
    """

    def __init__(
        self,
        num_slots: int,
        context_tokens: int,
        vocab_size: int,
        device: torch.device,
        routing: RoutingSizes | None = None,
    ) -> None:
        self.samples: list[Sample | None] = [None] * num_slots
        self.num_rows = 0
        """Rows in use: every live sample lies below."""
        self.num_running = 0
        """Live samples."""
        self.lengths = np.zeros(num_slots, dtype=np.int64)
        """Cached tokens: prompt and completion without the last sampled token."""
        self.last_tokens = np.zeros(num_slots, dtype=np.int64)
        self.kv_versions = np.zeros(num_slots, dtype=np.int64)
        """The version under which the first cached token was computed; all are where no update continued with them."""
        self.experts = None if routing is None else RowExperts(num_slots, context_tokens, routing)
        """Of the rows' tokens, where they are recorded."""
        self._vocab_size = vocab_size
        self._device = device
        self._counts = np.zeros(num_slots, dtype=np.int64)
        self._is_alive = np.zeros(num_slots, dtype=np.bool_)
        self._limits = np.zeros(num_slots, dtype=np.int64)
        self._keys = np.zeros(num_slots, dtype=np.uint64)
        self._stop_ids = np.full((num_slots, 1), NO_TOKEN, dtype=np.int64)
        self._has_stop_text = np.zeros(num_slots, dtype=np.bool_)
        self._temperatures = np.ones(num_slots, dtype=np.float32)
        self._is_greedy = np.zeros(num_slots, dtype=np.bool_)
        self._top_k = np.full(num_slots, vocab_size, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._penalties = np.full((num_slots, 3), NO_PENALTIES, dtype=np.float32)
        self._is_penalised = np.zeros(num_slots, dtype=np.bool_)
        self._history: History | None = None
        """None before the first row with penalties."""
        self._token_ids = np.empty((num_slots, context_tokens), dtype=np.int32)
        self._log_probs = np.empty((num_slots, context_tokens), dtype=np.float32)
        self._sampling: RowSampling | None = None
        """None after a change of rows."""
        self._draws_ahead: list[npt.NDArray[np.float64]] = []
        self.ended_tokens: Counter[str | None] = Counter()
        """Sampled since the start, of samples that have ended, by adapter."""

    def alive(self) -> Rows:
        """List the rows that hold a sample."""
        return np.flatnonzero(self._is_alive)

    def free_rows(self, num: int) -> Rows:
        """Find ``num`` rows to join, the lowest first."""
        return np.flatnonzero(~self._is_alive)[:num]

    def rows_of(self, owner: ActiveRequest) -> Rows:
        """List the rows that hold samples of a request."""
        held = [row for row in self.alive() if (sample := self.samples[row]) is not None and sample.owner is owner]
        return np.array(held, dtype=np.int64)

    def tokens_by_adapter(self) -> "Counter[str | None]":
        """Count the tokens that were sampled since the start, by adapter."""
        found = self.ended_tokens.copy()
        for row in self.alive().tolist():
            sample = self.samples[row]
            assert sample is not None
            found[sample.owner.request.adapter] += int(self._counts[row]) - sample.resumed
        return found

    def join(self, rows: Rows, owner: ActiveRequest, version: int) -> None:
        """Put the next seeds of a request into free rows; ``starts`` is cached and nothing is sampled yet."""
        request, sampling = owner.request, owner.request.sampling
        first = owner.admitted
        for index, row in enumerate(rows.tolist(), start=first):
            self.samples[row] = Sample(owner, index, [(0, version)])
        owner.admitted += rows.size
        self.num_running += rows.size
        self.num_rows = max(self.num_rows, int(rows.max()) + 1)
        self._is_alive[rows] = True
        self._keys[rows] = seed_keys(np.array(request.seeds[first : owner.admitted], dtype=np.uint64))
        self.lengths[rows] = len(request.prompt_ids)
        self.kv_versions[rows] = version
        self._counts[rows] = 0
        if self.experts is not None:
            self.experts.begin(rows)
        self._limits[rows] = sampling.max_new_tokens
        self._is_greedy[rows] = sampling.greedy
        if not sampling.greedy:
            self._temperatures[rows] = sampling.temperature
            self._top_k[rows] = min(sampling.top_k or self._vocab_size, self._vocab_size)
            self._top_p[rows] = sampling.top_p
            self._min_p[rows] = sampling.min_p
        if sampling.penalties != NO_PENALTIES:
            self._penalise(rows, request)
        if len(owner.stop_ids) > self._stop_ids.shape[1]:
            more = len(owner.stop_ids) - self._stop_ids.shape[1]
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, more)), constant_values=NO_TOKEN)
        self._stop_ids[rows, : len(owner.stop_ids)] = owner.stop_ids
        self._has_stop_text[rows] = owner.stop_text is not None
        self._sampling = None
        for index, row in enumerate(rows.tolist(), start=first):
            prefix = owner.prefix_of(index, version)
            if prefix is not None:
                self._resume(row, prefix, version)

    def _penalise(self, rows: Rows, request: GenerationRequest) -> None:
        if self._history is None:
            self._history = History(len(self.samples), self._vocab_size, self._device)
        self._penalties[rows] = request.sampling.penalties
        self._is_penalised[rows] = True
        prompt_ids = torch.tensor(request.prompt_ids)
        for row in rows.tolist():
            self._history.begin(row, prompt_ids)

    @property
    def needs_last_tokens(self) -> bool:
        """Whether how the next tokens are sampled hangs on the last ones."""
        return bool(self._is_penalised.any())

    def _resume(self, row: int, prefix: Prefix, version: int) -> None:
        sample, num = self.samples[row], len(prefix.token_ids)
        assert sample is not None
        sample.runs, sample.resumed = list(prefix.versions), num
        if sample.runs[-1][1] != version:
            sample.runs.append((num, version))
        self._token_ids[row, :num] = prefix.token_ids
        self._log_probs[row, :num] = prefix.log_probs
        self._counts[row] = num
        self.lengths[row] += num
        if self.experts is not None and prefix.experts is not None:
            self.experts.resume(row, prefix.experts)
        if self._history is not None and self._is_penalised[row]:
            sampled = torch.tensor(prefix.token_ids, dtype=torch.int64)
            self._history.add(torch.full_like(sampled, row), sampled)

    def draws(self, rows: Rows | slice) -> npt.NDArray[np.float64]:
        """Draw the random number of each row's next token."""
        return uniforms(self._keys[rows], self._counts[rows])

    def step_draws(self, unread: int = 0) -> npt.NDArray[np.float64]:
        """Draw for all rows in use, as ``draws`` does; those of some steps are made at once, until rows change.

        Args:
            unread: tokens of each row that are sampled and not recorded.
        """
        if self._sampling is None or not self._draws_ahead:
            steps = self._counts[: self.num_rows] + unread + np.arange(DRAWS_AHEAD)[:, None]
            self._draws_ahead = list(uniforms(self._keys[: self.num_rows], steps)[::-1])
        return self._draws_ahead.pop()

    def sampling(self) -> RowSampling:
        """Describe how the rows in use are sampled; computed again only after a change of rows."""
        if self._sampling is None:
            self._sampling = self.sampling_of(np.arange(self.num_rows))
        return self._sampling

    def sampling_of(self, rows: Rows) -> RowSampling:
        """Describe how rows are sampled."""
        greedy, temperatures = self._is_greedy[rows], self._temperatures[rows]
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        filtered = np.flatnonzero((top_k < self._vocab_size) | (top_p < 1) | (min_p > 0))
        return RowSampling(
            temperatures=self._tensor(temperatures) if (temperatures != 1).any() else None,
            greedy=self._tensor(greedy) if greedy.any() else None,
            filtered=self._tensor(filtered) if filtered.size else None,
            top_k=self._tensor(top_k[filtered]) if filtered.size else None,
            top_p=self._tensor(top_p[filtered]) if filtered.size else None,
            min_p=self._tensor(min_p[filtered]) if min_p.any() else None,
            widest_top_k=int(top_k[filtered].max(initial=0)),
            penalties=self._penalties_of(rows),
        )

    def _penalties_of(self, rows: Rows) -> RowPenalties | None:
        places = np.flatnonzero(self._is_penalised[rows])
        if self._history is None or not places.size:
            return None
        chosen = rows[places]
        repetition, presence, frequency = self._tensor(self._penalties[chosen]).unsqueeze(2).unbind(1)
        indices = self._tensor(places), self._tensor(chosen)
        return RowPenalties(*indices, repetition, presence, frequency, self._history)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def record(
        self,
        rows: Rows,
        token_ids: npt.NDArray[np.int64],
        log_probs: npt.NDArray[np.float32],
        chosen: Chosen | None = None,
    ) -> Rows:
        """Append a sampled token to rows, those without a sample left out.

        Args:
            rows: that were computed.
            token_ids, log_probs: what was sampled.
            chosen: experts of the tokens that were read for it, [rows, layers, top_k]; None where the prefill has them.

        Returns:
            The rows whose completion ended by it.
        """
        if self.num_running < rows.size:
            is_alive = self._is_alive[rows]
            rows, token_ids, log_probs = rows[is_alive], token_ids[is_alive], log_probs[is_alive]
            chosen = None if chosen is None else chosen[is_alive]
        if self.experts is not None and chosen is not None:
            self.experts.append(rows, chosen)
        counts = self._counts[rows]
        self._token_ids[rows, counts] = token_ids
        self._log_probs[rows, counts] = log_probs
        self.last_tokens[rows] = token_ids
        self._counts[rows] = counts = counts + 1
        if self._history is not None and (penalised := self._is_penalised[rows]).any():
            self._history.add(torch.from_numpy(rows[penalised]), torch.from_numpy(token_ids[penalised]))
        ended = (counts >= self._limits[rows]) | self._hits_stop_id(rows)
        if self._has_stop_text.any():
            ended |= self._ends_with_text(rows)
        return rows[ended]

    def some_end_for_certain(self) -> bool:
        """Return whether a sample ends with its next token, whichever that is."""
        return bool((self._is_alive & (self._counts + 1 >= self._limits)).any())

    def _hits_stop_id(self, rows: Rows) -> npt.NDArray[np.bool_]:
        if self._stop_ids.shape[1] == 1:
            only: npt.NDArray[np.bool_] = self._stop_ids[rows, 0] == self.last_tokens[rows]
            return only
        hits: npt.NDArray[np.bool_] = (self._stop_ids[rows] == self.last_tokens[rows, None]).any(axis=1)
        return hits

    def _ends_with_text(self, rows: Rows) -> npt.NDArray[np.bool_]:
        ended = self._has_stop_text[rows]
        for place in np.flatnonzero(ended):
            row = rows[place]
            sample = self.samples[row]
            assert sample is not None and sample.owner.stop_text is not None
            ended[place] = sample.owner.stop_text.ends(self._token_ids[row, : self._counts[row]])
        return ended

    def leave_finished(self, rows: Rows) -> list[ActiveRequest]:
        """Take samples that ``record`` reported out of their rows; give the requests that this finishes."""
        stopped = self._hits_stop_id(rows)
        if self._has_stop_text[rows].any():
            stopped |= self._ends_with_text(rows)
        reasons = [FinishReason.STOP if is_stopped else FinishReason.LENGTH for is_stopped in stopped.tolist()]
        owners = {id(owner): owner for owner in self.leave(rows, reasons)}
        return [owner for owner in owners.values() if owner.is_finished]

    def leave(self, rows: Rows, reasons: Sequence[FinishReason]) -> list[ActiveRequest]:
        """Take samples out of their rows and give their owners the completions; gives the owner of each."""
        owners = []
        for row, reason in zip(rows.tolist(), reasons, strict=True):
            sample, count = self.samples[row], int(self._counts[row])
            assert sample is not None
            sample.owner.completions[sample.index] = Completion(
                token_ids=self._token_ids[row, :count].copy(),
                log_probs=self._log_probs[row, :count].copy(),
                versions=tuple(run for run in sample.runs if run[0] < count),
                finish_reason=reason,
                num_resumed=sample.resumed,
                experts=None if self.experts is None or not count else self.experts.of(row),
            )
            owners.append(sample.owner)
            self.ended_tokens[sample.owner.request.adapter] += count - sample.resumed
        self.num_running -= rows.size
        self._vacate(rows)
        return owners

    def _vacate(self, rows: Rows) -> None:
        """Make rows such that computing them along does no harm and asks for nothing."""
        for row in rows.tolist():
            self.samples[row] = None
        self._is_alive[rows] = False
        self._has_stop_text[rows] = self._is_greedy[rows] = self._is_penalised[rows] = False
        self._penalties[rows] = NO_PENALTIES
        self._min_p[rows] = 0
        self._stop_ids[rows] = NO_TOKEN
        self._temperatures[rows] = self._top_p[rows] = 1
        self._top_k[rows] = self._vocab_size
        self.lengths[rows] = self._counts[rows] = self.last_tokens[rows] = 0
        alive = self.alive()
        self.num_rows = int(alive[-1]) + 1 if alive.size else 0
        self._sampling = None

    def compaction(self) -> tuple[Rows, Rows]:
        """Plan to move the highest rows into the free ones below: (sources, targets)."""
        alive = self.alive()
        return alive[alive >= alive.size], np.flatnonzero(~self._is_alive[: alive.size])

    def move(self, sources: Rows, targets: Rows) -> None:
        """Move samples to free rows, as ``compaction`` planned."""
        per_row: list[npt.NDArray[Any]] = [self.lengths, self.last_tokens, self._counts, self._is_alive, self._limits]
        per_row += [self.kv_versions]
        per_row += [self._keys, self._stop_ids, self._has_stop_text]
        per_row += [self._temperatures, self._is_greedy, self._top_k, self._top_p]
        per_row += [self._min_p, self._penalties, self._is_penalised]
        if self._history is not None:
            self._history.move(torch.from_numpy(sources), torch.from_numpy(targets))
        for array in per_row:
            array[targets] = array[sources]
        longest = int(self._counts[sources].max())
        for sampled in (self._token_ids, self._log_probs):
            sampled[targets, :longest] = sampled[sources, :longest]
        if self.experts is not None:
            self.experts.move(sources, targets)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.samples[target] = self.samples[source]
        self._vacate(sources)

    def tag(self, version: int, adapter: str | None = None) -> None:
        """Note that the next tokens of every sample with this adapter, or with none, are sampled under ``version``."""
        for row in self.alive():
            sample = self.samples[row]
            assert sample is not None
            if sample.owner.request.adapter != adapter:
                continue
            count = int(self._counts[row])
            if sample.runs[-1][0] == count:
                sample.runs.pop()
            if not sample.runs or sample.runs[-1][1] != version:
                sample.runs.append((count, version))

    def cached_tokens(self, row: int) -> npt.NDArray[np.int64]:
        """List the tokens whose KV the row holds: the prompt and all sampled tokens but the last."""
        sample = self.samples[row]
        assert sample is not None
        prompt = np.array(sample.owner.request.prompt_ids, dtype=np.int64)
        return np.concatenate([prompt, self._token_ids[row, : max(self._counts[row] - 1, 0)].astype(np.int64)])

    def images_of(self, row: int) -> tuple[PromptImage, ...]:
        """List the images of a row's prompt."""
        sample = self.samples[row]
        assert sample is not None
        return sample.owner.request.images

    def broken(self) -> list[ActiveRequest]:
        """List the requests with a sample whose last log-probability is not finite."""
        alive = self.alive()
        bad = alive[~np.isfinite(self._log_probs[alive, self._counts[alive] - 1])]
        owners = {id(sample.owner): sample.owner for row in bad if (sample := self.samples[row]) is not None}
        return list(owners.values())


def cached(batch: Batch, rows: Rows) -> list[Start]:
    """List what rows have cached, to be computed again."""
    found = []
    for at, row in enumerate(rows.tolist()):
        sample = batch.samples[row]
        assert sample is not None
        adapter = sample.owner.request.adapter
        found.append(Start(batch.cached_tokens(row), rows[at : at + 1], batch.images_of(row), adapter))
    return found
